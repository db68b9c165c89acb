"""Attention over keys of all devices that come in turn, some at a time; its tangent and its backward."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, Operands, Settings
from energy_attn.kernels.internal import (
    Candidate,
    attend_and_merge,
    autodiff,
    blockwise,
    cotangents,
    derivatives,
    differentiated_by_jax,
    empty_like,
    mesh_axes,
    overlap_transfer,
)

from ..merge._abstract import Axes, joined, moved
from ._abstract import LocalCall, rounded

ALL = slice(None)
Names = tuple[Candidate, ...]
Tree = TypeVar("Tree")
Found = TypeVar("Found")


def hop(tree: Tree, axes: Axes, places: int = 1) -> Tree:
    """The arrays of a tree from the device this number of places before."""
    devices = lax.axis_size(axes)
    pairs = [(i, (i + places) % devices) for i in range(devices)]
    pass_on = functools.partial(moved, lambda x: lax.ppermute(x, axes, pairs))
    return jax.tree.map(pass_on, tree)


def origin(step: int | Array, axes: Axes) -> Array:
    """The device whose part is here after `step` hops."""
    return (lax.axis_index(axes) - step) % lax.axis_size(axes)


def whole(x: Array | None, size: int, axes: Axes) -> Array | None:
    """Positions or segments of all devices, `[B, p size]`, gathered where a device has only its own."""
    return x if x is None or x.shape[1] != size else joined(x, axes, 1)


def part(x: Array | None, axis: int, place: Array, size: int) -> Array | None:
    if x is None or x.shape[axis] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, place * size, size, axis)


def among(x: Array, axis: int, first: int, size: int) -> Array:
    """An array as a part along an axis of `size`, from `first` on, of one that is zero elsewhere."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = first, size - first - x.shape[axis]
    return jnp.pad(x, widths)


class Keys(NamedTuple):
    """Keys and values, their directions or their gradients; None for what does not move."""

    key: Array | None
    value: Array | None


class Gradients(NamedTuple):
    """Gradients of the keys of a turn, and of what stays."""

    keys: Keys
    query: Array | None
    bias: Array | None
    score_arrays: tuple[Array | None, ...]


# Of the keys of a turn, the gradients so far, the turn's number, what arrives meanwhile, and some of a shard's keys or
# ALL: what arrived, and the gradients of these keys, zero for others than these some, and of what stays so far.
Visit = Callable[..., tuple[blockwise.InFlight, Gradients]]


class AbstractTurns(abc.ABC):
    """The keys of each turn, and how the next ones come; a frozen dataclass, static.

    Attributes:
        axes: the mesh axes over which keys are sharded.
        size: how many keys each device has.
    """

    axes: Axes
    size: int

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """The number of turns, the first ones, whose arrays are of one shape."""

    @property
    def others(self) -> int:
        """The number of trailing turns, unrolled: their index is static."""
        return 0

    @abc.abstractmethod
    def first(self, own: Tree) -> Tree:
        """The arrays `[B, S, ...]` of turn 0, from each device's `own`."""

    @abc.abstractmethod
    def following(self, here: Tree, own: Tree, turn: int | Array) -> Tree:
        """The arrays of the turn after this one."""

    @abc.abstractmethod
    def cut(self, x: Array, axis: int, turn: int | Array) -> Array:
        """The part of an array of all keys for the keys of a turn."""

    @abc.abstractmethod
    def backward(self, visit: Visit, own: Keys) -> Gradients:
        """The sum of all turns' gradients; of keys, on the devices that have them."""


def attend_in_turn(call: LocalCall, turns: AbstractTurns) -> AttentionState:
    """The state of this device's queries. Raises as `attend` does."""
    function = _InTurn(call.policy.kernels, call.settings, turns)
    operands = mesh_axes.vary_together(call.operands, turns.axes)
    tokens = operands.tokens.map_keys(lambda x: whole(x, turns.size, turns.axes))
    operands = operands._replace(tokens=tokens)
    if differentiated_by_jax(call.policy.kernels):
        return function.apply(operands)
    return autodiff.function_call(function, operands)


def added(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.add, a, b)


def _computed_again(visit: Callable[..., Found]) -> Callable[..., Found]:
    """`visit(turn, ...)`, computed again where it is differentiated; the number of a turn stays static if it is."""

    def again(turn: int | Array, *rest: Any) -> Found:
        if isinstance(turn, int):
            return jax.checkpoint(functools.partial(visit, turn))(*rest)
        return jax.checkpoint(visit)(turn, *rest)

    return again


def _own(operands: Operands) -> Keys:
    return Keys(operands.key, operands.value)


def _with_keys(
    operands: Operands, keys: Keys, turns: AbstractTurns, turn: int | Array, some: slice = ALL
) -> Operands:
    """The operands of one turn: the keys that are here, or some of them, and their part of other arrays."""
    assert keys.key is not None and keys.value is not None
    cut = functools.partial(_cut, turns, turn, some)
    return operands._replace(
        key=keys.key[:, some],
        value=keys.value[:, some],
        bias=cut(operands.bias, 3),
        mask=cut(operands.mask, 3),
        tokens=operands.tokens.map_keys(lambda x: cut(x, 1)),
    )


def _cut(
    turns: AbstractTurns, turn: int | Array, some: slice, x: Array | None, axis: int
) -> Array | None:
    """The part of an array of all keys for some keys of a turn; all of it if it is broadcast along them."""
    if x is None or x.shape[axis] == 1:
        return x
    return turns.cut(x, axis, turn)[(ALL,) * axis + (some,)]


def _uncut(
    turns: AbstractTurns, turn: int | Array, some: slice, found: Array, size: int, axis: int
) -> Array:
    """The transpose of `_cut`: `found` among zeros of all keys, whose number, or 1, is `size`."""
    shape = (*found.shape[:axis], size, *found.shape[axis + 1 :])
    zeros, found = mesh_axes.vary_together((lax.full_like(found, 0.0, shape=shape), found))
    (whole,) = jax.linear_transpose(lambda x: _cut(turns, turn, some, x, axis), zeros)(found)
    return whole


def _fold(
    visit: Callable[[int | Array, Found, Tree, Tree | None], tuple[Found, Any]],
    start: Found,
    own: Tree,
    turns: AbstractTurns,
) -> Found:
    """`visit(turn, found, here, in_flight)` of all turns.

    `visit` also returns `in_flight`, the keys of the next turn; None in the last.
    """

    def step(carry: tuple[Found, Tree], turn: Array) -> Any:
        found, here = carry
        return visit(turn, found, here, turns.following(here, own, turn)), None

    (found, here), last = (start, turns.first(own)), turns.count - 1
    if last > 0:
        (found, here), _ = lax.scan(step, (found, here), jnp.arange(last, dtype=jnp.int32))
    for turn in range(last, last + turns.others):
        found, here = visit(turn, found, here, turns.following(here, own, turn))
    return visit(last + turns.others, found, here, None)[0]


@dataclasses.dataclass(frozen=True)
class _InTurn(autodiff.AbstractFunction, derivatives.AbstractDerivative):
    """The state of this device's queries, with a derivative that goes, in either mode, through all turns again.

    Where the derivative is differentiated a turn is computed again, so that keys are kept and no scores.
    """

    names: Names
    settings: Settings
    turns: AbstractTurns

    def apply(self, args: Operands) -> AttentionState:
        unrounded = self.settings.needing(unrounded=True)

        def visit(
            turn: int | Array, state: AttentionState, keys: Keys, in_flight: Keys | None
        ) -> tuple[AttentionState, Keys | None]:
            here = _with_keys(args, keys, self.turns, turn)
            return attend_and_merge(state, self.names, unrounded, here, in_flight)

        found = _fold(visit, empty_like(unrounded, args), _own(args), self.turns)
        return rounded(found, args, self.settings)

    def jvp(self, primals: Operands, tangents: Operands) -> tuple[AttentionState, AttentionState]:
        state = derivatives.with_checkpoint_names(autodiff.function_call(self, primals))
        return state, derivatives.tangent_along(self, derivatives.Saved(primals, state), tangents)

    def tangent(self, saved: derivatives.Saved, directions: Operands) -> AttentionState:
        turns, operands, state = self.turns, saved.operands, saved.state

        def visit(
            turn: int | Array,
            sums: blockwise.TangentSums,
            here: tuple[Keys, Keys],
            in_flight: Tree | None,
        ) -> tuple[blockwise.TangentSums, Tree | None]:
            keys, changes = here
            bias = _cut(turns, turn, ALL, directions.bias, 3)
            along = cotangents(directions.query, *changes, bias, directions.score_arrays)
            given = _with_keys(operands, keys, turns, turn)
            found = blockwise.tangent_sums(given, self.settings, state.lse, along)
            found, in_flight = overlap_transfer(found, in_flight)
            return added(sums, found), in_flight

        out, lse = (lax.full_like(x, 0.0, dtype=state.lse.dtype) for x in state)
        zero = blockwise.TangentSums(out, lse, lse)
        own = _own(operands), Keys(directions.key, directions.value)
        return blockwise.tangent_of(state, _fold(_computed_again(visit), zero, own, turns).means())

    def backward(
        self, saved: derivatives.Saved, cotangent: AttentionState, moved: Operands
    ) -> Operands:
        settings, turns = derivatives.needing(self.settings, moved), self.turns
        operands, rows = saved.operands, blockwise.row_cotangents(saved.state, cotangent)

        def once(
            some: slice,
            turn: int | Array,
            keys: Any,
            staying: Gradients | None,
            in_flight: blockwise.InFlight,
        ) -> tuple[blockwise.InFlight, Gradients]:
            def among_turn(x: Array | None) -> Array | None:
                return x if x is None or some == ALL else among(x, 1, some.start, turns.size)

            here = _with_keys(operands, keys, turns, turn, some)
            d_query = None if staying is None else staying.query
            found, in_flight = blockwise.backward_by_head(d_query, here, settings, rows, in_flight)
            found = derivatives.keep_needed(found, moved)
            bias = found.bias
            if bias is not None and operands.bias is not None:
                bias = _uncut(turns, turn, some, bias, operands.bias.shape[3], 3)
            others = bias, found.score_arrays
            if staying is not None:
                others = added(others, (staying.bias, staying.score_arrays))
            keys = Keys(among_turn(found.key), among_turn(found.value))
            return in_flight, Gradients(keys, found.query, *others)

        def visit(
            keys: Any,
            so_far: Gradients | None,
            turn: int | Array,
            in_flight: blockwise.InFlight,
            some: slice = ALL,
        ) -> tuple[blockwise.InFlight, Gradients]:
            staying = None if so_far is None else so_far._replace(keys=Keys(None, None))
            again = _computed_again(functools.partial(once, some))
            return again(turn, keys, staying, in_flight)

        found = turns.backward(visit, _own(operands))
        given = cotangents(found.query, *found.keys, found.bias, found.score_arrays)
        return blockwise.cast_like(given, operands)

    def plain(self) -> derivatives.AbstractDerivative:
        return self
