"""Flash attention for NVIDIA's Hopper and Blackwell GPUs, in Pallas on Mosaic GPU."""
