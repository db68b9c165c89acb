"""Kernels of other libraries, behind adapters that make states of their results."""
