"""One file per system: its observation, its answers, its settings."""
