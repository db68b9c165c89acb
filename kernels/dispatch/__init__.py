"""The choice of a kernel for a call, by platform, and the derivatives of its state."""
