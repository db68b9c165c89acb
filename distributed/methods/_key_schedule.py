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
Result = TypeVar("Result")


def attend_by_schedule(call: LocalCall, schedule: AbstractKeySchedule) -> AttentionState:
    function = _ScheduledAttention(call.policy.kernels, call.settings, schedule)
    operands = mesh_axes.vary_together(call.operands, schedule.axes)
    tokens = operands.tokens.map_keys(lambda x: gather_tokens(x, schedule.size, schedule.axes))
    operands = operands._replace(tokens=tokens)
    if differentiated_by_jax(call.policy.kernels):
        return function.apply(operands)
    return autodiff.function_call(function, operands)


# A derivative of a derivative keeps the keys of each step and no scores: a step is computed again.
def _rematerialised(run_step: Callable[..., Result]) -> Callable[..., Result]:
    def run(step: int | Array, *args: Any) -> Result:
        if isinstance(step, int):  # a static index stays static
            return jax.checkpoint(functools.partial(run_step, step))(*args)
        return jax.checkpoint(run_step)(step, *args)

    return run


def _with_keys(
    operands: Operands,
    keys: Keys,
    schedule: AbstractKeySchedule,
    step: int | Array,
    some: slice = ALL,
) -> Operands:
    """The operands of one step: its keys, or some of them, and their slices of other arrays."""
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
    """The slice of an array of all keys for some keys of a step; the whole array if it is broadcast along keys."""
    if x is None or x.shape[axis] == 1:
        return x
    return schedule.slice_step(x, axis, step)[(ALL,) * axis + (some,)]


def _unslice_keys(
    schedule: AbstractKeySchedule,
    step: int | Array,
    some: slice,
    part: Array,
    size: int,
    axis: int,
) -> Array:
    """The transpose of `_slice_keys`: `part` among zeros, to `size` along the axis."""
    shape = (*part.shape[:axis], size, *part.shape[axis + 1 :])
    zeros, part = mesh_axes.vary_together((lax.full_like(part, 0.0, shape=shape), part))
    (whole,) = jax.linear_transpose(lambda x: _slice_keys(schedule, step, some, x, axis), zeros)(
        part
    )
    return whole


def _fold(
    run_step: Callable[[int | Array, Result, Arrays, Arrays | None], tuple[Result, Any]],
    start: Result,
    shard: Arrays,
    schedule: AbstractKeySchedule,
) -> Result:
    """Folds `run_step(step, result, held, in_flight)` over all steps; it also returns the keys that arrived."""

    def body(carry: tuple[Result, Arrays], step: Array) -> Any:
        result, held = carry
        return run_step(step, result, held, schedule.advance(held, shard, step)), None

    (result, held), last = (start, schedule.first(shard)), schedule.count - 1
    if last > 0:
        (result, held), _ = lax.scan(body, (result, held), jnp.arange(last, dtype=jnp.int32))
    for step in range(last, last + schedule.trailing):
        result, held = run_step(step, result, held, schedule.advance(held, shard, step))
    return run_step(last + schedule.trailing, result, held, None)[0]


@dataclasses.dataclass(frozen=True)
class _ScheduledAttention(autodiff.AbstractFunction, derivatives.AbstractDerivative):
    """The state of this device's queries; its derivative goes through all steps again, in either mode."""

    names: Names
    settings: Settings
    schedule: AbstractKeySchedule

    # state = state_{step 0} ⊕ state_{step 1} ⊕ ..., with ⊕ the merge of states
    def apply(self, args: Operands) -> AttentionState:
        unrounded = self.settings.needing(unrounded=True)

        def run_step(
            step: int | Array, state: AttentionState, keys: Keys, in_flight: Keys | None
        ) -> tuple[AttentionState, Keys | None]:
            operands = _with_keys(args, keys, self.schedule, step)
            return attend_and_merge(state, self.names, unrounded, operands, in_flight)

        keys = Keys(args.key, args.value)
        state = _fold(run_step, empty_like(unrounded, args), keys, self.schedule)
        return rounded(state, args, self.settings)

    def jvp(self, primals: Operands, tangents: Operands) -> tuple[AttentionState, AttentionState]:
        state = derivatives.with_checkpoint_names(autodiff.function_call(self, primals))
        return state, derivatives.tangent_along(self, derivatives.Saved(primals, state), tangents)

    # dF = Σ P ds and dout = Σ P (dv + (v - out) ds): the sums of each step's keys add up, with the final F
    def tangent(self, saved: derivatives.Saved, directions: Operands) -> AttentionState:
        schedule, operands, state = self.schedule, saved.operands, saved.state

        def run_step(
            step: int | Array,
            sums: blockwise.TangentSums,
            held: tuple[Keys, Keys],
            in_flight: Arrays | None,
        ) -> tuple[blockwise.TangentSums, Arrays | None]:
            keys, changes = held
            bias = _slice_keys(schedule, step, ALL, directions.bias, 3)
            along = cotangents(directions.query, *changes, bias, directions.score_arrays)
            part = _with_keys(operands, keys, schedule, step)
            terms = blockwise.tangent_sums(part, self.settings, state.lse, along)
            terms, in_flight = overlap_transfer(terms, in_flight)
            return add_trees(sums, terms), in_flight

        out, lse = (lax.full_like(x, 0.0, dtype=state.lse.dtype) for x in state)
        zero = blockwise.TangentSums(out, lse, lse)
        shard = Keys(operands.key, operands.value), Keys(directions.key, directions.value)
        sums = _fold(_rematerialised(run_step), zero, shard, schedule)
        return blockwise.tangent_of(state, sums.means())

    # With the final F, delta and the cotangents of rows, dK and dV are those of a step's keys, and dQ a sum over steps.
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
            def to_shard(x: Array | None) -> Array | None:
                return x if x is None or some == ALL else pad_zeros(x, 1, some.start, schedule.size)

            part = _with_keys(operands, keys, schedule, step, some)
            d_query = None if staying is None else staying.query
            grads, in_flight = blockwise.backward_by_head(d_query, part, settings, rows, in_flight)
            grads = derivatives.keep_needed(grads, needs_grad)
            bias = grads.bias
            if bias is not None and operands.bias is not None:
                bias = _unslice_keys(schedule, step, some, bias, operands.bias.shape[3], 3)
            others = bias, grads.score_arrays
            if staying is not None:
                others = add_trees(others, (staying.bias, staying.score_arrays))
            keys = Keys(to_shard(grads.key), to_shard(grads.value))
            return in_flight, Gradients(keys, grads.query, *others)

        def run_step(
            keys: Any,
            so_far: Gradients | None,
            step: int | Array,
            in_flight: blockwise.InFlight,
            some: slice = ALL,
        ) -> tuple[blockwise.InFlight, Gradients]:
            staying = None if so_far is None else so_far._replace(keys=Keys(None, None))
            return _rematerialised(functools.partial(once, some))(step, keys, staying, in_flight)

        grads = schedule.backward(run_step, Keys(operands.key, operands.value))
        result = cotangents(grads.query, *grads.keys, grads.bias, grads.score_arrays)
        return blockwise.cast_like(result, operands)

    def plain(self) -> derivatives.AbstractDerivative:
        return self
