"""The canonical folds of a call, whole, or in nodes of the tree that travel between devices, by a platform's kernel."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ..call._kernel import AbstractKernel
from ..call._leaves import LEAF
from ..call._operands import KernelCall, Operands, Settings
from ..call._state import AttentionState, lse_dtype
from ..pallas.canonical._kernel import AbstractCanonical
from ..xla._blockwise import empty_like
from ..xla._canonical import Canonical
from ._lowering import run_when_lowered
from ._registry import accepting, reproducible_kernels

Canonicals = AbstractCanonical | Canonical
Given = AttentionState | Operands  # what a derivative is of, beside the call


@dataclasses.dataclass(frozen=True)
class FoldOfRows:
    """What is folded for each row over its keys; static.

    Attributes:
        over_keys: the fold of a kernel, `(kernel, call, *others)`.
        rounded: what is made of its results, `(kernel, call, results, *others)`.
        like: arrays of the types of that, `(settings, operands, *others)`.
        widths: the features of what a node has for each row, None for a number, `(operands)`.
    """

    over_keys: Callable[..., Any]
    rounded: Callable[..., Any]
    like: Callable[..., Any]
    widths: Callable[[Operands], tuple[int | None, ...]]

    def whole(self, of: "CallOnDevice", *others: Given) -> Any:
        """The results, over all keys of a call."""
        kernels = of.kernels(None)
        return run_when_lowered(_Whole(self), self.like, kernels, of.settings, of.operands, *others)

    def nodes(self, of: "CallOnDevice", run: int, *others: Given) -> tuple[list[Array], Array]:
        """Nodes of the tree over keys in runs of whole leaves, `[nodes, B, T, N, ...]`, and where they are in it."""
        leaves = run // LEAF
        # of a number of leaves that is no power of two, each run has several nodes
        step = _Nodes(self, leaves & -leaves)
        return run_when_lowered(step, step.like, of.kernels(run), of.settings, of.operands, *others)

    def of_nodes(
        self, of: "CallOnDevice", nodes: list[Array], numbers: Int[Array, "B nodes"], *others: Given
    ) -> Any:
        """The results, over the nodes of all devices."""
        step = _OfNodes(self)
        given = of.kernels(LEAF), of.settings, of.operands, nodes, numbers, *others
        return run_when_lowered(step, step.like, *given)


@dataclasses.dataclass(frozen=True)
class CallOnDevice:
    """A call inside a program of each device."""

    operands: Operands
    settings: Settings

    def kernels(self, run: int | None) -> Sequence[AbstractKernel]:
        """The kernels that take it, of keys in such runs."""
        return accepting(reproducible_kernels(run), self.settings, self.operands)[0]

    def key_cotangents(
        self, state: AttentionState, cotangent: AttentionState
    ) -> tuple[Array, Array]:
        """The gradients of keys and values, in the dtype of the scores."""
        of = self.kernels(None), self.settings, self.operands
        return run_when_lowered(_key_cotangents, _like_keys, *of, state, cotangent)

    def sink_terms(self, state: AttentionState, cotangent: AttentionState) -> Array:
        """What each row adds to the gradient of a sink, `[B, T, N]`."""
        of = self.kernels(None), self.settings, self.operands
        return run_when_lowered(_sink_terms, _like_terms, *of, state, cotangent)

    def sink_sums(self, terms: Array) -> Array:
        """The sums of numbers of rows, `[B, N]`."""
        of = self.kernels(None), self.settings, self.operands
        return run_when_lowered(_sink_sums, _like_sums, *of, terms)


@dataclasses.dataclass(frozen=True)
class _Whole:
    fold: FoldOfRows

    def __call__(self, kernel: Canonicals, call: KernelCall, *others: Given) -> Any:
        found = self.fold.over_keys(kernel, call, *others).whole()
        return self.fold.rounded(kernel, call, found, *others)


@dataclasses.dataclass(frozen=True)
class _Nodes:
    fold: FoldOfRows
    leaves: int

    def __call__(self, kernel: Canonicals, call: KernelCall, *others: Given) -> Any:
        return self.fold.over_keys(kernel, call, *others).nodes(self.leaves)

    def like(self, settings: Settings, operands: Operands, *others: Given) -> Any:
        del settings, others
        query, count = operands.query, -(-operands.key.shape[1] // (self.leaves * LEAF))
        dtype, rows = lse_dtype(query.dtype), (count, *query.shape[:3])
        widths = self.fold.widths(operands)
        shapes = (rows if width is None else (*rows, width) for width in widths)
        nodes = [lax.full_like(query, 0, dtype, shape) for shape in shapes]
        return nodes, lax.full_like(query, 0, jnp.int32, (query.shape[0], count))


@dataclasses.dataclass(frozen=True)
class _OfNodes:
    fold: FoldOfRows

    def __call__(
        self,
        kernel: Canonicals,
        call: KernelCall,
        nodes: list[Array],
        numbers: Array,
        *others: Given,
    ) -> Any:
        found = self.fold.over_keys(kernel, call, *others).of_nodes(nodes, numbers)
        return self.fold.rounded(kernel, call, found, *others)

    def like(
        self, settings: Settings, operands: Operands, _: list[Array], numbers: Array, *others: Given
    ) -> Any:
        del numbers
        return self.fold.like(settings, operands, *others)


def _key_cotangents(kernel: Canonicals, call: KernelCall, *given: AttentionState) -> Any:
    return kernel.key_cotangents(call, *given)


def _sink_terms(kernel: Canonicals, call: KernelCall, *given: AttentionState) -> Array:
    return kernel.sink_terms(call, *given)


def _sink_sums(kernel: Canonicals, call: KernelCall, terms: Array) -> Array:
    return kernel.sink_sums(call, terms)


def _like_terms(settings: Settings, operands: Operands, *_: object) -> Array:
    query = operands.query
    return lax.full_like(query, 0, lse_dtype(query.dtype), query.shape[:3])


def _like_sums(settings: Settings, operands: Operands, terms: Array) -> Array:
    return jnp.zeros_like(terms[:, 0])


def _like_keys(settings: Settings, operands: Operands, *_: object) -> tuple[Array, Array]:
    dtype = lse_dtype(operands.query.dtype)
    key, value = (lax.full_like(x, 0, dtype) for x in (operands.key, operands.value))
    return key, value


def _like_state(settings: Settings, operands: Operands) -> tuple[AttentionState, Array]:
    state = empty_like(settings, operands)
    return state, state.lse


def _like_query(settings: Settings, operands: Operands, *_: object) -> Array:
    return lax.full_like(operands.query, 0, lse_dtype(operands.query.dtype))


def _like_tangent(
    settings: Settings, operands: Operands, state: AttentionState, _: Operands
) -> AttentionState:
    return jax.tree.map(jnp.zeros_like, state)


STATE = FoldOfRows(
    lambda kernel, call: kernel.state_over_keys(call),
    lambda kernel, call, found: kernel.rounded_state(call, found),
    _like_state,
    lambda operands: (None, None, operands.value.shape[-1]),
)
QUERY_COTANGENT = FoldOfRows(
    lambda kernel, call, *given: kernel.query_over_keys(call, *given),
    lambda kernel, call, found, *_: kernel.rounded_query(call, found),
    _like_query,
    lambda operands: (operands.query.shape[-1],),
)
TANGENT = FoldOfRows(
    lambda kernel, call, *given: kernel.tangent_over_keys(call, *given),
    lambda kernel, call, found, state, _: kernel.rounded_tangent(state, found),
    _like_tangent,
    lambda operands: (operands.value.shape[-1], None, None),
)
