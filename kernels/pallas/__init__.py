"""Kernels written in Pallas, for TPUs and for NVIDIA GPUs."""
