"""Options of an energy: the options of the kernels, and how keys are sharded."""

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import MergedScoreOptions, RowOptions
from energy_attn.kernels.masks import AbstractMask


class EnergyOptions(MergedScoreOptions, total=False):
    """The options of an energy, which do not depend on queries and keys."""

    parallel: SequenceParallel | None
    """How keys are sharded over the current mesh. None: they are not, unless the type of `key` says
    that its sequence is sharded (explicit mesh axes)."""


class ModuleOptions(EnergyOptions, total=False):
    """The fields of a `FreeEnergy`."""

    mask: AbstractMask | None
    """A mask of `energy_attn.masks`, besides causality, the window and the mask of a call."""


class AttentionOptions(EnergyOptions, RowOptions, total=False):
    """The options of a call of an energy: what it is, and the rows that it is asked about."""
