"""One file a system: what it observes, what it answers, and its settings."""
