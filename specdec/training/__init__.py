"""Training of controllers and drafters: the environment, PPO, one resumable run, a file per system."""
