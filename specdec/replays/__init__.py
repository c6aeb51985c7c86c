"""Record a text once; evaluate any policy, every static tree and the clairvoyant bound on it."""
