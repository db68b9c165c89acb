"""The merge strategy of one all-gather."""

from collections.abc import Callable, Iterator
from typing import Any

from energy_attn.kernels import AttentionState, merge_all

from ..cost._shape import Shape
from ..cost._topology import Topology
from ..cost._transfer import Transfer
from ._abstract import AbstractMessageMerge, Axes
from ._packing import as_invariant, gathered

# With at least this many chips in a slice, XLA:TPU turns a small gather into an all-reduce of arrays padded with
# zeros (`tests/tpu/test_programs.py`).
_MANY_CHIPS = 64


class GatherMerge(AbstractMessageMerge):
    """One all-gather of all states, folded by each device for itself."""

    name = "gather"
    least_axes = 1
    automatic = True

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        return as_invariant(merge_all(gathered(state, axes), axis=0), axes)

    def fold_messages(
        self,
        message: AttentionState,
        axes: Axes,
        unpack: Callable[[AttentionState], Any],
        pack: Callable[[Any], AttentionState],
    ) -> Any:
        return merge_all(unpack(gathered(message, axes)), axis=0)

    def transfers(self, shape: Shape, topology: Topology) -> Iterator[Transfer]:
        size, tpu = shape.rows * shape.state, topology.platform == "tpu"
        if tpu and shape.out_width > 0:  # energies fill rows of outputs
            row = shape.out_width * shape.lse_bytes
            size = row * (shape.rows + -(-shape.rows * shape.lse_bytes // row))
        one_slice = all(link.torus for link in topology.links)
        if tpu and one_slice and topology.devices >= _MANY_CHIPS:
            yield Transfer("all-reduce", topology.devices * size, topology.axes)
        else:
            yield Transfer("all-gather", size, topology.axes)
