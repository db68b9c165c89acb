"""Layers, as Equinox has them in its `nn`.

Examples:
    >>> import jax
    >>> import energy_attn as ea
    >>> layer = ea.nn.MultiheadAttention(2, 16, key=jax.random.key(0))
    >>> layer.num_heads
    2
"""

from ._multihead import MultiheadAttention as MultiheadAttention
