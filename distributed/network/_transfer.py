"""A predicted collective."""

import dataclasses

from ..hlo._collectives import Kind


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective that the compiled program is predicted to have.

    Attributes:
        kind: as HLO names it.
        bytes: payload, with the meaning of `bytes` in
            [`Collective`][energy_attn.distributed.Collective]: its operands on one device, each
            time that it runs. `out` and `lse` of a state are one transfer; where they are
            sent as two arrays, a program may show an instruction for each.
        axes: the mesh axes that it joins, as indices of `Topology.links`.
        count: how often it runs.
        distance: of a permute, how many devices along its axis a message moves.
        pairs: of a permute, whether devices exchange with each other, two by two.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape = cost.Shape(1, 1, 4096, 16, 16, 64, dtype="float32")
        >>> cost.transfers("tree", "gather", shape, cost.ethernet(8))
        (Transfer(kind='all-gather', bytes=4160, axes=(0,), count=1, distance=1, pairs=False),)
    """

    kind: Kind
    bytes: int
    axes: tuple[int, ...]
    count: int = 1
    distance: int = 1
    pairs: bool = False
