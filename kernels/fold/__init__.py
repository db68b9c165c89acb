"""Fold programs and the canonical tree: what calls with `reproducible=True` compute, on every platform.

To read in this order: `_programs` (the equations, each once), `_tree` (the order of merges), `_kernel` (the kernel
that runs the programs). The loops are in `kernels/xla/_canonical*.py` and `kernels/pallas/canonical/`.
"""
