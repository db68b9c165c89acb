"""Merge strategies: algorithms that reduce the states of all devices to one, equal on all of them."""
