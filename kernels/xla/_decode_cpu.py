"""The decode implementation for CPUs: values are read at the speed of memory."""

import dataclasses

import jax.numpy as jnp

from ..call._kernel import AbstractKernel, check_operands
from ..call._operands import Operands, Settings, hide_unreachable, present_keys
from ..call._state import AttentionState, safe_shift
from ..masks._abstract import AbstractMask
from . import _blockwise
from ._decode import check_rows, diagonal_scores, state_of_rows
from ._decode_tangent import tangent
from ._softmax import normaliser
from ._weighed_sum import Pieces, maximum_of, weighed_sum

MOST_ROWS = 128
PIECES = Pieces()


@dataclasses.dataclass(frozen=True)
class DecodeCPU(AbstractKernel):
    """XLA's operations as XLA:CPU runs them fastest, for few queries and many key heads.

    Scores are those of `decode`, and so is memory, O(T·N·S). XLA would send pieces of the values between the devices
    of a program that it partitions: such programs have `decode`.

    Attributes:
        pieces: how values are read.
        most: rows of a key head, for each key head: with more, the product of `decode` is faster, which does the
            work of all key heads for each row.
    """

    pieces: Pieces = PIECES
    most: int = 1

    name = "decode_cpu"
    platforms = ("cpu",)
    interpreted = ()
    exported = True
    masks = (AbstractMask,)
    scores = True

    def check(self, operands: Operands, settings: Settings) -> None:
        """Raises `NotImplementedError` for 64 bits, empty axes, many rows, or a score with a source."""
        check_operands(operands, ("float32", "bfloat16", "float16"), without=())
        check_rows(operands, settings, MOST_ROWS)
        query_len, heads = operands.query.shape[1:3]
        kv_heads = operands.key.shape[2]
        rows = query_len * heads // kv_heads
        if rows > self.most * kv_heads:
            raise NotImplementedError(
                f"query: wanted at most {self.most * kv_heads} rows a key head, got {rows}"
            )

    def forward(
        self, operands: Operands, settings: Settings, platform: str | None
    ) -> AttentionState:
        """One product for all scores, and one pass over the values."""
        operands = hide_unreachable(operands, settings)
        value, shown = operands.value, present_keys(operands)
        batch, query_len, heads = operands.query.shape[:3]
        key_len, kv_heads = value.shape[1:3]
        if shown is not None:
            shown = jnp.broadcast_to(shown, (batch, key_len))
        scores = diagonal_scores(operands, settings, keys_first=True)
        shift = safe_shift(maximum_of(scores, self.pieces))
        weights = jnp.exp(scores - shift)
        total, lse = normaliser(weights.sum(1, keepdims=True), shift, 1)
        sums = weighed_sum(weights, value, shown, self.pieces)
        sums = sums.reshape(batch, kv_heads, heads // kv_heads, query_len, -1)
        return state_of_rows(sums, total[:, 0], lse, operands, settings)

    def backward(
        self,
        operands: Operands,
        settings: Settings,
        state: AttentionState,
        cotangent: AttentionState,
        platform: str | None,
    ) -> Operands:
        """The backward of the blockwise implementation."""
        return _blockwise.backward(operands, settings, state, cotangent)

    def tangent(
        self,
        operands: Operands,
        settings: Settings,
        state: AttentionState,
        directions: Operands,
        platform: str | None,
    ) -> AttentionState:
        """That of `decode`."""
        return tangent(operands, settings, state, directions)
