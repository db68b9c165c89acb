"""First light: checks and times the GPU kernels on a new GPU, in 25 minutes and without a network."""
