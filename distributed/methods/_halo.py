"""Attention over the keys that a mask lets queries see, where that is few of other devices'."""

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    Operands,
    Settings,
    is_concrete,
    is_static,
    may_meet,
    vary_together,
)
from energy_attn.kernels.masks import AbstractMask, And, Interval, Segments

from .. import cost
from ..cost._devices import usual_topology
from ..cost._halo import Halo, Meets, halo, has_groups
from ._abstract import AbstractMethod, LocalCall, Split
from ._arguments import Axes
from ._gather import Gather
from ._halo_keys import Near
from ._hybrid import Hybrid
from ._in_turn import attend_in_turn
from ._parallel import SequenceParallel
from ._plan import ShardingPlan, shape_of
from ._ring import Ring
from ._tree import Tree

# Pairs of tokens and devices whose segments are compared before a program is made; of more only the window counts.
_MOST_COMPARED = 1 << 24
_MOST_ASKED = 64  # devices, for each pair of which a mask is asked once


@dataclasses.dataclass(frozen=True)
class Neighbours(AbstractMethod):
    r"""Keys come from those devices alone whose keys some query may see, and no more of them than that.

    It takes the place of a ring, of a gather, and of a tree of sharded queries, where a window says so: with $S / p$
    keys on a device and a window of $w$, contiguous shards need $\lceil (w - 1) p / S \rceil$ hops, the last one of a
    part of the keys.
    Gradients of keys return as the keys came.

    Attributes:
        halo: which keys.
    """

    halo: Halo

    name = "ring"

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        """Each device has its queries, and bias, mask, positions and segments of all keys."""
        del operands, queries_sharded
        return Split(heads=(), queries=axes, keys=(), rows=axes)

    def attend(self, call: LocalCall) -> AttentionState:
        """Raises as `attend` does."""
        operands = vary_together(call.operands, call.axes)
        turns = Near(call.axes, operands.key.shape[1], self.halo)
        return attend_in_turn(call.names, call.settings, turns, operands)


@dataclasses.dataclass(frozen=True)
class NeighbouringGroups(Hybrid):
    """A hybrid in which keys come from those groups of devices alone whose keys some query may see.

    Attributes:
        halo: which keys of a group.
    """

    halo: Halo

    def around(self, call: LocalCall) -> AttentionState:
        turns = Near(call.axes, call.operands.key.shape[1], self.halo)
        return attend_in_turn(call.names, call.settings, turns, call.operands)


def near_plan(
    plan: ShardingPlan,
    parallel: SequenceParallel | None,
    settings: Settings,
    operands: Operands,
    rule: AbstractMask | None,
) -> ShardingPlan:
    """The plan, by `Neighbours` where positions and the mask tell that queries see some of the keys.

    Positions are those of the layout. `rule` is the mask as it was given, whose segments may be known.
    """
    sizes = *operands.query.shape, *operands.key.shape
    if not plan.sequence or not plan.queries or not is_static(*sizes):
        return plan
    layout = "contiguous" if parallel is None else parallel.layout
    arrays = operands.query, operands.key, operands.value
    shape = shape_of(plan, *arrays, settings.mask.window, layout)
    meets = _meets(settings, operands, rule, plan.devices)
    is_bounded = max(settings.mask.window) < shape.keys
    if not is_bounded and meets is None:
        return plan
    if layout != "contiguous" and shape.queries != shape.keys:
        return plan  # queries in an order of their own
    method: Any = plan.method
    if is_bounded and (parallel is None or parallel.method == "auto"):
        name = cost.choose_method(shape, plan.topology or usual_topology(plan.mesh, plan.sequence))
        method = {"ring": Ring(), "gather": Gather()}.get(name, method)
    if not isinstance(method, (Ring, Gather, Tree, Hybrid)):
        return plan
    groups = plan.devices
    if isinstance(method, Hybrid):
        groups //= plan.mesh.shape[plan.sequence[-1]]
        if not has_groups(layout, shape.queries, shape.keys, plan.devices):
            return plan
    found = halo(layout, groups, shape.queries, shape.keys, settings.mask.window, meets)
    if found is None:
        return plan
    near = NeighbouringGroups if isinstance(method, Hybrid) else Neighbours
    return plan._replace(method=near(found))


def _meets(
    settings: Settings, operands: Operands, rule: AbstractMask | None, devices: int
) -> Meets | None:
    """What the mask says of keys beside its window, where its arrays are known; None: nothing."""
    joined = [] if rule is None else _conjuncts(rule)
    tables = [_ids(x) for x in joined if isinstance(x, Segments) and _is_known(x)]
    tables = [x for x in tables if x[1].shape[1] * devices <= _MOST_COMPARED]
    mask = settings.mask.bind(operands.mask_arrays)
    asked = not settings.mask.is_window and devices <= _MOST_ASKED and _is_known(mask)
    if not asked and not tables:
        return None

    def meets(
        low: np.ndarray, high: np.ndarray, first: np.ndarray, last: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if asked:
            with jax.ensure_compile_time_eval():
                bounds = [jnp.asarray(x, jnp.int32)[None] for x in (low, high, first, last)]
                met = may_meet(mask, Interval(*bounds[:2]), Interval(*bounds[2:]))
                last = np.where(np.asarray(met).any(0), last, first - 1)
        for queries, keys in tables:
            bounds = zip(*(x.tolist() for x in (low, high, first, last)), strict=True)
            pairs = [_shared(queries, keys, *x) for x in bounds]
            first, last = np.array(pairs).T
        return first, last

    return meets


def _is_known(mask: AbstractMask) -> bool:
    """Whether this process knows the arrays of a mask while it makes the program."""
    return all(map(is_concrete, jax.tree.leaves(mask)))


def _conjuncts(mask: AbstractMask) -> list[AbstractMask]:
    """The masks that all have to say yes."""
    if isinstance(mask, And):
        return [*_conjuncts(mask.first), *_conjuncts(mask.second)]
    return [mask]


def _ids(mask: Segments) -> tuple[np.ndarray, np.ndarray]:
    """The segments of queries and of keys, `[rows, tokens]`."""
    queries = np.atleast_2d(np.asarray(mask.query_ids))
    return queries, queries if mask.key_ids is None else np.atleast_2d(np.asarray(mask.key_ids))


def _shared(
    queries: np.ndarray, keys: np.ndarray, low: int, high: int, first: int, last: int
) -> tuple[int, int]:
    """The first and the last of some keys that are in the segments of some queries."""
    of_both = np.zeros(max(0, last - first + 1), bool)
    for row in range(max(len(queries), len(keys))):
        there = keys[row % len(keys), first : last + 1]
        seen = np.isin(there, queries[row % len(queries), low : high + 1])
        of_both[: len(seen)] |= seen
    (places,) = np.nonzero(of_both)
    return (
        (first, first - 1) if not len(places) else (first + int(places[0]), first + int(places[-1]))
    )
