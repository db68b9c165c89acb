"""Functions of a Gibbs measure: the paper's Γ, and attention as its saddle point.

The conjugate of the free energy, the rate function and the maximum a posteriori are methods of
[`Gibbs`][energy_attn.Gibbs].

Examples:
    >>> import jax, jax.numpy as jnp
    >>> import energy_attn as ea
    >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
    >>> bool(jnp.allclose(ea.bayes.saddle_attention(F).point, F.attention(), atol=1e-4))
    True
"""

from ._extrema import gamma as gamma
from ._extrema import saddle_attention as saddle_attention
