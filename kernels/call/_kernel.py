"""The abstract class of an implementation of attention."""

import abc
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..masks._abstract import AbstractMask
from ..masks._lengths import Lengths
from ._eight_bits import widened
from ._operands import Operands, Settings, without_lengths
from ._state import AttentionState


class AbstractKernel(abc.ABC):
    """Computes the state `(out, lse)` of a call, and its derivative in both modes.

    The operands may be `jax.ShapeDtypeStruct`s in `check`; elsewhere they are arrays, traced or not.
    The other methods are called only if `check` passes.

    Attributes:
        name: its name in `implementation=`.
        platforms: the platforms it is written for, as in `jax.Device.platform` ("cuda" for NVIDIA's
            GPUs). Empty for kernels made of XLA's operations, which run everywhere and which JAX
            batches and partitions over devices; these alone get segment ids of 64 bits.
        interpreted: other platforms on which it runs slowly, if asked for by name.
        exported: whether JAX guarantees that later versions run a program with it, serialised by
            `jax.export`.
        masks: the classes of rules that it knows, `All` among them. A call with any other is not
            given to it. `AbstractMask` stands for all rules. With `Lengths` among them it gets
            `query_lengths` and `key_lengths` as they are; otherwise positions in their place.
        scores: whether it computes scores of `energy_attn.scores`; if not, it gets no call with one.

    Examples:
        >>> from energy_attn.kernels import AbstractKernel
        >>> class Nothing(AbstractKernel):
        ...     name, platforms, interpreted, exported, masks = "nothing", (), (), True, ()
        ...     def check(self, operands, settings):
        ...         raise NotImplementedError("query: wanted another kernel")
        ...     def forward(self, operands, settings, platform):
        ...         raise NotImplementedError
        ...     def backward(self, operands, settings, state, cotangent, platform):
        ...         raise NotImplementedError
        >>> Nothing().name
        'nothing'
    """

    name: ClassVar[str]
    platforms: ClassVar[tuple[str, ...]]
    interpreted: ClassVar[tuple[str, ...]]
    exported: ClassVar[bool]
    masks: ClassVar[tuple[type[AbstractMask], ...]]
    scores: ClassVar[bool] = False

    @abc.abstractmethod
    def check(self, operands: Operands, settings: Settings) -> None:
        """Raises `NotImplementedError` with the reason for calls that it does not take.

        Looks at shapes, dtypes and installed packages, never at values.
        """

    @abc.abstractmethod
    def forward(
        self, operands: Operands, settings: Settings, platform: str | None
    ) -> AttentionState:
        """The state: `out` `[B, T, N, Hv]` in value's dtype; `lse` `[B, T, N]`, natural, wide.

        Fully masked rows have `out = 0` and `lse = -inf`. `platform` is the one the program is
        lowered for; None if not yet known, which happens only to kernels of XLA's operations.
        """

    def forward_and_rest(
        self, operands: Operands, settings: Settings, platform: str | None
    ) -> tuple[AttentionState, Array]:
        """The state of `forward`, and what rounding took from `lse`, `[B, T, N]`; 0 by default.

        The weights of a backward are `exp(s - lse)`, whose sum is off by as much as `lse` is, by 1% from 3e5 on in
        float32: so they are divided by the exponential of the rest.
        """
        state = self.forward(operands, settings, platform)
        return state, jnp.zeros_like(state.lse)

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

        `state` is the result of any kernel's `forward`. With $P_a = e^{s_a - F}$ and
        $\delta = \dot{out}\cdot out - \dot{lse}$, the cotangents of the scores are $\dot s_a =
        P_a (\dot{out}\cdot v_a - \delta)$. A cotangent of `lse` that is None is zero. Fully masked
        rows get zeros.
        """

    def tangent(
        self,
        operands: Operands,
        settings: Settings,
        state: AttentionState,
        directions: Operands,
        platform: str | None,
    ) -> AttentionState | None:
        r"""The derivative of the state in a direction, of which `backward` is the transpose.

        `directions` has the form of the operands; None for what does not move, which masks,
        positions and segments never do. With $\dot s_a = \mathrm{scale}\,(\dot q \cdot k_a +
        q \cdot \dot k_a) + \dot b_a$ (a score multiplies the first term by $g'$ and adds
        $\dot\theta\, \partial g/\partial\theta$), the derivative of `lse` is $\dot F = \sum_a P_a \dot s_a$,
        and that of `out` is $\sum_a P_a (\dot s_a - \dot F)\, v_a + \sum_a P_a \dot v_a$, in
        their dtypes. Fully masked rows get zeros. By default None: that of the blockwise
        implementation is taken.
        """
        del operands, settings, state, directions, platform
        return None

    def reads_eight_bits(self, operands: Operands, settings: Settings) -> bool:
        """Whether `forward` reads keys and values of eight bits as they are stored, in a call with scales.

        If not, as by default, it gets them widened to the dtype of the query, and no scales; so do the other
        methods always. Looks at shapes and dtypes.
        """
        del operands, settings
        return False


Candidate = str | AbstractKernel  # what may compute a call: a name of the registry, or a kernel


def knows_rest(kernel: AbstractKernel) -> bool:
    """Whether a kernel has a `forward_and_rest` of its own."""
    return type(kernel).forward_and_rest is not AbstractKernel.forward_and_rest


def check_call_of(kernel: AbstractKernel, operands: Operands, settings: Settings) -> None:
    """Raises `NotImplementedError` with the reason for calls that a kernel does not take.

    Also for rules that it does not know, so that none is ever ignored, and for ids of 64 bits, so that none
    is cut off.
    """
    unknown = [x.__name__ for x in settings.rule.classes if not issubclass(x, kernel.masks)]
    if unknown:
        known = " or ".join(x.__name__ for x in kernel.masks)
        raise NotImplementedError(
            f"mask: wanted {known}, got {', '.join(sorted(unknown))} (blockwise takes it)"
        )
    if settings.score is not None and not kernel.scores:
        raise NotImplementedError(
            f"score: wanted None, got {settings.score.name} (blockwise takes it)"
        )
    for name in ("query_segments", "key_segments") if kernel.platforms else ():
        ids = getattr(operands, name)
        if ids is not None and ids.dtype != jnp.int32:
            raise NotImplementedError(
                f"{name.removesuffix('s')}_ids: wanted int32, got {ids.dtype} (blockwise takes it)"
            )
    kernel.check(_shapes_as_read(kernel, operands, settings), settings)


def as_read(kernel: AbstractKernel, operands: Operands, settings: Settings) -> Operands:
    """What a kernel gets: positions unless it knows lengths, keys and values widened unless it reads eight bits."""
    if Lengths not in kernel.masks:
        operands = without_lengths(operands)
    if operands.key_scale is not None and not kernel.reads_eight_bits(operands, settings):
        operands = widened(operands)
    return operands


def _shapes_as_read(kernel: AbstractKernel, operands: Operands, settings: Settings) -> Operands:
    if operands.key_scale is None and operands.query_lengths is operands.key_lengths is None:
        return operands
    return jax.eval_shape(functools.partial(as_read, kernel, settings=settings), operands)


def check_operands(operands: Operands, dtypes: Sequence[str], without: Sequence[str]) -> None:
    """Declines dtypes other than `dtypes`, empty axes, and arrays in the fields `without`.

    For `AbstractKernel.check`. Raises `NotImplementedError` with the reason.
    """
    for name in without:
        if jax.tree.leaves(getattr(operands, name)):
            raise NotImplementedError(f"{name}: wanted None, got an array (blockwise takes it)")
    for name, x in zip(Operands._fields[:3], operands[:3], strict=True):
        if x.dtype.name not in dtypes:
            raise NotImplementedError(f"{name}: wanted {' or '.join(dtypes)}, got {x.dtype}")
        if 0 in x.shape:
            raise NotImplementedError(f"{name}: wanted no empty axis, got shape {x.shape}")
