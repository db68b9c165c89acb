"""The reference implementation: slow, obviously right, differentiable to any order in both modes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..call._kernel import AbstractKernel
from ..call._operands import (
    Operands,
    Settings,
    bound,
    cotangents,
    hide_unreachable,
    out_dtype,
    zero_absent,
)
from ..call._state import AttentionState, holds_keys, lse_dtype, precision
from ..masks._abstract import AbstractMask
from ..masks._visibility import visible
from ._softmax import softmax


class Reference(AbstractKernel):
    """Attention with the whole `[B, N, T, S]` matrix in memory; takes every call.

    Plain differentiable JAX, so `jax.grad`, `jax.jvp`, `jax.linearize` and `jax.hessian` of
    `forward` work to any order.
    """

    name = "reference"
    platforms = ()
    interpreted = ()
    exported = True
    masks = (AbstractMask,)

    def check(self, operands: Operands, settings: Settings) -> None:
        """Takes every call."""

    def forward(
        self, operands: Operands, settings: Settings, platform: str | None
    ) -> AttentionState:
        """The softmax and the weighted sum, as in the equations."""
        operands = hide_unreachable(operands, settings)
        query, key, value = zero_absent(operands)[:3]
        batch, query_len, heads, width = query.shape
        key_len, kv_heads = key.shape[1:3]
        group = heads // kv_heads

        grouped = query.reshape(batch, query_len, kv_heads, group, width)
        scores = jnp.einsum(
            "btkgh,bskh->bkgts",
            grouped,
            key,
            precision=precision(query.dtype),
            preferred_element_type=lse_dtype(query.dtype),
        )
        weights, total, lse = softmax(
            masked(scores.reshape(batch, heads, query_len, key_len), operands, settings)
        )
        weights = (weights / total).astype(value.dtype)
        out = jnp.einsum(
            "bkgts,bskh->btkgh",
            weights.reshape(batch, kv_heads, group, query_len, key_len),
            value,
            precision=precision(query.dtype),
            preferred_element_type=lse_dtype(value.dtype),
        )
        out = out.reshape(batch, query_len, heads, value.shape[-1])
        lse = lse.transpose(0, 2, 1)
        # a fully masked row passes no cotangent to the values
        out = jnp.where(holds_keys(lse)[..., None], out, 0)
        return AttentionState(out.astype(out_dtype(operands, settings)), lse)

    def backward(
        self,
        operands: Operands,
        settings: Settings,
        state: AttentionState,
        cotangent: AttentionState,
        platform: str | None,
    ) -> Operands:
        """JAX's derivative of `forward`."""
        names = Operands._fields[:4]

        def run(*arrays: Array) -> AttentionState:
            return self.forward(
                operands._replace(**dict(zip(names, arrays, strict=True))), settings, platform
            )

        found = jax.vjp(run, *operands[:4])[1](cotangent)
        return cotangents(*found)

    def tangent(
        self,
        operands: Operands,
        settings: Settings,
        state: AttentionState,
        directions: Operands,
        platform: str | None,
    ) -> AttentionState:
        """JAX's derivative of `forward`."""
        moving = {name: x for name, x in directions._asdict().items() if x is not None}

        def run(moving: dict[str, Array]) -> AttentionState:
            return self.forward(operands._replace(**moving), settings, platform)

        given = {name: getattr(operands, name) for name in moving}
        return jax.jvp(run, (given,), (moving,))[1]


def masked(scores: Float[Array, "B N T S"], operands: Operands, settings: Settings) -> Array:
    """Scores from products of queries and keys: scaled, biased, minus infinity where hidden.

    Positions are compared only if they are given.
    """
    scores = scores * settings.scale
    if operands.bias is not None:
        scores = scores + operands.bias.astype(scores.dtype)
    queries, keys = operands.query_positions, operands.key_positions
    if queries is not None and keys is not None:
        seen = visible(bound(settings, operands), queries[:, :, None], keys[:, None, :])
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
    queries, keys = operands.query_segments, operands.key_segments
    if queries is not None and keys is not None:
        shared = queries[:, :, None] == keys[:, None, :]
        scores = jnp.where(shared[:, None], scores, -jnp.inf)
    if operands.mask is not None:
        scores = jnp.where(operands.mask, scores, -jnp.inf)
    return scores
