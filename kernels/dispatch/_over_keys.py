"""Attention over part of the keys: merged into the state of other keys, or as nodes of the canonical tree."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from ..autodiff._function import AbstractFunction, function_call
from ..call._kernel import AbstractKernel, Candidate
from ..call._operands import KernelCall, Operands, Settings, is_static
from ..call._state import AttentionState, lse_dtype, merge
from ..call._tokens import LEAF
from ._derivative import like_rest, like_state
from ._lowering import run_when_lowered
from ._registry import accepting, attend, reproducible_kernels

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
    the attention. Raises as `attend`.
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
    state = merge_rows(query_len - rest, rest, state) if rest else state  # the last part is shorter
    return overlap_transfer(state, in_flight)


def _part_len(state: AttentionState) -> int:
    batch, _, *rest = state.out.shape
    a_query = batch * math.prod(rest) * state.out.dtype.itemsize
    blocks = PART // max(a_query * LEAST_PART, 1)
    return max(blocks, 1) * LEAST_PART


def overlap_transfer(computed: Computed, in_flight: Tree) -> tuple[Computed, Tree]:
    """Returns both behind an optimization barrier, so that XLA overlaps the transfer with the computation.

    XLA:TPU starts a transfer as late as it can, after all products if sums or copies of their results could hide it.
    Behind the barrier these cannot, so the products do (`test_a_ring_sends_while_it_computes` fails without it).
    """
    return function_call(_OverlapTransfer(), (computed, in_flight))


@dataclasses.dataclass(frozen=True)
class _OverlapTransfer(AbstractFunction):
    def apply(self, args: tuple[Any, Any]) -> tuple[Any, Any]:
        return lax.optimization_barrier(args)

    def jvp(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        # JAX's rule would make arrays of tangents that are zero, which a ring would then send
        return function_call(self, primals), tangents


Like = Callable[..., Any]  # (settings, operands, *args) to arrays of a result's types


@dataclasses.dataclass(frozen=True)
class CallOnDevice:
    """A call inside a program of each device."""

    operands: Operands
    settings: Settings

    def run(
        self, method: Callable[..., Any], like: Like, *args: PyTree, run: int | None = None
    ) -> Any:
        """`method(kernel, call, *args)` of the first kernel that takes the call.

        `run`: the length of runs of successive keys.
        """
        kernels, _ = accepting(reproducible_kernels(run), self.settings, self.operands)
        return run_when_lowered(method, like, kernels, self.settings, self.operands, *args)

    def key_cotangents(self, *states: AttentionState) -> tuple[Array, Array]:
        return self.run(_Method("key_cotangents"), _like_keys, *states)

    def sink_terms(self, *states: AttentionState) -> Array:
        return self.run(_Method("sink_terms"), _like_terms, *states)

    def sink_sums(self, terms: Array) -> Array:
        return self.run(_Method("sink_sums"), _like_sums, terms)


@dataclasses.dataclass(frozen=True)
class FoldOfRows:
    """A fold of each row over its keys, by the method `name` of a canonical kernel; static.

    `like` returns arrays with the types of the results; `widths(operands)` the width of each array of a node, None for
    one number per row.
    """

    name: str
    like: Like
    widths: Callable[[Operands], tuple[int | None, ...]]

    def whole(self, of: CallOnDevice, *others: PyTree) -> Any:
        return of.run(_Whole(self.name), self.like, *others)

    def nodes(self, of: CallOnDevice, run: int, *others: PyTree) -> tuple[list[Array], Array]:
        """Partial folds, one per run of whole leaves, `[nodes, B, T, N, ...]`, with their index in the tree."""
        leaves = run // LEAF
        # a run whose number of leaves is no power of two has several nodes
        step = _Nodes(self.name, self, leaves & -leaves)
        return of.run(step, step.like, *others, run=run)

    def of_nodes(
        self, of: CallOnDevice, nodes: list[Array], numbers: Int[Array, "B nodes"], *others: PyTree
    ) -> Any:
        step = _OfNodes(self.name, self)
        return of.run(step, step.like, (nodes, numbers), *others, run=LEAF)


@dataclasses.dataclass(frozen=True)
class _Method:
    name: str

    def __call__(self, kernel: AbstractKernel, call: KernelCall, *args: PyTree) -> Any:
        return getattr(kernel, self.name)(call, *args)


class _Whole(_Method):
    def __call__(self, kernel: AbstractKernel, call: KernelCall, *args: PyTree) -> Any:
        return super().__call__(kernel, call, *args).whole()


@dataclasses.dataclass(frozen=True)
class _Nodes(_Method):
    fold: FoldOfRows
    leaves: int

    def __call__(self, kernel: AbstractKernel, call: KernelCall, *args: PyTree) -> Any:
        return super().__call__(kernel, call, *args).nodes(self.leaves)

    def like(self, settings: Settings, operands: Operands, *_: object) -> Any:
        count = -(-operands.key.shape[1] // (self.leaves * LEAF))
        nodes = _of_rows(operands, *self.fold.widths(operands), lead=(count,))
        query = operands.query
        return nodes, lax.full_like(query, 0, jnp.int32, (query.shape[0], count))


@dataclasses.dataclass(frozen=True)
class _OfNodes(_Method):
    fold: FoldOfRows

    def __call__(self, kernel: AbstractKernel, call: KernelCall, *args: PyTree) -> Any:
        return super().__call__(kernel, call, *args[1:]).of_nodes(*args[0])

    def like(self, settings: Settings, operands: Operands, _: object, *others: PyTree) -> Any:
        return self.fold.like(settings, operands, *others)


def _of_rows(operands: Operands, *widths: int | None, lead: tuple[int, ...] = ()) -> list[Array]:
    query, rows = operands.query, (*lead, *operands.query.shape[:3])
    shapes = (rows if width is None else (*rows, width) for width in widths)
    return [lax.full_like(query, 0, lse_dtype(query.dtype), shape) for shape in shapes]


def _like_terms(settings: Settings, operands: Operands, *_: object) -> Array:
    return _of_rows(operands, None)[0]


def _like_sums(settings: Settings, operands: Operands, terms: Array) -> Array:
    return jnp.zeros_like(terms[:, 0])


def _like_keys(settings: Settings, operands: Operands, *_: object) -> tuple[Array, Array]:
    dtype = lse_dtype(operands.query.dtype)
    return lax.full_like(operands.key, 0, dtype), lax.full_like(operands.value, 0, dtype)


STATE = FoldOfRows("state_fold", like_rest, lambda x: (None, None, x.value.shape[-1]))
QUERY_COTANGENT = FoldOfRows(
    "query_fold",
    lambda _, operands, *others: _of_rows(operands, operands.query.shape[-1])[0],
    lambda x: (x.query.shape[-1],),
)
TANGENT = FoldOfRows("tangent_fold", like_state, lambda x: (x.value.shape[-1], None, None))
