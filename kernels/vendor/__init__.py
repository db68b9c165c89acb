"""Adapters for the kernels of other libraries."""
