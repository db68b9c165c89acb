"""Benchmarks of this library and of other libraries; run from the root of a checkout.

`python -m benchmarks` compares; `python -m benchmarks.network` fits a model of a network, `python -m benchmarks.tune`
finds tiles for a GPU, and `python -m benchmarks.first_light` checks and times the kernels on a GPU.
"""
