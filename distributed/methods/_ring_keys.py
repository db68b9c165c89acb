"""Keys that go around a ring: attention over them, its tangent and its backward."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, merge
from energy_attn.kernels.internal import (
    AbstractDerivative,
    AbstractFunction,
    Candidate,
    Operands,
    Settings,
    attend,
    backward_wide,
    cast_like,
    cotangents,
    empty_like,
    function_call,
    keep_moved,
    tangent_along,
    tangent_of,
    tangent_sums,
    wanting,
    with_wide_out,
)

from ..spec._arguments import Axes, rounded
from ._hops import hop, origin, part

Names = tuple[Candidate, ...]
Visitors = TypeVar("Visitors")
Found = TypeVar("Found")


def keys_around(names: Names, settings: Settings, axes: Axes, operands: Operands) -> AttentionState:
    """The state of this device's queries; operands vary over `axes`. Raises as `attend` does."""
    if names == ("reference",):
        return _around(names, settings, axes, operands)
    return function_call(_Around(names, settings, axes), operands)


class _Keys(NamedTuple):
    """What a hop sends."""

    key: Array
    value: Array
    key_positions: Array | None
    key_segments: Array | None


def _keys_of(operands: Operands) -> _Keys:
    return _Keys(*(getattr(operands, name) for name in _Keys._fields))


def _with_keys(operands: Operands, keys: _Keys, step: int | Array, axes: Axes) -> Operands:
    """The operands of one step: the keys that are here now, and their part of bias and mask."""
    place, size = origin(step, axes), keys.key.shape[1]
    bias, mask = (part(x, 3, place, size) for x in (operands.bias, operands.mask))
    return operands._replace(bias=bias, mask=mask, **keys._asdict())


def _once_round(
    visit: Callable[[Found, Visitors, int | Array], Found],
    start: Found,
    visitors: Visitors,
    axes: Axes,
) -> Found:
    """`visit(found, visitors, step)` of those of each device in turn, its own first."""

    def step(carry: tuple[Found, Visitors], i: Array) -> Any:
        found, here = carry
        following = hop(here, axes)  # does not wait for the computation of this step
        return (visit(found, here, i), following), None

    last, carry = lax.axis_size(axes) - 1, (start, visitors)
    if last > 0:
        carry, _ = lax.scan(step, carry, jnp.arange(last, dtype=jnp.int32))
    return visit(*carry, last)


def _around(names: Names, settings: Settings, axes: Axes, operands: Operands) -> AttentionState:
    def visit(state: AttentionState, keys: _Keys, step: int | Array) -> AttentionState:
        here = _with_keys(operands, keys, step, axes)
        return merge(state, attend(names, with_wide_out(settings), here))

    start = empty_like(with_wide_out(settings), operands)
    return rounded(_once_round(visit, start, _keys_of(operands), axes), operands, settings)


@dataclasses.dataclass(frozen=True)
class _Around(AbstractFunction):
    """The state of this device's queries, with the derivative of a ring."""

    names: Names
    settings: Settings
    axes: Axes

    def apply(self, args: Operands) -> AttentionState:
        return _around(self.names, self.settings, self.axes, args)

    def jvp(self, primals: Operands, tangents: Operands) -> tuple[AttentionState, AttentionState]:
        state: AttentionState = function_call(self, primals)
        derivative = _OfRing(self.settings, self.axes)
        return state, tangent_along(derivative, primals, state, tangents)


class _Moving(NamedTuple):
    """What goes around with the keys: their directions or their gradients; None for what does not move."""

    key: Array | None
    value: Array | None


class _Gradients(NamedTuple):
    """Gradients: those of keys and values travel with them, those of queries, bias and score stay."""

    keys: _Moving
    query: Array | None
    bias: Array | None
    score_arrays: tuple[Array | None, ...]


@dataclasses.dataclass(frozen=True)
class _OfRing(AbstractDerivative):
    """The derivative of a ring, in either mode another ring.

    Where it is differentiated a step is computed again, so that keys are kept and no scores.
    """

    settings: Settings
    axes: Axes

    def tangent(
        self, operands: Operands, state: AttentionState, directions: Operands
    ) -> AttentionState:
        @jax.checkpoint
        def visit(
            sums: AttentionState, visitors: tuple[_Keys, _Moving], step: int | Array
        ) -> AttentionState:
            keys, changes = visitors
            here = _with_keys(operands, keys, step, self.axes)
            bias = part(directions.bias, 3, origin(step, self.axes), keys.key.shape[1])
            along = cotangents(directions.query, *changes, bias, directions.score_arrays)
            found = tangent_sums(here, self.settings, state.lse, along)
            return jax.tree.map(jnp.add, sums, found)

        zero = jax.tree.map(lambda x: lax.full_like(x, 0.0, dtype=state.lse.dtype), state)
        visitors = _keys_of(operands), _Moving(directions.key, directions.value)
        return tangent_of(state, _once_round(visit, zero, visitors, self.axes))

    def backward(
        self,
        operands: Operands,
        state: AttentionState,
        cotangent: AttentionState,
        moved: Operands,
    ) -> Operands:
        settings = wanting(self.settings, moved)

        @jax.checkpoint
        def visit(keys: _Keys, so_far: _Gradients | None, step: int | Array) -> _Gradients:
            here = _with_keys(operands, keys, step, self.axes)
            found = keep_moved(backward_wide(here, settings, state, cotangent), moved)
            query, key, value, bias = found[:4]
            if bias is not None and operands.bias is not None:
                whole = lax.full_like(bias, 0.0, shape=operands.bias.shape)
                key_len = bias.shape[3]
                at = origin(step, self.axes) * key_len if whole.shape[3] > key_len else 0
                bias = lax.dynamic_update_slice_in_dim(whole, bias, at, 3)
            gradients = _Gradients(_Moving(key, value), query, bias, found.score_arrays)
            return gradients if so_far is None else jax.tree.map(jnp.add, so_far, gradients)

        # Gradients follow their keys one hop behind, so that neither transfer needs the computation
        # of its own step.
        def step(carry: tuple[_Keys, _Gradients], i: Array) -> Any:
            keys, gradients = carry
            following, arriving = hop((keys, gradients.keys), self.axes)
            return (following, visit(keys, gradients._replace(keys=arriving), i)), None

        last = lax.axis_size(self.axes) - 1
        keys = _keys_of(operands)
        following = hop(keys, self.axes) if last > 0 else keys
        found = visit(keys, None, 0)
        if last > 1:
            middle = jnp.arange(1, last, dtype=jnp.int32)
            (following, found), _ = lax.scan(step, (following, found), middle)
        if last > 0:
            found = visit(following, found._replace(keys=hop(found.keys, self.axes)), last)
            found = found._replace(keys=hop(found.keys, self.axes))  # home
        key, value = found.keys.key, found.keys.value
        given = cotangents(found.query, key, value, found.bias, found.score_arrays)
        return cast_like(given, operands)

    def plain(self) -> AbstractDerivative:
        return self
