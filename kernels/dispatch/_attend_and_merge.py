"""Attention merged into the state of other keys: one step of a ring of keys."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax import lax
from jaxtyping import Array

from ..autodiff._function import AbstractFunction, function_call
from ..call._kernel import Candidate
from ..call._operands import Operands, Settings, is_static
from ..call._state import AttentionState, merge
from ._registry import attend

Computed = TypeVar("Computed")
Tree = TypeVar("Tree")

# The result of a kernel and its copies in other layouts are scratch memory in addition to the state that
# they are merged into. So a state is computed in parts of about PART bytes and at least LEAST_PART queries,
# which still fill a device.
PART, LEAST_PART = 8 << 20, 512


def attend_and_merge(
    state: AttentionState,
    names: Sequence[Candidate],
    settings: Settings,
    operands: Operands,
    in_flight: Tree,
) -> tuple[AttentionState, Tree]:
    """`merge(state, attend(names, settings, operands))`, in parts of the queries; and `in_flight`.

    `state` is the state of other keys, with the types of `attend`'s result. The transfer of `in_flight` overlaps with
    the attention.
    Raises as `attend`.
    """
    query_len, size = operands.query.shape[1], _part_len(state)
    if not is_static(query_len) or query_len <= size:
        result, in_flight = overlap_transfer(attend(names, settings, operands), in_flight)
        return merge(state, result), in_flight
    operands = operands.positioned(settings.uses_positions)
    settings = settings.needing(part=True)

    def merge_rows(first: int | Array, size: int, state: AttentionState) -> AttentionState:
        def cut(x: Array, axis: int = 1) -> Array:
            return lax.dynamic_slice_in_dim(x, first, size, axis)

        rows = jax.tree.map(cut, state)
        part = operands.map_queries(lambda x, axis: x if x.shape[axis] == 1 else cut(x, axis))
        rows = merge(rows, attend(names, settings, part))
        return jax.tree.map(
            lambda x, new: lax.dynamic_update_slice_in_dim(x, new, first, 1), state, rows
        )

    parts, rest = divmod(query_len, size)
    state = lax.fori_loop(0, parts, lambda i, x: merge_rows(i * size, size, x), state)
    state = merge_rows(query_len - rest, rest, state) if rest else state
    return overlap_transfer(state, in_flight)


def _part_len(state: AttentionState) -> int:
    """The queries of a part, in whole blocks."""
    batch, _, *rest = state.out.shape
    a_query = batch * math.prod(rest) * state.out.dtype.itemsize
    blocks = PART // max(a_query * LEAST_PART, 1)
    return max(blocks, 1) * LEAST_PART


def overlap_transfer(computed: Computed, in_flight: Tree) -> tuple[Computed, Tree]:
    """Returns both behind an optimization barrier, so that XLA overlaps the transfer with the computation.

    XLA:TPU starts a transfer as late as it can, after all products if sums or copies of their results could
    hide it. Behind the barrier these cannot, so the products do (`test_a_ring_sends_while_it_computes` fails without
    it).
    """
    return function_call(_OverlapTransfer(), (computed, in_flight))


@dataclasses.dataclass(frozen=True)
class _OverlapTransfer(AbstractFunction):
    def apply(self, args: tuple[Any, Any]) -> tuple[Any, Any]:
        return lax.optimization_barrier(args)

    def jvp(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        # JAX's rule would make arrays of tangents that are zero, which a ring would then send
        return function_call(self, primals), tangents
