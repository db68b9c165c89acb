"""The blockwise implementation: XLA's operations, memory O(T·block), any platform.

Forward and backward iterate over blocks of scores and keep running statistics; the `T×S` matrix is never stored (online
softmax: Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2: Dao, arXiv 2307.08691).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._kernel import AbstractKernel
from ..call._operands import KernelCall, Operands, out_dtype
from ..call._state import AttentionState, all_computed, lse_dtype, safe_shift
from ..fold._call import empty_like
from ..masks._abstract import AbstractMask
from ._blocks import BlockedOperands
from ._blockwise_derivatives import (
    backward_unrounded,
    cast_like,
    row_cotangents,
    tangent_of,
    tangent_sums,
)
from ._grid import BLOCK_SIZES, BlockSizes, numbers
from ._reference import normalised


@dataclasses.dataclass(frozen=True)
class Blockwise(AbstractKernel):
    """XLA's operations: any call, any platform, memory O(T·block)."""

    sizes: BlockSizes = BLOCK_SIZES

    name = "blockwise"
    platforms = ()
    interpreted = ()
    exported = True
    masks = (AbstractMask,)
    scores = True

    def check(self, call: KernelCall) -> None:
        """Takes every call."""

    def forward(self, call: KernelCall) -> AttentionState:
        """The online softmax over blocks of keys."""
        return self.forward_and_rest(call)[0]

    def forward_and_rest(self, call: KernelCall) -> tuple[AttentionState, Array]:
        """`forward`, and the rounding error of `lse`."""
        return self.forward_and_maximum(call)[:2]

    def forward_and_maximum(self, call: KernelCall) -> tuple[AttentionState, Array, Array]:
        """`forward_and_rest`, and the largest score.

        JAX's derivative of this would store every block; `backward` is used instead.
        """
        operands, settings = call.operands, call.settings
        batch, query_len = operands.query.shape[:2]
        value = operands.value
        if batch == 0 or query_len == 0 or operands.key.shape[1] == 0:
            state = empty_like(settings, operands)
            return state, jnp.zeros_like(state.lse), state.lse
        blocks = BlockedOperands(operands, settings, self.sizes)
        g = blocks.grid
        dtype = lse_dtype(operands.query.dtype)
        # Not zeroed where absent: scores of hidden keys are replaced, and values are zeroed block by block.
        keys, values = (g.pad_keys(x) for x in (operands.key, value))

        def one_block_of_queries(n: Array) -> tuple[Array, ...]:
            query_index = blocks.index_of_queries(n)

            def one_block_of_keys(carry: tuple[Array, ...], j: Array) -> Any:
                index = query_index._replace(key=j)

                def attend(maximum: Array, total: Array, sums: Array) -> tuple[Array, Array, Array]:
                    query, key = g.take_queries(blocks.query, index), g.take_keys(keys, index)
                    # m' = max(m, max s), w = e^{s - m'}, l' = e^{m - m'} l + Σ w, o' = e^{m - m'} o + Σ w v
                    scores = blocks.unscaled(query, key, index)
                    new = jnp.maximum(maximum, scores.max(-1, keepdims=True))
                    shift = safe_shift(new)
                    # Subtract first: the difference is exactly 0 where the score is the maximum.
                    weights = jnp.exp((scores - shift) * blocks.unit)
                    decay = jnp.exp((maximum - shift) * blocks.unit)
                    total = total * decay + weights.sum(-1, keepdims=True)
                    # Values are cast to the dtype of the weights, which is that of the scores.
                    weighed = blocks.product(
                        weights, blocks.take_values(values, index).astype(dtype)
                    )
                    return new, total, sums * decay + weighed

                meet = blocks.meet(index)
                if meet is not None:
                    return lax.cond(meet, attend, lambda *carry: carry, *carry), None
                return attend(*carry), None

            fills = (-jnp.inf, 1), (0.0, 1), (0.0, value.shape[-1])
            start = tuple(blocks.full(fill, batch, g.rows, width) for fill, width in fills)
            (maximum, total, sums), _ = lax.scan(one_block_of_keys, start, numbers(g.key_blocks))
            # out = o / l, F = m + log l
            maximum = maximum * blocks.unit
            total, lse, rest = normalised(total, maximum)
            return (sums / total).astype(out_dtype(operands, settings)), lse, rest, maximum

        rows = lax.map(one_block_of_queries, numbers(g.kv_heads * g.query_blocks))
        out, *numbers_of_rows = (g.join_queries(x, query_len) for x in rows)
        lse, rest, maximum = (x[..., 0] for x in numbers_of_rows)
        if settings.needs.maximum and value.shape[-1]:
            out, lse, rest, maximum = all_computed(out, lse, rest, maximum)
        return AttentionState(out, lse), rest, maximum

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        r"""The vector-Jacobian product of `(out, lse)` with both cotangents, in blocks.

        With $P_a = e^{s_a - F}$ and $\delta = \dot{out}\cdot out - \dot{lse}$,

        $$\dot s_a = P_a (\dot{out}\cdot v_a - \delta), \quad \dot v_a = \sum P_a \dot{out}, \quad
          \dot q = \mathrm{scale} \sum_a \dot s_a k_a, \quad \dot k_a = \mathrm{scale} \sum \dot s_a q.$$

        A score multiplies $\dot s_a$ by $g'$ in the last two; its arrays get
        $\sum \dot s_a\, \partial g/\partial\theta$. Plain JAX, and so differentiable itself.
        """
        operands, settings = call.operands, call.settings
        rows = row_cotangents(state, cotangent)
        return cast_like(backward_unrounded(operands, settings, rows, self.sizes), operands)

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        operands, settings = call.operands, call.settings
        sums = tangent_sums(operands, settings, state.lse, directions, self.sizes)
        return tangent_of(state, sums.means())
