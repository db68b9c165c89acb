"""Attention and reductions over keys that are sharded: tree, ring, Ulysses, hybrid, gather."""
