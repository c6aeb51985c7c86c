"""Targets and drafters: tree attention, the key-value cache, EAGLE, and loading them from files or the hub."""
