"""The core: draft trees, one verification rule, the draft-and-verify cycle, policies and decoding."""
