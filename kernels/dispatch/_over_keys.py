"""Canonical folds of a call by a platform's kernel: whole, or in nodes of the tree that devices send."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from ..call._kernel import AbstractKernel
from ..call._operands import KernelCall, Operands, Settings
from ..call._state import AttentionState, lse_dtype
from ..call._tokens import LEAF
from ._derivative import like_rest, like_state
from ._lowering import run_when_lowered
from ._registry import accepting, reproducible_kernels

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

    def key_cotangents(self, *given: AttentionState) -> tuple[Array, Array]:
        return self.run(_Method("key_cotangents"), _like_keys, *given)

    def sink_terms(self, *given: AttentionState) -> Array:
        return self.run(_Method("sink_terms"), _like_terms, *given)

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
