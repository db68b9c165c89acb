"""Custom scores: functions of the product of a query and a key, with trainable parameters.

Examples:
    >>> import jax
    >>> import energy_attn as ea
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    >>> score = ea.scores.Compose(ea.scores.SoftCap(20.0), ea.scores.ALiBi(num_heads=2))
    >>> ea.attention(q, k, v, is_causal=True, score=score).shape
    (1, 8, 2, 4)
"""

from energy_attn.kernels.scores import *  # noqa: F403  # one list of the scores, there
