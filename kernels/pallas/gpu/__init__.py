"""Flash attention for NVIDIA GPUs, in Pallas on Triton."""
