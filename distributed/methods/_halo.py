"""Attention over the keys that a mask lets queries see, where that is few of other devices'."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import Interval, Operands, Settings, may_meet, vary_together

from .. import cost
from ..cost._devices import usual_topology
from ..cost._halo import Halo, halo
from ._abstract import AbstractMethod, LocalCall, Split
from ._arguments import Axes
from ._gather import Gather
from ._halo_keys import Near
from ._in_turn import attend_in_turn
from ._parallel import SequenceParallel
from ._plan import ShardingPlan, shape_of
from ._ring import Ring


@dataclasses.dataclass(frozen=True)
class Neighbours(AbstractMethod):
    r"""Keys come from those devices alone whose keys some query may see, and no more of them than that.

    It takes the place of a ring of keys, and of a gather, where a window says so: with $S / p$ keys on a device and a
    window of $w$, contiguous shards need $\lceil (w - 1) p / S \rceil$ hops, the last one of a part of the keys.
    Gradients of keys return as the keys came.

    Attributes:
        halo: which keys.
        gradient_dtype: as of a `Ring`.
    """

    halo: Halo
    gradient_dtype: DTypeLike | None = None

    name = "ring"

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        """Each device has its queries, and bias, mask, positions and segments of all keys."""
        del operands, queries_sharded
        return Split(heads=(), queries=axes, keys=(), rows=axes)

    def attend(self, call: LocalCall) -> AttentionState:
        """Raises as `attend` does."""
        operands = vary_together(call.operands, call.axes)
        dtype: Any = self.gradient_dtype
        turns = Near(call.axes, operands.key.shape[1], dtype, self.halo)
        return attend_in_turn(call.names, call.settings, turns, operands)


def near_plan(
    plan: ShardingPlan | None,
    parallel: SequenceParallel | None,
    settings: Settings,
    operands: Operands,
    given: bool,
) -> ShardingPlan | None:
    """The plan, by `Neighbours` where positions and the mask tell that queries see some of the keys.

    `given` says whether positions of the user's own are, which then tell nothing before the program runs.
    """
    if plan is None or not plan.sequence or not plan.queries or given:
        return plan
    layout = "contiguous" if parallel is None else parallel.layout
    arrays = operands.query, operands.key, operands.value
    shape = shape_of(plan, *arrays, settings.mask.window, layout)
    meets, is_bounded = _meets(settings, operands), max(settings.mask.window) < shape.keys
    if not is_bounded and meets is None:
        return plan
    if layout != "contiguous" and shape.queries != shape.keys:
        return plan  # queries in an order of their own
    method: Any = plan.method
    if is_bounded and (parallel is None or parallel.method == "auto"):
        name = cost.choose_method(shape, plan.topology or usual_topology(plan.mesh, plan.sequence))
        method = {"ring": Ring(), "gather": Gather()}.get(name, method)
    if not isinstance(method, (Ring, Gather)) or getattr(method, "rotate", "keys") == "queries":
        return plan
    found = halo(layout, plan.devices, shape.queries, shape.keys, settings.mask.window, meets)
    if found is None:
        return plan
    return plan._replace(method=Neighbours(found, getattr(method, "gradient_dtype", None)))


def _meets(settings: Settings, operands: Operands) -> Callable[..., np.ndarray] | None:
    """Whether intervals of positions may see each other, where the mask's arrays are known; else None."""
    arrays = operands.mask_arrays
    if not settings.mask.constrains or settings.mask.is_window:
        return None
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return None
    mask = settings.mask.bind(arrays)

    def meets(*bounds: np.ndarray) -> np.ndarray:
        with jax.ensure_compile_time_eval():
            low, high, first, last = (jnp.asarray(x, jnp.int32)[None] for x in bounds)
            found = np.asarray(may_meet(mask, Interval(low, high), Interval(first, last)))
        return np.asarray(found.any(0))

    return meets
