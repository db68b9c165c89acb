"""The commands of `python -m energy_attn`."""
