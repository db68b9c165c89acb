"""Additions to the scores of a call: a source, and numbers of a context's tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ._operands import Operands, Settings, dequantized
from ._state import lse_dtype


def with_source(settings: Settings, operands: Operands, source: Array) -> tuple[Settings, Operands]:
    r"""A call whose scores are those at a source `[B, T, N, Hv]`, as extra width of query and key.

    $$\mathrm{scale}\; q \cdot k + \zeta \cdot v = [\mathrm{scale}\; q, \zeta] \cdot [k, v]$$

    in the dtype of the scores. Eight bits are dequantized.
    """
    operands = dequantized(operands)
    query, key, value = operands.qkv
    dtype, width = lse_dtype(query.dtype, source.dtype), settings.scored_width or query.shape[-1]
    source, value = _as_split(source, query), _as_split(value, key)
    query = jnp.concatenate([query.astype(dtype) * settings.scale, source.astype(dtype)], -1)
    key = jnp.concatenate([key.astype(dtype), value.astype(dtype)], -1)
    settings = settings._replace(scale=1.0)
    if settings.score is not None:
        settings = settings._replace(score=settings.score.within(width))
    return settings, operands._replace(query=query, key=key)


def _as_split(x: Array, like: Array) -> Array:
    """`x` with the sharding of `like` on all axes but the last."""
    sharding: Any = jax.typeof(like).sharding
    parts = sharding.spec[: like.ndim - 1]
    if tuple(jax.typeof(x).sharding.spec[: like.ndim - 1]) == tuple(parts):
        return x
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*parts)))


# By which a program shows where they are added.
TOKEN_SCORES = "energy_attn_token_scores"
# The `TokenScores` in force, the outermost first. JAX's caches tell programs by them.
weighing = jax.make_user_context(())


class TokenScores:
    """Per-key score offsets active during tracing; compared by identity.

    Attributes:
        scores: `[B, S]` or `[1, S]`.
        used: whether an attention has added them.
    """

    def __init__(self, scores: Float[Array, "B S"]):
        self.scores = scores
        self.used = False


def with_token_scores(bias: Array | None, batch: int, key_len: int) -> Array | None:
    """A bias with the scores in force added.

    Raises `ValueError` for an attention over other keys than those that they are of.
    """
    for active in weighing.value:
        rows, number = active.scores.shape
        if number != key_len or rows not in (1, batch):
            raise ValueError(
                f"segments: wanted one for each key of every attention, of {batch} rows of {key_len} keys; "
                f"got {rows} of {number} (a cache or another sequence has keys of its own)"
            )
        active.used = True
        added = checkpoint_name(active.scores, TOKEN_SCORES)[:, None, None]
        bias = added if bias is None else bias.astype(added.dtype) + added
    return bias
