"""Prompts: benchmark suites, their splits, and the checks of answers."""
