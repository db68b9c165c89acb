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

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    AbstractDerivative,
    AbstractFunction,
    Candidate,
    InFlight,
    Operands,
    Saved,
    Settings,
    TangentSums,
    attend_and_merge,
    backward_by_head,
    cast_like,
    cotangents,
    differentiated_by_jax,
    empty_like,
    function_call,
    keep_moved,
    named,
    needing_moved,
    overlap_transfer,
    row_cotangents,
    tangent_along,
    tangent_of,
    tangent_sums,
)

from ._arguments import Axes, rounded
from ._hops import among, whole

ALL = slice(None)
Names = tuple[Candidate, ...]
Tree = TypeVar("Tree")
Found = TypeVar("Found")


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
Visit = Callable[..., tuple[InFlight, Gradients]]


class AbstractTurns(abc.ABC):
    """Which keys are here in which turn, and how the next ones come; a frozen dataclass, static.

    Attributes:
        axes: the mesh axes over which keys are sharded.
        size: how many keys each device has.
    """

    axes: Axes
    size: int

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """How many turns there are whose arrays are of one shape, in front."""

    @property
    def others(self) -> int:
        """How many turns follow them, whose number is never traced."""
        return 0

    @abc.abstractmethod
    def first(self, own: Tree) -> Tree:
        """The arrays `[B, S, ...]` of turn 0, from each device's `own`."""

    @abc.abstractmethod
    def following(self, here: Tree, own: Tree, turn: int | Array) -> Tree:
        """The arrays of the turn after this one."""

    @abc.abstractmethod
    def cut(self, x: Array | None, axis: int, turn: int | Array) -> Array | None:
        """The part of an array of all keys for the keys of a turn; all of it if it is broadcast along them."""

    @abc.abstractmethod
    def uncut(self, found: Array, like: Array, axis: int, turn: int | Array) -> Array:
        """An array of all keys that is zero but for those of a turn."""

    @abc.abstractmethod
    def backward(self, visit: Visit, own: Keys) -> Gradients:
        """The sum of all turns' gradients, those of keys on the devices that have them."""


def attend_in_turn(
    names: Names, settings: Settings, turns: AbstractTurns, operands: Operands
) -> AttentionState:
    """The state of this device's queries; operands vary over the axes. Raises as `attend` does.

    Positions and segments of keys are those of all devices, or of this one: then they are gathered.
    """
    tokens = operands.tokens.map_keys(lambda x: whole(x, turns.size, turns.axes))
    operands = operands._replace(tokens=tokens)
    if differentiated_by_jax(names):
        return _attend(names, settings, turns, operands)
    return function_call(_InTurn(names, settings, turns), operands)


def added(a: Tree, b: Tree) -> Tree:
    """The sum of two trees."""
    return jax.tree.map(jnp.add, a, b)


def _computed_again(visit: Callable[..., Found], turn: int | Array) -> Callable[..., Found]:
    """`visit` of a turn, computed again where it is differentiated; the number of a turn stays static if it is."""
    if isinstance(turn, int):
        return jax.checkpoint(functools.partial(visit, turn))
    return functools.partial(jax.checkpoint(visit), turn)


def _own(operands: Operands) -> Keys:
    return Keys(operands.key, operands.value)


def _with_keys(
    operands: Operands, keys: Keys, turns: AbstractTurns, turn: int | Array, some: slice = ALL
) -> Operands:
    """The operands of one turn: the keys that are here, or some of them, and their part of what is of all keys."""
    assert keys.key is not None and keys.value is not None

    def cut(x: Array | None, axis: int) -> Array | None:
        here = turns.cut(x, axis, turn)
        if x is None or here is None or x.shape[axis] == 1:
            return here
        return here[(ALL,) * axis + (some,)]

    return operands._replace(
        key=keys.key[:, some],
        value=keys.value[:, some],
        bias=cut(operands.bias, 3),
        mask=cut(operands.mask, 3),
        tokens=operands.tokens.map_keys(lambda x: cut(x, 1)),
    )


def _fold(
    visit: Callable[[Found, Tree, int | Array, Tree | None], tuple[Found, Any]],
    start: Found,
    own: Tree,
    turns: AbstractTurns,
) -> Found:
    """`visit(found, here, turn, in_flight)` of all turns.

    `visit` also returns `in_flight`, the keys of the next turn; None in the last.
    """

    def step(carry: tuple[Found, Tree], turn: Array) -> Any:
        found, here = carry
        return visit(found, here, turn, turns.following(here, own, turn)), None

    (found, here), last = (start, turns.first(own)), turns.count - 1
    if last > 0:
        (found, here), _ = lax.scan(step, (found, here), jnp.arange(last, dtype=jnp.int32))
    for turn in range(last, last + turns.others):
        found, here = visit(found, here, turn, turns.following(here, own, turn))
    return visit(found, here, last + turns.others, None)[0]


def _attend(
    names: Names, settings: Settings, turns: AbstractTurns, operands: Operands
) -> AttentionState:
    unrounded = settings.needing(unrounded=True)

    def visit(
        state: AttentionState, keys: Keys, turn: int | Array, in_flight: Keys | None
    ) -> tuple[AttentionState, Keys | None]:
        here = _with_keys(operands, keys, turns, turn)
        return attend_and_merge(state, names, unrounded, here, in_flight)

    found = _fold(visit, empty_like(unrounded, operands), _own(operands), turns)
    return rounded(found, operands, settings)


@dataclasses.dataclass(frozen=True)
class _InTurn(AbstractFunction):
    """The state of this device's queries, with a derivative that goes through all turns again."""

    names: Names
    settings: Settings
    turns: AbstractTurns

    def apply(self, args: Operands) -> AttentionState:
        return _attend(self.names, self.settings, self.turns, args)

    def jvp(self, primals: Operands, tangents: Operands) -> tuple[AttentionState, AttentionState]:
        state = named(function_call(self, primals))
        derivative = _OfTurns(self.settings, self.turns)
        return state, tangent_along(derivative, Saved(primals, state), tangents)


@dataclasses.dataclass(frozen=True)
class _OfTurns(AbstractDerivative):
    """The derivative, in either mode through all turns again.

    Where it is differentiated a turn is computed again, so that keys are kept and no scores.
    """

    settings: Settings
    turns: AbstractTurns

    def tangent(self, saved: Saved, directions: Operands) -> AttentionState:
        turns, operands, state = self.turns, saved.operands, saved.state

        def visit(
            turn: int | Array, sums: TangentSums, here: tuple[Keys, Keys], in_flight: Tree | None
        ) -> tuple[TangentSums, Tree | None]:
            keys, changes = here
            bias = turns.cut(directions.bias, 3, turn)
            along = cotangents(directions.query, *changes, bias, directions.score_arrays)
            given = _with_keys(operands, keys, turns, turn)
            found = tangent_sums(given, self.settings, state.lse, along)
            found, in_flight = overlap_transfer(found, in_flight)
            return added(sums, found), in_flight

        out, lse = (lax.full_like(x, 0.0, dtype=state.lse.dtype) for x in state)
        zero = TangentSums(out, lse, lse)
        own = _own(operands), Keys(directions.key, directions.value)

        def once(
            sums: TangentSums, here: Tree, turn: int | Array, in_flight: Tree | None
        ) -> tuple[TangentSums, Tree | None]:
            return _computed_again(visit, turn)(sums, here, in_flight)

        return tangent_of(state, _fold(once, zero, own, turns).means())

    def backward(self, saved: Saved, cotangent: AttentionState, moved: Operands) -> Operands:
        settings, turns = needing_moved(self.settings, moved), self.turns
        operands, rows = saved.operands, row_cotangents(saved.state, cotangent)

        def once(
            some: slice,
            turn: int | Array,
            keys: Any,
            staying: Gradients | None,
            in_flight: InFlight,
        ) -> tuple[InFlight, Gradients]:
            def of_turn(x: Array, axis: int) -> Array:
                return x if some == ALL else among(x, axis, some.start, turns.size)

            here = _with_keys(operands, keys, turns, turn, some)
            d_query = None if staying is None else staying.query
            found, in_flight = backward_by_head(d_query, here, settings, rows, in_flight)
            found = keep_moved(found, moved)
            bias = found.bias
            if bias is not None and operands.bias is not None:
                bias = of_turn(bias, 3) if operands.bias.shape[3] > 1 else bias
                bias = turns.uncut(bias, operands.bias, 3, turn)
            others = bias, found.score_arrays
            if staying is not None:
                others = added(others, (staying.bias, staying.score_arrays))
            keys = Keys(*(x if x is None else of_turn(x, 1) for x in (found.key, found.value)))
            return in_flight, Gradients(keys, found.query, *others)

        def visit(
            keys: Any,
            so_far: Gradients | None,
            turn: int | Array,
            in_flight: InFlight,
            some: slice = ALL,
        ) -> tuple[InFlight, Gradients]:
            staying = None if so_far is None else so_far._replace(keys=Keys(None, None))
            again = _computed_again(functools.partial(once, some), turn)
            return again(keys, staying, in_flight)

        found = turns.backward(visit, _own(operands))
        given = cotangents(found.query, *found.keys, found.bias, found.score_arrays)
        return cast_like(given, operands)

    def plain(self) -> AbstractDerivative:
        return self
