"""The core: draft trees, the verification rule, the draft-and-verify cycle, policies, decoding."""
