"""Reductions over keys that are sharded over a mesh: a tree for any kind of state."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array

from energy_attn.kernels.internal import (
    AbstractFunction,
    Operands,
    Settings,
    State,
    function_call,
)

from ..merge._packing import joined
from ._arguments import Axes
from ._merge import choose_merge, fold_across
from ._plan import ShardingPlan
from ._sharded_attention import as_parts, run_sharded, unsharded_if_empty, with_indices
from ._tree import Tree, with_all_queries


class Reduction(NamedTuple):
    """A function of some keys, and the fold of its results over all of them; static, hashable.

    Attributes:
        find: `find(settings, operands, *rows)`, a tree of arrays `[B, T, N, ...]`.
        fold: `fold(found, axes, plan)`, equal on all devices of the axes.
    """

    find: Callable[..., Any]
    fold: Callable[[Any, Axes, ShardingPlan], Any]


def sharded_reduction(
    plan: ShardingPlan | None,
    reduction: Reduction,
    settings: Settings,
    operands: Operands,
    *rows: Array | Operands,
) -> Any:
    """The result of `reduction` for all keys of a call, without its sink, sharded over a mesh by `plan`.

    All devices see all queries, whatever the method of `plan`: sharded ones are gathered, and each
    device keeps the results for its own. Among `rows` may be the operands of another call with as many rows and
    keys, which are sharded likewise. Raises as `reduction.find` does.
    """

    def of_keys(operands: Operands) -> Operands:
        return operands._replace(sink=None).positioned(read=False)

    operands = of_keys(operands)
    rows = tuple(of_keys(x) if isinstance(x, Operands) else x for x in rows)
    if plan is None:
        return _unsharded(reduction, settings, operands, *rows)
    return _sharded(plan, reduction, settings, operands, *rows)


# Compiled here, so that a call outside of jit is traced and compiled once for its shapes.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _unsharded(
    reduction: Reduction, settings: Settings, operands: Operands, *rows: Array | Operands
) -> Any:
    return reduction.find(settings, operands, *rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sharded(
    plan: ShardingPlan,
    reduction: Reduction,
    settings: Settings,
    operands: Operands,
    *rows: Array | Operands,
) -> Any:
    plan = unsharded_if_empty(plan, operands)._replace(method=Tree())
    axes = plan.sequence

    def run(operands: Operands, *rows: Array | Operands) -> Any:
        own = operands.query.shape[1]
        if plan.queries:
            operands = with_all_queries(operands, axes)
            rows = tuple(
                with_all_queries(x, axes) if isinstance(x, Operands) else joined(x, axes, 1)
                for x in rows
            )
        found = reduction.find(settings, operands, *rows)
        if axes:
            found = reduction.fold(found, axes, plan)
        if not plan.queries:
            return found
        first = lax.axis_index(axes) * own
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, own, 1), found)

    rows = tuple(as_parts(plan, x) if isinstance(x, Operands) else x for x in rows)
    return run_sharded(plan, run, with_indices(plan, settings, operands), *rows)


def fold_states(state: State, axes: Axes, plan: ShardingPlan) -> State:
    """The fold of states by the strategy of the plan, if they fold by it."""
    return fold_across(choose_merge(plan.merge, state, axes, plan.topology), axes, state)


def fold_sums(found: Array, axes: Axes, plan: ShardingPlan) -> Array:
    """The elementwise sum."""
    del plan
    return lax.psum(found, axes)


def fold_maxima(found: Array, axes: Axes, plan: ShardingPlan) -> Array:
    """The elementwise maximum; where several devices have it, its derivative is the mean of theirs."""
    del plan
    return function_call(_MaximumOverDevices(axes), found)


@dataclasses.dataclass(frozen=True)
class _MaximumOverDevices(AbstractFunction):
    axes: Axes

    def apply(self, args: Array) -> Array:
        return lax.pmax(args, self.axes)

    def jvp(self, primals: Array, tangents: Array) -> tuple[Array, Array]:
        found: Array = function_call(self, primals)
        largest = (primals == found).astype(primals.dtype)
        change, count = lax.psum((largest * tangents, largest), self.axes)
        return found, change / count
