"""Attention for layers of Flax: `attention_fn=` of NNX and of Linen.

Examples:
    >>> import jax.numpy as jnp
    >>> import energy_attn as ea
    >>> x = jnp.ones((3, 2, 4))
    >>> ea.flax.attention_fn(is_causal=True)(x, x, x).shape
    (3, 2, 4)
"""

from ._attention_fn import attention_fn as attention_fn
