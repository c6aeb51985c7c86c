"""Training of drafters: one trainer, several objectives."""
