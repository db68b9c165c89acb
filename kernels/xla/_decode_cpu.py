"""The decode implementation for CPUs: values are read at the speed of memory."""

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..call._kernel import check_operands
from ..call._operands import KernelCall, hide_unreachable, present_keys
from ..call._state import AttentionState, exp_from, safe_shift
from ._blocks import each_entry
from ._decode import AbstractDecode, check_rows, diagonal_scores, state_of_rows
from ._softmax import normalised
from ._weighed_sum import Pieces, maximum_of, weighed_sum

MOST_ROWS = 128
# From here on steps in a scan over caches are faster than by `decode`, below slower (`python -m benchmarks loops`).
LEAST_NUMBERS = 1 << 22
PIECES = Pieces()


@dataclasses.dataclass(frozen=True)
class DecodeCPU(AbstractDecode):
    """XLA's operations as XLA:CPU runs them fastest, for few queries and many key heads.

    Scores and memory, O(T·N·S), are those of `decode`, which is used in programs that XLA partitions: there it would
    send pieces of the values between devices.

    Attributes:
        pieces: how values are read.
        most: rows of a key head, for each key head: with many more, the products of `decode` and `blockwise` are
            faster. Chosen by measurement.
    """

    pieces: Pieces = PIECES
    most: int = 2

    name = "decode_cpu"
    platforms = ("cpu",)

    def check(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` for 64 bits, empty axes, many rows, or a score with a source."""
        operands, settings, _ = call
        check_operands(operands, ("float32", "bfloat16", "float16"), without=())
        check_rows(operands, settings, MOST_ROWS)
        query_len, heads = operands.query.shape[1:3]
        kv_heads = operands.key.shape[2]
        rows = query_len * heads // kv_heads
        if rows > self.most * kv_heads:
            raise NotImplementedError(
                f"query: wanted at most {self.most * kv_heads} rows a key head, got {rows}"
            )

    def check_preferred(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` for few values, which `decode` multiplies faster in a loop of steps."""
        _, key_len, kv_heads, width = call.operands.value.shape
        numbers = key_len * kv_heads * width
        if numbers < LEAST_NUMBERS:
            raise NotImplementedError(
                f"value: wanted at least {LEAST_NUMBERS} numbers in a row of the batch, where this is faster than "
                f"decode, got {numbers}"
            )

    def forward(self, call: KernelCall) -> AttentionState:
        """One product for all scores, and one pass over the values."""
        operands, settings, _ = call
        operands = hide_unreachable(operands, settings)
        value, present = operands.value, present_keys(operands)
        batch, query_len, heads = operands.query.shape[:3]
        key_len, kv_heads = value.shape[1:3]
        if present is not None:
            present = jnp.broadcast_to(present, (batch, key_len))
        pieces = self.pieces._replace(numbers=self.pieces.numbers // batch)
        scores = diagonal_scores(operands, settings, keys_first=True)
        sums, total, lse = each_entry(
            functools.partial(_sums, pieces=pieces), scores, value, present
        )
        sums = sums.reshape(batch, kv_heads, heads // kv_heads, query_len, -1)
        return state_of_rows(sums, total, lse, operands, settings)


def _sums(
    scores: Float[Array, "S rows"],
    value: Float[Array, "S K W"],
    present: Bool[Array, " S"] | None,
    pieces: Pieces,
) -> tuple[Float[Array, "K R W"], Float[Array, " rows"], Float[Array, " rows"]]:
    """Outputs before division, totals and energies of an entry of the batch."""
    maximum = maximum_of(scores, pieces)
    # In the shape of the product, so that XLA:CPU writes the weights over it; a second array would cost page
    # faults (`test_weights_are_written_over_the_scores`).
    weights = exp_from(scores, safe_shift(maximum))
    total, lse, _ = normalised(weights.sum(0, keepdims=True), maximum)
    return weighed_sum(weights, value, present, pieces), total[0], lse[0]
