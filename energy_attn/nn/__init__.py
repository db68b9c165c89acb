"""Equinox modules and penalties."""
