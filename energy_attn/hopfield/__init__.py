"""Retrieval from modern Hopfield networks, and energy-based blocks."""
