"""Targets and drafters: tree attention, the key-value cache, EAGLE, and loading from files or the hub."""
