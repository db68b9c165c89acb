"""A call of a kernel: arguments and their checks, masks, the state, the abstract kernel."""
