"""Modern Hopfield networks and Energy Transformers: energies of states and of tokens.

Examples:
    >>> import jax, jax.numpy as jnp
    >>> import energy_attn as ea
    >>> memories = jax.random.normal(jax.random.key(0), (10, 1, 16))
    >>> solution = ea.hopfield.retrieve(memories[:1] + 0.1, memories, scale=4.0)
    >>> bool(jnp.allclose(solution.point, memories[:1], atol=0.1))
    True
"""

from ._block import EnergyAttentionBlock as EnergyAttentionBlock
from ._retrieve import retrieve as retrieve
