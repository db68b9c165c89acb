"""The list of merge strategies, from which names, types, checks and tables are derived."""

from typing import Literal

from energy_attn.kernels.internal import check_choice

from ..cost._shape import Shape
from ..cost._topology import Topology
from ..cost._transfer import total_seconds
from ._abstract import AbstractMerge, AbstractMessageMerge
from ._direct import AllreduceMerge, GatherMerge, RingMerge
from ._exchanges import ButterflyMerge, HalvingMerge, HierarchicalMerge

# Type checkers need a literal; a test compares it with the list below.
MergeName = Literal["allreduce", "gather", "butterfly", "hierarchical", "halving", "ring"]
MergeOption = MergeName | Literal["auto"]

_LISTED = (
    AllreduceMerge(),
    GatherMerge(),
    ButterflyMerge(),
    HierarchicalMerge(),
    HalvingMerge(),
    RingMerge(),
)
STRATEGIES: dict[str, AbstractMerge] = {strategy.name: strategy for strategy in _LISTED}
MERGES = tuple(STRATEGIES)
# Others sum, which would need the mean of all keys first.
COVARIANCE_MERGES = tuple(x.name for x in _LISTED if isinstance(x, AbstractMessageMerge))


def check_merge(merge: str, axes: int) -> None:
    """Raises `ValueError` unless `merge` is `"auto"`, or names a strategy for this number of axes."""
    check_choice("merge", merge, (*MERGES, "auto"))
    least = 1 if merge == "auto" else STRATEGIES[merge].least_axes
    if axes < least:
        number = {2: "two"}.get(least, str(least))
        raise ValueError(
            f"merge: wanted {number} or more mesh axes for {merge!r}, slow ones first, "
            f"got {'one' if axes == 1 else axes}"
        )


def automatic_merges(axes: int) -> tuple[str, ...]:
    """The strategies that `"auto"` chooses from over this number of axes."""
    return tuple(x.name for x in _LISTED if x.automatic and x.least_axes <= axes)


def fastest_merge(shape: Shape, topology: Topology) -> str:
    """The strategy that folds states of these sizes in the least time by the model, for `merge="auto"`."""
    merges = automatic_merges(len(topology.links))
    if topology.devices == 1:
        return merges[0]

    def time(merge: str) -> float:
        return total_seconds(STRATEGIES[merge].transfers(shape, topology), topology)

    return min(merges, key=time)
