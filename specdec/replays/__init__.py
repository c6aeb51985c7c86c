"""Record a text once; judge any policy, every static tree and the clairvoyant bound on it."""
