"""Energies whose attention has weights that are exactly zero."""
