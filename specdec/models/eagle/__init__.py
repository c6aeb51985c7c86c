"""EAGLE-1, 2 and 3: the network, drafting with it, and its checkpoints."""
