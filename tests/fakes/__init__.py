"""Small pairs, recordings and model families that tests share; nothing here is trained."""
