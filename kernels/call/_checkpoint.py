"""The names by which policies of `jax.checkpoint` keep what the derivative of a call needs."""

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from ._state import AttentionState

CHECKPOINT_NAMES = ("energy_attn_out", "energy_attn_lse")
"""The names, by `jax.ad_checkpoint.checkpoint_name`, of what the derivative of a call keeps beside its operands: `out`,
and what is of the size of `lse`.

A policy of `jax.checkpoint` that keeps them, as `jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)`, or
one that offloads them, has a backward that computes all else again, but no attention: the derivative needs
queries, keys and values, which are cheap, and the state, which is not. On a mesh the states before and after a merge
have these names alike; a tree's merge of sharded queries takes its maxima again.

Examples:
    >>> import jax, jax.numpy as jnp
    >>> import energy_attn as ea
    >>> policy = jax.checkpoint_policies.save_only_these_names(*ea.CHECKPOINT_NAMES)
    >>> layer = jax.checkpoint(lambda x: ea.attention(x, x, x).sum(), policy=policy)
    >>> jax.grad(layer)(jnp.ones((3, 2, 4))).shape
    (3, 2, 4)
"""


def named(state: AttentionState) -> AttentionState:
    """A state that a policy of `jax.checkpoint` may keep, by `CHECKPOINT_NAMES`."""
    return AttentionState(*map(checkpoint_name, state, CHECKPOINT_NAMES))


def named_rest(rest: Array) -> Array:
    """What rounding took from energies, by the name of `lse`."""
    return checkpoint_name(rest, CHECKPOINT_NAMES[1])
