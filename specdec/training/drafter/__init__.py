"""How drafters learn: one trainer, an objective each."""
