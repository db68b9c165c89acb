"""Attention over a mesh whose bits are those of one device."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    QUERY_COTANGENT,
    STATE,
    TANGENT,
    Attention,
    CallOnDevice,
    Candidate,
    Canonical,
    FoldOfRows,
    KernelCall,
    Operands,
    check_call_of,
    function_call,
    is_reproducible,
    positioned,
    reproducible_kernels,
    vary_over,
    vary_together,
    varying_axes,
)

from ..cost._reproducible import head_turns
from ..merge._packing import as_invariant, joined, moved
from ._abstract import AbstractMethod, LocalCall, Split
from ._arguments import Axes

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Reproducible(AbstractMethod):
    """All keys are gathered for a device's queries, and all queries for the gradients of its keys.

    So each device folds whole trees: no sum is split over devices, and a row has the bits that it has on one. If all
    devices have the same queries, and each has keys of whole leaves, each folds the trees over its own, and these
    are gathered and folded: numbers of rows, whatever the number of keys.
    """

    name = "reproducible"
    replicated_queries = True

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        """Each device has its own of all."""
        del operands
        queries = axes if queries_sharded else ()
        return Split(heads=(), queries=queries, keys=axes, rows=queries)

    def attend(self, call: LocalCall) -> AttentionState:
        """Raises as `check_call_of` does."""
        (*_, given), settings, operands, axes, queries_sharded = call
        operands = positioned(operands)
        length = given.run if isinstance(given, Canonical) else None
        kernel = _Across(length, axes, queries_sharded)
        check_call_of(kernel, KernelCall(operands, settings))
        # The derivative of a cast is a sum over devices, so that those of `axes` are left to the kernel.
        others = frozenset().union(*map(varying_axes, jax.tree.leaves(operands))) - set(axes)
        run = functools.partial(function_call, Attention((kernel,), settings))
        operands = vary_over(others, operands)
        return run(operands) if kernel.folds_own else _by_heads(run, operands, lax.axis_size(axes))


def _by_heads(
    run: Callable[[Operands], AttentionState], operands: Operands, devices: int
) -> AttentionState:
    """`run(operands)`, for so many heads of keys at a time that their keys on all devices take little memory."""
    count, heads = operands.key.shape[2], operands.query.shape[2]
    own = sum(x.size * x.dtype.itemsize for x in operands[1:3])
    turns = head_turns(own, count, devices)
    if turns == 1:
        return run(operands)
    if operands.head_indices is None:
        operands = operands._replace(head_indices=jnp.arange(heads, dtype=jnp.int32))
    axes = {"query": 2, "key": 2, "value": 2, "head_indices": 0, "sink": -1}
    axes = {name: axis for name, axis in axes.items() if getattr(operands, name) is not None}

    def apart(x: Array, axis: int) -> Array:
        axis %= x.ndim
        x = x.reshape(*x.shape[:axis], turns, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def one(some: dict[str, Array]) -> AttentionState:
        return run(operands._replace(**some))

    found = lax.map(one, {name: apart(getattr(operands, name), i) for name, i in axes.items()})
    return jax.tree.map(lambda x: lax.collapse(jnp.moveaxis(x, 0, 2), 2, 4), found)


def located(
    names: tuple[Candidate, ...], operands: Operands, devices: int
) -> tuple[tuple[Candidate, ...], Operands]:
    """The kernel of a reproducible call, and operands, that know where the keys are of which a device gets a part."""
    if operands.key_positions is None and is_reproducible(names):
        names = reproducible_kernels(-(-operands.key.shape[1] // devices))
    return names, positioned(operands)


def method_for(names: Sequence[Candidate], method: AbstractMethod) -> AbstractMethod:
    """The method by which a call is sharded: all have the same bits where they are to be reproducible."""
    return Reproducible() if is_reproducible(names) else method


@dataclasses.dataclass(frozen=True)
class _Across(Canonical):
    """The canonical kernel over keys that are sharded along `axes`, inside `jax.shard_map`."""

    axes: Axes = ()
    queries_sharded: bool = False

    @property
    def in_order(self) -> bool:
        """Those of all devices are in no order."""
        return self.folds_own and super().in_order

    @property
    def folds_own(self) -> bool:
        """Whether each device folds the trees over its own keys."""
        return not self.queries_sharded and super().in_order

    def check(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` for a bias and a mask of numbers, of which a device has a part."""
        super().check(call)
        for name in ("bias", "mask"):
            if getattr(call.operands, name) is not None:
                raise NotImplementedError(
                    f"{name}: wanted None beside reproducible=True where keys are sharded, got an array; "
                    "energy_attn.masks and energy_attn.scores will do"
                )

    def forward_and_rest(self, call: KernelCall) -> tuple[AttentionState, Array]:
        return self._fold(STATE, call)

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        state, directions = vary_together((state, directions), self.axes)
        if not self.folds_own:
            key, value = self._all((directions.key, directions.value))
            directions = directions._replace(key=key, value=value)
        return self._fold(TANGENT, call, state, directions)

    def query_cotangent(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        given = vary_together((state, cotangent), self.axes)
        return self._fold(QUERY_COTANGENT, call, *given)

    def key_cotangents(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> tuple[Array, Array]:
        operands, state, cotangent = vary_together((call.operands, state, cotangent), self.axes)
        if self.queries_sharded:
            operands = operands._replace(
                query=self._all(operands.query),
                query_positions=self._all(operands.query_positions),
                query_segments=self._all(operands.query_segments),
            )
            state, cotangent = self._all((state, cotangent))
        return CallOnDevice(operands, call.settings).key_cotangents(state, cotangent)

    def _fold(self, fold: FoldOfRows, call: KernelCall, *others: Any) -> Any:
        """The results for rows, whose type does not vary where all devices have the same queries."""
        of = CallOnDevice(self._with_all_keys(call.operands), call.settings)
        if not self.folds_own or self.run is None:
            results = fold.whole(of, *others)
        else:
            nodes, numbers = fold.nodes(of, self.run, *others)
            nodes = [lax.collapse(self._stacked(x), 0, 2) for x in nodes]
            numbers = lax.collapse(self._stacked(numbers).swapaxes(0, 1), 1, 3)
            results = fold.of_nodes(of, nodes, numbers, *others)
        return results if self.queries_sharded else as_invariant(results, self.axes)

    def _stacked(self, x: Array) -> Array:
        return moved(lambda x: lax.all_gather(x, self.axes), x)

    def _with_all_keys(self, operands: Operands) -> Operands:
        operands = vary_together(operands, self.axes)
        if self.folds_own:
            return operands
        names = "key", "value", "key_positions", "key_segments"
        return operands._replace(**{name: self._all(getattr(operands, name)) for name in names})

    def _all(self, tree: Tree) -> Tree:
        """Arrays `[B, L, ...]` of which each device has a part of `L`, whole."""
        return jax.tree.map(lambda x: joined(x, self.axes, 1), tree)
