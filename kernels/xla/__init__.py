"""Kernels in plain JAX, which run everywhere."""
