"""Whatever folds over keys, over keys that are split over a mesh: a tree for any kind of state."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, CovarianceState
from energy_attn.kernels.internal import CheckedCall, Operands, Settings, with_default_positions

from ..merge._covariance import covariance_merge, merge_covariances
from ..merge._packing import joined
from ..spec._arguments import Axes
from ..spec._plan import Placement
from ._merge import choose_merge, fold_across
from ._sharded_attention import over_devices, where_rows_are
from ._tree import with_all_queries


class Task(NamedTuple):
    """What is found of some keys, and how that of all of them is folded; static, hashable.

    Attributes:
        find: `find(settings, operands, *rows)`, a tree of arrays `[B, T, N, ...]`.
        fold: `fold(found, axes, place)`, equal on all devices of the axes.
    """

    find: Callable[..., Any]
    fold: Callable[[Any, Axes, Placement], Any]


def spread_rows(place: Placement | None, task: Task, call: CheckedCall, *rows: Array) -> Any:
    """What `task` finds of all keys of a checked call, split over a mesh as `place` says.

    All devices see all queries, whatever the method of `place`: those that are split are gathered,
    and each device keeps what was found for its own. Raises as `task.find` does.
    """
    if place is None:
        return _whole(task, call.settings, call.operands, *rows)
    return _spread(place, task, call.settings, call.operands, *rows)


# Compiled here, so that a call outside of jit is traced and compiled once for its shapes.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _whole(task: Task, settings: Settings, operands: Operands, *rows: Array) -> Any:
    return task.find(settings, operands, *rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _spread(
    place: Placement, task: Task, settings: Settings, operands: Operands, *rows: Array
) -> Any:
    place = where_rows_are(place, operands)._replace(method="tree")
    axes = place.sequence

    def run(operands: Operands, *rows: Array) -> Any:
        own = operands.query.shape[1]
        if place.queries:
            operands = with_all_queries(operands, axes)
            rows = tuple(joined(x, axes, 1) for x in rows)
        found = task.find(settings, operands, *rows)
        if axes:
            found = task.fold(found, axes, place)
        if not place.queries:
            return found
        first = lax.axis_index(axes) * own
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, own, 1), found)

    if axes:
        operands = with_default_positions(
            operands, settings
        )  # a device's part does not count from 0
    return over_devices(place, run, operands, *rows)


def fold_states(state: AttentionState, axes: Axes, place: Placement) -> AttentionState:
    """As attention folds. Raises nothing."""
    return fold_across(choose_merge(place.merge, state, axes, place.topology), axes, state)


def fold_spreads(state: CovarianceState, axes: Axes, place: Placement) -> CovarianceState:
    """By the law of total covariance, with the strategy of `place` if covariances fold by it."""
    return merge_covariances(covariance_merge(place.merge), axes, state)


def fold_maxima(found: Array, axes: Axes, place: Placement) -> Array:
    """The largest. It has no derivative. Raises nothing."""
    del place
    return lax.pmax(found, axes)
