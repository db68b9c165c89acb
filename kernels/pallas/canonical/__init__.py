"""The kernels whose bits depend on a row and its keys alone, on TPUs and NVIDIA's GPUs."""
