"""The canonical kernel in XLA's operations, for CPUs."""

import dataclasses
from typing import Any

from jaxtyping import Array, Int

from ..call._kernel import check_dtypes
from ..call._operands import KernelCall
from ..call._state import AttentionState
from ..fold._call import check_whole
from ..fold._kernel import AbstractCanonical, backward_rows
from ..masks._abstract import AbstractMask
from ..masks._lengths import Lengths
from ._canonical_loops import XLASchedule
from ._canonical_sums import ScoreSums


@dataclasses.dataclass(frozen=True)
class Canonical(AbstractCanonical):
    """Attention whose bits depend on a row and the keys that it sees, in XLA's operations.

    Keys may lie in any order, among absent ones, but two present keys of one position, or keys that are in
    more leaves than `S / LEAF + 1`, make all results of their batch entry NaN; two such queries, gradients of keys
    and values.
    """

    name = "canonical"
    platforms = ()
    interpreted = ()
    exported = True
    masks = (AbstractMask, Lengths)

    def check(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` for a part of the keys of a row, and for a score with a source."""
        check_whole(call.settings)
        check_dtypes(call.operands, ("float32", "bfloat16", "float16", "float64"))

    def schedule(self, call: KernelCall, in_order: bool) -> XLASchedule:
        return XLASchedule(call, in_order)

    def bias_cotangent(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        """The gradient of the bias."""
        return self._sums(call, state, cotangent).of_bias()

    def array_cotangents(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> tuple[Any, ...]:
        """The gradients of the score's arrays."""
        return self._sums(call, state, cotangent).of_arrays()

    def array_nodes(
        self,
        call: KernelCall,
        state: AttentionState,
        cotangent: AttentionState,
        share: Array,
        shares: int,
    ) -> tuple[tuple[Any, ...], Int[Array, "nodes B"]]:
        """The gradients of the score's arrays over a share of the leaves, as `ScoreSums.nodes_of_arrays`."""
        return self._sums(call, state, cotangent).nodes_of_arrays(share, shares)

    def _sums(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> ScoreSums:
        rows = backward_rows(call.operands, state, cotangent)
        return ScoreSums(self.schedule(call, self.in_order), rows)
