"""Targets, drafters, their files, and loading them by name."""
