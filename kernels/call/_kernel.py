"""What an implementation of attention is: the abstract class that all of them fill in."""

import abc
from collections.abc import Sequence
from typing import ClassVar

from ._arguments import Operands, Settings
from ._state import AttentionState


class AbstractKernel(abc.ABC):
    """One way to compute the state `(out, lse)` of a call, and its derivative.

    The operands of a call may be `jax.ShapeDtypeStruct`s in `check`, and are arrays, traced or
    not, elsewhere. All methods may rely on `check` having passed.

    Attributes:
        name: what `implementation=` calls it.
        platforms: the platforms that it is made for, as `jax.Device.platform` names them ("cuda"
            for NVIDIA's); empty if it is made of XLA's own operations, and so runs on all of them,
            batched and split over devices by JAX.
        interpreted: other platforms on which it can run if asked for by name, slowly.
        exported: whether JAX promises that a program which `jax.export` has serialised with it
            runs later.
    """

    name: ClassVar[str]
    platforms: ClassVar[tuple[str, ...]]
    interpreted: ClassVar[tuple[str, ...]]
    exported: ClassVar[bool]

    @abc.abstractmethod
    def check(self, operands: Operands, settings: Settings) -> None:
        """Raises `NotImplementedError`, saying why, for calls that it does not take.

        Looks at shapes, dtypes and what is installed; never at values.
        """

    @abc.abstractmethod
    def forward(
        self, operands: Operands, settings: Settings, platform: str | None
    ) -> AttentionState:
        """The state: `out` `[B, T, N, Hv]` in value's dtype; `lse` `[B, T, N]`, natural, wide.

        Rows that see no key have `out = 0` and `lse = -inf`. `platform` is what the program is
        lowered for; None where that is not yet known, for kernels of XLA's operations alone.
        Raises nothing.
        """

    @abc.abstractmethod
    def backward(
        self,
        operands: Operands,
        settings: Settings,
        state: AttentionState,
        cotangent: AttentionState,
        platform: str | None,
    ) -> Operands:
        r"""The cotangents of the operands, in their dtypes; None for masks, positions, segments.

        `state` is what any kernel's `forward` gave. With $P_a = e^{s_a - F}$ and
        $\delta = \dot{out}\cdot out - \dot{lse}$, the scores have $\dot s_a = P_a (\dot{out}\cdot
        v_a - \delta)$: both cotangents count, and one of lse that is None is known to be zero.
        Rows that see no key get zeros. Raises nothing.
        """


def check_operands(operands: Operands, dtypes: Sequence[str], without: Sequence[str]) -> None:
    """Declines dtypes but `dtypes`, empty axes, and arrays in place of the fields `without`.

    For `AbstractKernel.check`. Raises `NotImplementedError`, saying why.
    """
    for name in without:
        if getattr(operands, name) is not None:
            raise NotImplementedError(f"{name}: wanted None, got an array (blockwise takes it)")
    for name, x in zip(Operands._fields[:3], operands[:3], strict=True):
        if x.dtype.name not in dtypes:
            raise NotImplementedError(f"{name}: wanted {' or '.join(dtypes)}, got {x.dtype}")
        if 0 in x.shape:
            raise NotImplementedError(f"{name}: wanted no empty axis, got shape {x.shape}")
