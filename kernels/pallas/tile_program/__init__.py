"""The program of a tile of rows on TPUs and NVIDIA's GPUs, with products that are written in Pallas."""
