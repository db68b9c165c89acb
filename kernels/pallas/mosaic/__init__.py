"""Flash attention for NVIDIA's Hopper GPUs, in Pallas on Mosaic GPU."""
