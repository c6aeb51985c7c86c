"""How controllers and drafters learn: the environment, PPO, one resumable run, a file per system."""
