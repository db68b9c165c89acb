"""Families of decoders, and how each differs from a Llama."""
