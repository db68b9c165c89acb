"""Attention over keys that arrive step by step from all devices, with its tangent and its backward."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

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

from ._abstract import (
    ALL,
    AbstractKeySchedule,
    Arrays,
    Gradients,
    Keys,
    LocalCall,
    add_trees,
    gather_tokens,
    pad_zeros,
    rounded,
)

Names = tuple[Candidate, ...]


Found = TypeVar("Found")


def attend_by_schedule(call: LocalCall, schedule: AbstractKeySchedule) -> AttentionState:
    """The state of this device's queries. Raises as `attend` does."""
    function = _ScheduledAttention(call.policy.kernels, call.settings, schedule)
    operands = mesh_axes.vary_together(call.operands, schedule.axes)
    tokens = operands.tokens.map_keys(lambda x: gather_tokens(x, schedule.size, schedule.axes))
    operands = operands._replace(tokens=tokens)
    if differentiated_by_jax(call.policy.kernels):
        return function.apply(operands)
    return autodiff.function_call(function, operands)


def _computed_again(run_step: Callable[..., Found]) -> Callable[..., Found]:
    """`run_step(step, ...)`, computed again where it is differentiated; the number of a step stays static if it is."""

    def again(step: int | Array, *rest: Any) -> Found:
        if isinstance(step, int):
            return jax.checkpoint(functools.partial(run_step, step))(*rest)
        return jax.checkpoint(run_step)(step, *rest)

    return again


def _own(operands: Operands) -> Keys:
    return Keys(operands.key, operands.value)


def _with_keys(
    operands: Operands,
    keys: Keys,
    schedule: AbstractKeySchedule,
    step: int | Array,
    some: slice = ALL,
) -> Operands:
    """The operands of one step: the keys that are here, or some of them, and their part of other arrays."""
    assert keys.key is not None and keys.value is not None
    cut = functools.partial(_slice_keys, schedule, step, some)
    return operands._replace(
        key=keys.key[:, some],
        value=keys.value[:, some],
        bias=cut(operands.bias, 3),
        mask=cut(operands.mask, 3),
        tokens=operands.tokens.map_keys(lambda x: cut(x, 1)),
    )


def _slice_keys(
    schedule: AbstractKeySchedule, step: int | Array, some: slice, x: Array | None, axis: int
) -> Array | None:
    """The part of an array of all keys for some keys of a step; all of it if it is broadcast along them."""
    if x is None or x.shape[axis] == 1:
        return x
    return schedule.slice_step(x, axis, step)[(ALL,) * axis + (some,)]


def _unslice_keys(
    schedule: AbstractKeySchedule,
    step: int | Array,
    some: slice,
    found: Array,
    size: int,
    axis: int,
) -> Array:
    """The transpose of `_slice_keys`: `found` among zeros of all keys, whose number, or 1, is `size`."""
    shape = (*found.shape[:axis], size, *found.shape[axis + 1 :])
    zeros, found = mesh_axes.vary_together((lax.full_like(found, 0.0, shape=shape), found))
    (whole,) = jax.linear_transpose(lambda x: _slice_keys(schedule, step, some, x, axis), zeros)(
        found
    )
    return whole


def _fold(
    run_step: Callable[[int | Array, Found, Arrays, Arrays | None], tuple[Found, Any]],
    start: Found,
    own: Arrays,
    schedule: AbstractKeySchedule,
) -> Found:
    """`run_step(step, found, here, in_flight)` of all schedule.

    `run_step` also returns `in_flight`, the keys of the next step; None in the last.
    """

    def body(carry: tuple[Found, Arrays], step: Array) -> Any:
        found, here = carry
        return run_step(step, found, here, schedule.advance(here, own, step)), None

    (found, here), last = (start, schedule.first(own)), schedule.count - 1
    if last > 0:
        (found, here), _ = lax.scan(body, (found, here), jnp.arange(last, dtype=jnp.int32))
    for step in range(last, last + schedule.trailing):
        found, here = run_step(step, found, here, schedule.advance(here, own, step))
    return run_step(last + schedule.trailing, found, here, None)[0]


@dataclasses.dataclass(frozen=True)
class _ScheduledAttention(autodiff.AbstractFunction, derivatives.AbstractDerivative):
    """The state of this device's queries, with a derivative that goes, in either mode, through all schedule again.

    Where the derivative is differentiated a step is computed again, so that keys are kept and no scores.
    """

    names: Names
    settings: Settings
    schedule: AbstractKeySchedule

    def apply(self, args: Operands) -> AttentionState:
        unrounded = self.settings.needing(unrounded=True)

        def run_step(
            step: int | Array, state: AttentionState, keys: Keys, in_flight: Keys | None
        ) -> tuple[AttentionState, Keys | None]:
            here = _with_keys(args, keys, self.schedule, step)
            return attend_and_merge(state, self.names, unrounded, here, in_flight)

        found = _fold(run_step, empty_like(unrounded, args), _own(args), self.schedule)
        return rounded(found, args, self.settings)

    def jvp(self, primals: Operands, tangents: Operands) -> tuple[AttentionState, AttentionState]:
        state = derivatives.with_checkpoint_names(autodiff.function_call(self, primals))
        return state, derivatives.tangent_along(self, derivatives.Saved(primals, state), tangents)

    def tangent(self, saved: derivatives.Saved, directions: Operands) -> AttentionState:
        schedule, operands, state = self.schedule, saved.operands, saved.state

        def run_step(
            step: int | Array,
            sums: blockwise.TangentSums,
            here: tuple[Keys, Keys],
            in_flight: Arrays | None,
        ) -> tuple[blockwise.TangentSums, Arrays | None]:
            keys, changes = here
            bias = _slice_keys(schedule, step, ALL, directions.bias, 3)
            along = cotangents(directions.query, *changes, bias, directions.score_arrays)
            given = _with_keys(operands, keys, schedule, step)
            found = blockwise.tangent_sums(given, self.settings, state.lse, along)
            found, in_flight = overlap_transfer(found, in_flight)
            return add_trees(sums, found), in_flight

        out, lse = (lax.full_like(x, 0.0, dtype=state.lse.dtype) for x in state)
        zero = blockwise.TangentSums(out, lse, lse)
        own = _own(operands), Keys(directions.key, directions.value)
        return blockwise.tangent_of(
            state, _fold(_computed_again(run_step), zero, own, schedule).means()
        )

    def backward(
        self, saved: derivatives.Saved, cotangent: AttentionState, needs_grad: Operands
    ) -> Operands:
        settings, schedule = derivatives.needing(self.settings, needs_grad), self.schedule
        operands, rows = saved.operands, blockwise.row_cotangents(saved.state, cotangent)

        def once(
            some: slice,
            step: int | Array,
            keys: Any,
            staying: Gradients | None,
            in_flight: blockwise.InFlight,
        ) -> tuple[blockwise.InFlight, Gradients]:
            def among_turn(x: Array | None) -> Array | None:
                return x if x is None or some == ALL else pad_zeros(x, 1, some.start, schedule.size)

            here = _with_keys(operands, keys, schedule, step, some)
            d_query = None if staying is None else staying.query
            found, in_flight = blockwise.backward_by_head(d_query, here, settings, rows, in_flight)
            found = derivatives.keep_needed(found, needs_grad)
            bias = found.bias
            if bias is not None and operands.bias is not None:
                bias = _unslice_keys(schedule, step, some, bias, operands.bias.shape[3], 3)
            others = bias, found.score_arrays
            if staying is not None:
                others = add_trees(others, (staying.bias, staying.score_arrays))
            keys = Keys(among_turn(found.key), among_turn(found.value))
            return in_flight, Gradients(keys, found.query, *others)

        def run_step(
            keys: Any,
            so_far: Gradients | None,
            step: int | Array,
            in_flight: blockwise.InFlight,
            some: slice = ALL,
        ) -> tuple[blockwise.InFlight, Gradients]:
            staying = None if so_far is None else so_far._replace(keys=Keys(None, None))
            again = _computed_again(functools.partial(once, some))
            return again(step, keys, staying, in_flight)

        found = schedule.backward(run_step, _own(operands))
        given = cotangents(found.query, *found.keys, found.bias, found.score_arrays)
        return blockwise.cast_like(given, operands)

    def plain(self) -> derivatives.AbstractDerivative:
        return self
