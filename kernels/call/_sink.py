"""A sink: one more term of the partition function, whose value is zero."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._checks import check_floating, received
from ._state import AttentionState, safe_shift, share


def check_sink(sink: object, rows: tuple[int, ...] | None = None) -> Any:
    """Returns `sink` if it is a score for each head of rows `(B, T, N)` or `(T, N)`; None: of rows not yet known.

    Raises `TypeError` if it is not a floating array and `ValueError` for a wrong shape.
    """
    array = check_floating("sink", sink)
    if rows is None:
        if array.ndim not in (1, 2):
            raise ValueError(f"sink: wanted shape (N,) or (B, N), got {received(sink)}")
        return array
    heads = rows[-1]
    shapes = [(heads,)] if len(rows) == 2 else [(heads,), (rows[0], heads)]
    if array.shape not in shapes:
        raise ValueError(
            f"sink: wanted a score for each head, {' or '.join(map(str, shapes))}, "
            f"got {received(sink)}"
        )
    return array


def with_sink(state: AttentionState, sink: Array, positions: Array | None) -> AttentionState:
    r"""The state merged with that of a checked sink, $(0, b)$, elementwise.

    $$F = \log(e^{F_{keys}} + e^b), \qquad \mathrm{out} = e^{F_{keys} - F}\, \mathrm{out}_{keys}, \qquad
      \frac{\partial F}{\partial b} = e^{b - F}$$

    `positions`: those of the queries, `[B or 1, T]`, negative where a query is absent, which then has no
    sink; None: all are there.
    """
    scores = jnp.asarray(sink, state.lse.dtype)
    scores = _as_rows(scores[None, None] if scores.ndim == 1 else scores[:, None], state.lse)
    if positions is not None:
        scores = jnp.where(_as_rows(positions[..., None] >= 0, state.lse), scores, -jnp.inf)
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


def _as_rows(x: Array, rows: Array) -> Array:
    """`x` broadcast to the shape of `rows`, and sharded over explicit mesh axes as they are."""
    x, sharding = jnp.broadcast_to(x, rows.shape), jax.typeof(rows).sharding
    same = tuple(jax.typeof(x).sharding.spec) == tuple(sharding.spec)
    return x if same else jax.reshard(x, sharding)
