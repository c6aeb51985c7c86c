"""Training of controllers and drafters: environment, PPO, a resumable run, a file per system."""
