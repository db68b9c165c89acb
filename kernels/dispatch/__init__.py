"""Which kernel computes a call, on which platform, and how its state is differentiated."""
