"""The abstract class of an implementation of attention, and the device that its program is lowered for."""

import abc
import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._imports import private_names
from ..masks._abstract import AbstractMask
from ..masks._ready import All, Lengths
from ._operands import KernelCall, Operands, dequantized, differentiated, map_some, with_moved
from ._state import AttentionState, divided, holds_keys


class AbstractKernel(abc.ABC):
    """Computes the state `(out, lse)` of a call, and its derivative in both modes.

    The methods take a [`KernelCall`][energy_attn.kernels.KernelCall], whose operands may be `jax.ShapeDtypeStruct`s in
    `check`; elsewhere they are arrays, traced or not. The other methods are called only if `check` passes. A kernel of
    JAX's operations is an [`AbstractJAXKernel`][energy_attn.kernels.AbstractJAXKernel], which needs `forward` alone.

    Attributes:
        name: its name in `implementation=`.
        platforms: the platforms it is written for, as in `jax.Device.platform` ("cuda" for NVIDIA's
            GPUs). Empty for kernels made of XLA's operations, which run everywhere and which JAX
            batches and partitions over devices; these alone get segment ids of 64 bits.
        interpreted: other platforms on which it runs slowly, if asked for by name.
        exported: whether JAX guarantees that later versions run a program with it, serialised by `jax.export`.
        masks: the classes of masks that it knows, `All` among them. A call with any other is not
            given to it. `AbstractMask` stands for all masks. With `Lengths` among them it gets
            the lengths of `tokens` as they are; otherwise positions in their place.
        scores: whether it computes scores of `energy_attn.scores`; if not, it gets no call with one.
        differentiated_by_jax: whether all derivatives are JAX's own of `forward`, of any order, also in the
            source. Otherwise second derivatives are those of the blockwise kernel.
        reproducible: whether the bits of a row depend on it, the keys that it sees and the options alone. Derivatives
            of second order then raise, as their sums would be in another order.

    Examples:
        >>> from energy_attn.kernels import AbstractKernel
        >>> class Nothing(AbstractKernel):
        ...     name, platforms, interpreted, exported, masks = "nothing", (), (), True, ()
        ...     def check(self, call):
        ...         raise NotImplementedError("query: wanted another kernel")
        ...     def forward(self, call):
        ...         raise NotImplementedError
        ...     def backward(self, call, state, cotangent):
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
    differentiated_by_jax: ClassVar[bool] = False
    reproducible: ClassVar[bool] = False

    @abc.abstractmethod
    def check(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` with the reason for calls that it does not take.

        Looks at shapes, dtypes and installed packages, never at values.
        """

    def check_preferred(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` with the reason for calls that a later kernel computes faster.

        Declines none by default. The kernel still gets such a call if no other candidate takes it.
        """
        del call

    @abc.abstractmethod
    def forward(self, call: KernelCall) -> AttentionState:
        """The state: `out` `[B, T, N, Hv]` in value's dtype; `lse` `[B, T, N]`, natural, in float32 or float64.

        Fully masked rows have `out = 0` and `lse = -inf`.
        """

    def forward_and_rest(self, call: KernelCall) -> tuple[AttentionState, Array]:
        """The state of `forward`, and the rounding error of `lse`, `[B, T, N]`; 0 by default.

        The weights of a backward are `exp(s - lse)`, whose sum has the relative error of `exp(lse)`: 1% where
        `lse` is 3e5 in float32. So they are divided by `exp(rest)`.
        """
        state = self.forward(call)
        return state, jnp.zeros_like(state.lse)

    def forward_and_maximum(self, call: KernelCall) -> tuple[AttentionState, Array, Array | None]:
        """`forward_and_rest`, and the largest score of each row that sees a key, minus infinity elsewhere, `[B, T, N]`.

        None, as by default, where the kernel does not know it: another walk over the keys computes it.
        """
        return *self.forward_and_rest(call), None

    @abc.abstractmethod
    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        r"""The cotangents of the operands, in their dtypes; None for masks, positions, segments.

        `state` is the result of any kernel's `forward`. With $P_a = e^{s_a - F}$ and
        $\delta = \dot{out}\cdot out - \dot{lse}$, the cotangents of the scores are $\dot s_a =
        P_a (\dot{out}\cdot v_a - \delta)$. A cotangent of `lse` that is None is zero. Fully masked
        rows get zeros.
        """

    def corrected(self, cotangent: AttentionState, rest: Array) -> AttentionState:
        """Corrects the cotangent of a state for the rounding error of its `lse`, before `backward` gets it.

        By default divides by the exponential of the rest where the kernel has a `forward_and_rest` of its own.
        """
        # Σ_a e^{s_a - lse} = e^{rest}
        if type(self).forward_and_rest is AbstractKernel.forward_and_rest:
            return cotangent
        return divided(cotangent, jnp.exp(-rest))

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState | None:
        r"""Derivative of the state in a direction; `backward` is its transpose.

        `directions` has the form of the operands; None for what does not move, which masks, positions and segments
        never do. With $\dot s_a = \mathrm{scale}\,(\dot q \cdot k_a + q \cdot \dot k_a) + \dot b_a$ (a score multiplies
        the first term by $g'$ and adds $\dot\theta\, \partial g/\partial\theta$), the derivative of `lse` is
        $\dot F = \sum_a P_a \dot s_a$, and that of `out` is
        $\sum_a P_a (\dot s_a - \dot F)\, v_a + \sum_a P_a \dot v_a$, in their dtypes. Fully masked rows get zeros. By
        default None: that of the blockwise implementation is taken.
        """
        del call, state, directions
        return None

    def reads_eight_bits(self, call: KernelCall) -> bool:
        """Whether `forward` reads stored keys and values of eight bits, in a call with scales.

        If not, as by default, it gets them dequantized to the dtype of the query, and no scales; so do the other
        methods always. Looks at shapes and dtypes.
        """
        del call
        return False


class AbstractJAXKernel(AbstractKernel):
    """A kernel of JAX's operations, whose backward and tangent are JAX's derivatives of its `forward`.

    Its `name` and `forward` are all that a subclass must have. By default it gets plain calls: any dtype, full
    attention, no bias or mask, and all queries and keys there; `masks`, `scores` and `check` say what else it takes.
    It computes grouped heads: query head `n` reads key head `n // (N / K)`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn.kernels import AbstractJAXKernel, AttentionState
        >>> class Softmax(AbstractJAXKernel):
        ...     name = "softmax"
        ...     def forward(self, call):
        ...         query, key, value = call.operands.qkv
        ...         key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], 2) for x in (key, value))
        ...         scores = call.settings.scale * jnp.einsum("btnh,bsnh->btns", query, key)
        ...         out = jnp.einsum("btns,bsnh->btnh", jax.nn.softmax(scores), value)
        ...         return AttentionState(out, jax.nn.logsumexp(scores, -1))
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> out = ea.attention(q, k, v, implementation=Softmax())
        >>> bool(jnp.allclose(out, ea.attention(q, k, v), atol=1e-6))
        True
    """

    platforms = ()
    interpreted = ()
    exported = True
    masks = (All,)

    def check(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` for arrays of biases, masks, positions or segments."""
        decline_arrays(call.operands, list(call.operands.named())[3:])

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        """JAX's derivative of `forward`. Rows without keys pass nothing on."""
        state_again, pull = jax.vjp(
            functools.partial(self._of_moved, call), differentiated(call.operands)
        )
        if cotangent.lse is None:
            cotangent = cotangent._replace(lse=jnp.zeros_like(state_again.lse))
        return pull(of_rows_with_keys(state, cotangent))[0]

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        """JAX's derivative of `forward`, which is often NaN in rows without keys: there it is zero."""
        primals = map_some(lambda _, x: x, directions, call.operands)
        run = functools.partial(self._of_moved, call)
        return of_rows_with_keys(state, jax.jvp(run, (primals,), (directions,))[1])

    def _of_moved(self, call: KernelCall, moved: Operands) -> AttentionState:
        return self.forward(call._replace(operands=with_moved(call.operands, moved)))


def of_rows_with_keys(state: AttentionState, change: AttentionState) -> AttentionState:
    rows = holds_keys(state.lse)
    return AttentionState(jnp.where(rows[..., None], change.out, 0), jnp.where(rows, change.lse, 0))


_QKV = "query", "key", "value"
Candidate = str | AbstractKernel  # what may compute a call: a name of the registry, or a kernel


def check_call_of(kernel: AbstractKernel, call: KernelCall) -> None:
    """Raises `NotImplementedError` for calls that a kernel does not take.

    Declines unknown masks and 64-bit ids for all kernels, so that no mask is ignored and no id truncated.
    """
    operands, settings = call.operands, call.settings
    unknown = [x.__name__ for x in settings.mask.classes if not issubclass(x, kernel.masks)]
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
        ids = getattr(operands.tokens, name)
        if ids is not None and ids.dtype != jnp.int32:
            raise NotImplementedError(
                f"{name.removesuffix('s')}_ids: wanted int32, got {ids.dtype} (blockwise takes it)"
            )
    if operands.scales.key is not None or operands.tokens.has_lengths:
        read = jax.eval_shape(
            lambda x: as_read(kernel, call._replace(operands=x)).operands, operands
        )
        # without the mesh axes of a jax.shard_map, which `eval_shape` does not accept as inputs
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), read)
        call = call._replace(operands=shapes)
    kernel.check(call)


def as_read(kernel: AbstractKernel, call: KernelCall) -> KernelCall:
    """Converts a call for a kernel: lengths to positions, and eight bits to the query's dtype, unless it reads them."""
    operands = call.operands
    if Lengths not in kernel.masks:
        operands = operands.positioned(read=False)
    if operands.scales.key is not None and not kernel.reads_eight_bits(call):
        operands = dequantized(operands)
    return call._replace(operands=operands)


def check_operands(operands: Operands, dtypes: Sequence[str], without: Sequence[str]) -> None:
    """Declines, for `AbstractKernel.check`, other dtypes, empty axes, and arrays in the fields `without`."""
    decline_arrays(operands, without)
    check_dtypes(operands, dtypes)
    for name, x in zip(_QKV, operands.qkv, strict=True):
        if 0 in x.shape:
            raise NotImplementedError(f"{name}: wanted no empty axis, got shape {x.shape}")


def check_dtypes(operands: Operands, dtypes: Sequence[str]) -> None:
    for name, x in zip(_QKV, operands.qkv, strict=True):
        if x.dtype.name not in dtypes:
            raise NotImplementedError(f"{name}: wanted {' or '.join(dtypes)}, got {x.dtype}")


def decline_arrays(operands: Operands, names: Sequence[str]) -> None:
    named = operands.named()
    for name in names:
        if jax.tree.leaves(named[name]):
            raise NotImplementedError(f"{name}: wanted None, got an array (blockwise takes it)")


Capability = tuple[int, int]  # as NVIDIA counts them: (9, 0) for H100 and H200


class AssumedGPU(NamedTuple):
    """A GPU known by its compute capability alone."""

    compute_capability: str
    device_kind: str | None = None


Device = jax.Device | AssumedGPU

_DEVICE: ContextVar[Device | None] = ContextVar("device", default=None)


def target_device() -> Device | None:
    """Returns one of the devices that the program being lowered is for, all of a kind; None: not known.

    The device need not be attached: a program may be compiled ahead of time. It is not known while a program is traced,
    nor in one that is exported or lowered for several platforms; a call is therefore checked twice.
    """
    return _DEVICE.get()


@contextlib.contextmanager
def lowered_for(device: Device | None) -> Iterator[None]:
    token = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(token)


def capability_of(device: object) -> Capability | None:
    said = getattr(device, "compute_capability", None)
    if not isinstance(said, str):
        return None
    major, _, minor = said.partition(".")
    return int(major), int(minor or 0)


def target_capability() -> Capability | None:
    return capability_of(target_device())


def check_capability(name: str, least: Capability, below: Capability | None = None) -> None:
    capability = target_capability()
    if capability is None or (capability >= least and (below is None or capability < below)):
        return
    text = ["on" if x is None else ".".join(map(str, x)) for x in (least, below, capability)]
    end = text[1] if below is None else f"to below {text[1]}"
    raise NotImplementedError(
        f"{name}: wanted a GPU of compute capability from {text[0]} {end}, got {text[2]}"
    )


@functools.cache
def cuda_version(library: str) -> int | None:
    """The version of the installed "cudnn" or "cuda_runtime", as 12080 for CUDA 12.8; None if there is none."""
    try:
        return getattr(private_names("cuda_versions").versions, f"{library}_get_version")()
    except Exception:  # of various kinds, without CUDA or cuDNN
        return None
