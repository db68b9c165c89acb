"""Masks that compose: which key positions a query position sees.

Examples:
    >>> import jax
    >>> import energy_attn as ea
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    >>> prefix = ea.masks.Causal() | ea.masks.Prefix(3)  # a prefix that all see, then causal
    >>> ea.attention(q, k, v, mask=prefix).shape
    (1, 8, 2, 4)
"""

from energy_attn.kernels.masks import *  # noqa: F403  # one list of the masks, there
