"""Terms that are added to the scores of a call: a source, a sink, and scores of a context's tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from .._checks import broadcasts, check_floating, received
from ._batch import flattened
from ._operands import Operands, Settings, dequantized
from ._state import AttentionState, lse_dtype, safe_shift, share


def with_source(settings: Settings, operands: Operands, source: Array) -> tuple[Settings, Operands]:
    r"""A call whose scores are those at a source `[B, T, N, Hv]`, as extra width of query and key.

    $$\mathrm{scale}\; q \cdot k + \zeta \cdot v = [\mathrm{scale}\; q, \zeta] \cdot [k, v]$$

    in the dtype of the scores. Eight bits are dequantized.
    """
    operands = dequantized(operands)
    query, key, value = operands.qkv
    dtype, width = lse_dtype(query.dtype, source.dtype), settings.scored_width or query.shape[-1]
    source, value = sharded_as(source, query, 3), sharded_as(value, key, 3)
    query = jnp.concatenate([query.astype(dtype) * settings.scale, source.astype(dtype)], -1)
    key = jnp.concatenate([key.astype(dtype), value.astype(dtype)], -1)
    settings = settings._replace(scale=1.0)
    if settings.score is not None:
        settings = settings._replace(score=settings.score.within(width))
    return settings, operands._replace(query=query, key=key)


def sharded_as(x: Array, like: Array, axes: int) -> Array:
    """Returns `x` with the sharding of `like` on its first `axes`."""
    sharding: Any = jax.typeof(like).sharding
    parts = tuple(sharding.spec)[:axes]
    if tuple(jax.typeof(x).sharding.spec)[:axes] == parts:
        return x
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*parts)))


def check_sink(sink: object, rows: tuple[int, ...] | None = None) -> Any:
    """Returns `sink` as `[N]` or `[B, N]` if it has a score for each head of `rows`, `(*B, T, N)`; None: not known."""
    array = check_floating("sink", sink)
    if rows is None:
        if array.ndim == 0:
            raise ValueError(f"sink: wanted shape (N,) or (B, N), got {received(sink)}")
        return array
    axes, heads = rows[:-2], rows[-1]
    if array.shape == (heads,):
        return array
    if not (axes and broadcasts(array.shape[:-1], axes) and array.shape[-1] == heads):
        shapes = [(heads,), (*axes, heads)] if axes else [(heads,)]
        raise ValueError(
            f"sink: wanted a score for each head, {' or '.join(map(str, shapes))}, "
            f"got {received(sink)}"
        )
    array = flattened(array, axes)
    return array if len(array) > 1 or axes == (1,) else array[0]


def with_sink(state: AttentionState, sink: Array, positions: Array | None) -> AttentionState:
    r"""Merges a state with the state of a checked sink, $(0, b)$, elementwise.

    $$F = \log(e^{F_{keys}} + e^b), \qquad \mathrm{out} = e^{F_{keys} - F}\, \mathrm{out}_{keys}, \qquad
      \frac{\partial F}{\partial b} = e^{b - F}$$

    JAX differentiates it. In reproducible calls `AbstractCanonical` folds the sink and has its gradient.

    `positions`: positions of the queries, `[B or 1, T]`; a query of negative position is absent and has no sink.
    None: all are present.
    """

    def as_rows(x: Array) -> Array:
        return sharded_as(jnp.broadcast_to(x, state.lse.shape), state.lse, state.lse.ndim)

    # F = log(e^{F_keys} + e^b), out = e^{F_keys - F} out_keys, shifted by m = max(F_keys, b)
    scores = jnp.asarray(sink, state.lse.dtype)
    scores = as_rows(scores[None, None] if scores.ndim == 1 else scores[:, None])
    if positions is not None:
        scores = jnp.where(as_rows(positions[..., None] >= 0), scores, -jnp.inf)
    # Plus infinity is the limit, whose derivative in the sink is 1 and in all else 0; a NaN is kept by 0 * NaN.
    infinite = jnp.isposinf(scores)
    finite = jnp.where(infinite, 0.0, scores)
    shift = safe_shift(jnp.maximum(*lax.stop_gradient((state.lse, finite))))
    total = jnp.exp(state.lse - shift) + jnp.exp(finite - shift)
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, shift + jnp.log(jnp.where(empty, 1.0, total)))
    lse = jnp.where(infinite, 0.0 * lse + scores, lse)
    part = share(state.lse, lse)
    # a product whose transpose is that of `dot_rows`
    out = jnp.einsum("btnh,btn->btnh", state.out, part, precision=lax.Precision.HIGHEST)
    return AttentionState(out, lse)


# The checkpoint name that marks the addition in a jaxpr.
TOKEN_SCORES = "energy_attn_token_scores"
# The active `TokenScores`, the outermost first; part of the keys of JAX's caches.
active_token_scores = jax.make_user_context(())


class TokenScores:
    """Per-key score offsets active during tracing, and whether an attention added them; compared by identity."""

    def __init__(self, scores: Float[Array, "B S"]):
        self.scores = scores
        self.used = False


def with_token_scores(bias: Array | None, batch: int, key_len: int) -> Array | None:
    for active in active_token_scores.value:
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
