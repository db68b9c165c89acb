"""The merge strategy of one all-gather."""

from collections.abc import Callable, Iterator
from typing import Any

from energy_attn.kernels import AttentionState, merge_all

from ..network._shape import Shape
from ..network._topology import Topology, all_axes
from ..network._transfer import Transfer
from ._abstract import AbstractMessageMerge, Axes
from ._packing import as_invariant, gathered
from ._scatter import EXCHANGE

# From this many chips of one slice on, XLA:TPU makes of a small gather a sum of what each puts
# among zeros, as in `tests/tpu/test_programs.py`.
_MANY_CHIPS = 64


class Gather(AbstractMessageMerge):
    """One all-gather of all states, folded by each device for itself."""

    name = "gather"
    least_axes = 1
    automatic = True
    scatter = EXCHANGE

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
        size, axes = shape.rows * shape.state, all_axes(topology)
        if topology.platform == "tpu" and shape.out_width > 0:  # energies fill rows of outputs
            row = shape.out_width * shape.wide_bytes
            size = row * (shape.rows + -(-shape.rows * shape.wide_bytes // row))
        one_slice = all(link.torus for link in topology.links)
        if topology.platform == "tpu" and one_slice and topology.devices >= _MANY_CHIPS:
            yield Transfer("all-reduce", topology.devices * size, axes)
        else:
            yield Transfer("all-gather", size, axes)
