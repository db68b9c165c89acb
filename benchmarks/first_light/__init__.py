"""First light: what the kernels for GPUs do on a GPU that none has run on, in 25 minutes and without a network."""
