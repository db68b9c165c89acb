"""Merge strategies: how the states of all devices become one that all of them have."""
