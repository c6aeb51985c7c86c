"""The idea: draft trees, one verification rule, the cycle that asks, policies that answer, and decode."""
