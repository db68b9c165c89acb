"""The options of an energy: those of the kernels, and how keys are sharded."""

from jaxtyping import Array, Float

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import RowOptions, ScoreOptions
from energy_attn.kernels.masks import AbstractMask


class EnergyOptions(ScoreOptions, total=False):
    """The options of an energy, which do not depend on queries and keys."""

    sink: Float[Array, "... N"] | None
    r"""$b$, `[N]` or `[B, N]`: the score, in nats, of one more outcome whose value is zero,
    $F = \log(e^{F_{keys}} + e^b)$. It may be traced and differentiated. A fully masked row has
    `out = 0` and $F = b$; an absent query has no sink. None, and minus infinity: there is none."""

    parallel: SequenceParallel | None
    """How keys are sharded over the current mesh. None: they are not, unless the type of `key` says
    that its sequence is sharded (explicit mesh axes)."""


class ModuleOptions(EnergyOptions, total=False):
    """The fields of a `FreeEnergy`."""

    mask: AbstractMask | None
    """A mask of `energy_attn.masks`, besides causality, the window and the mask of a call."""


class AttentionOptions(EnergyOptions, RowOptions, total=False):
    """The options of a call of an energy: what it is, and the rows that it is asked about."""
