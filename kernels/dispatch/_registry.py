"""The implementations by name, which of them takes a call, and calls on one device."""

import functools
from collections.abc import Sequence
from inspect import get_annotations
from typing import Any, NamedTuple, Unpack

import jax
from jaxtyping import Array, Bool, Float

from .._checks import check_flag, check_taylor, received
from .._varying import vary_together
from ..autodiff._function import function_call
from ..call._arguments import check_call
from ..call._batch import restored
from ..call._kernel import AbstractKernel, Candidate, Device, as_read, check_call_of
from ..call._operands import KernelCall, Operands, Settings, dequantized, is_static
from ..call._options import KernelOptions, check_options
from ..call._state import AttentionState
from ..masks._abstract import AbstractMask
from ..pallas.canonical._kernel import CanonicalGPU, CanonicalTPU
from ..pallas.gpu._kernel import PallasGPU
from ..pallas.mosaic._kernel import MosaicGPU
from ..pallas.tpu._kernel import PallasTPU
from ..vendor._gpu import FA4, CuDNN, FlashAttn
from ..vendor._splash import Splash
from ..xla._blocks import score_maximum
from ..xla._blockwise import Blockwise
from ..xla._canonical import Canonical
from ..xla._decode import Decode, DecodeCPU
from ..xla._reference import Reference
from ._derivative import (
    Attention,
    AttentionAndMaximum,
    EightBits,
    second_order_kernel,
    with_checkpoint_names,
)
from ._lowering import Program, first_fitting, why_unfit

# In order of preference: few operations for few scores; vendors' kernels, which are tuned for many rows and take few
# calls; our own, which take most; and those made of XLA's operations, which run everywhere.
_REGISTRY: dict[str, AbstractKernel] = {
    kernel.name: kernel
    for kernel in (
        Reference(),
        CuDNN(),
        MosaicGPU(),
        PallasGPU(),
        FlashAttn(),
        FA4(),
        Splash(),
        PallasTPU(),
        DecodeCPU(),
        Decode(),
        Blockwise(),
    )
}
# Kernels that have passed no test on hardware yet; they are tried only if they are named.
_BY_NAME: frozenset[str] = frozenset({"fa4"})


def implementations() -> tuple[str, ...]:
    """The names that `implementation=` accepts, in the order in which they are tried.

    | name | for | made of | takes |
    |---|---|---|---|
    | `reference` | all | XLA's operations | any call, by the score matrix; tried for up to 64 queries and keys |
    | `cudnn` | NVIDIA | cuDNN | 16 bits, widths to 128 (9.0: 256), from 64 rows; plain, no window to the right |
    | `mosaic_gpu` | NVIDIA 9.0 | Pallas on Mosaic GPU | 16 bits, any positions and segments; many rows |
    | `pallas_gpu` | NVIDIA | Pallas on Triton | 16 and 32 bits, any positions and segments; splits keys of few rows |
    | `flash` | NVIDIA | flash-attn-jax (JAX 0.8) | 16 bits, widths to 192; plain |
    | `fa4` | NVIDIA | fa4-jax (Python 3.12) | 16 bits, widths to 256 (10.0: 128); plain; only by name |
    | `splash` | TPU | JAX's splash attention | bfloat16, whole blocks of 128, scales that are powers of two; plain |
    | `pallas_tpu` | TPU | Pallas on Mosaic | bfloat16, float32, any positions and segments; few rows read in place |
    | `decode_cpu` | CPU | XLA's operations | 16 and 32 bits, to 1024 queries times heads; reads blocks that are seen |
    | `decode` | all | XLA's operations | any call with at most 64 queries times heads |
    | `blockwise` | all | XLA's operations | any call, memory O(T·block) |

    "Plain": full, causal or windowed attention, with positions that count from 0, and without arrays of masks, biases
    or positions; `cudnn` and `splash` take lengths, and `splash` takes segments. Those for one platform know the masks
    [`Causal`][energy_attn.kernels.masks.Causal] and [`Window`][energy_attn.kernels.masks.Window], and `Segments` and
    `Lengths` joined to them by `&`; those for all platforms know every mask, and those made of Pallas all that compare
    numbers of a query with numbers of a key.

    `"xla"`, as in `jax.nn`, stands for those made of XLA's operations. Kernels for another platform
    than the one a program is lowered for are skipped, and so are those "only by name", which no hardware
    has run yet, unless they are named.

    Source: the online softmax of Milakov and Gimelshein (arXiv 1805.02867) and FlashAttention-2
    (arXiv 2307.08691) for all but the reference.

    Examples:
        >>> from energy_attn.kernels import implementations
        >>> "blockwise" in implementations()
        True
    """
    return tuple(_REGISTRY)


def tried() -> tuple[str, ...]:
    """The names that are tried by default, in order."""
    return tuple(name for name in _REGISTRY if name not in _BY_NAME)


@functools.lru_cache(maxsize=256)
def differentiated_by_jax(names: Sequence[Candidate]) -> bool:
    return all(_kernel_of(name).differentiated_by_jax for name in names)


def is_reproducible(names: Sequence[Candidate]) -> bool:
    return _kernel_of(names[-1]).reproducible


def _kernel_of(name: Candidate) -> AbstractKernel:
    return _REGISTRY[name] if isinstance(name, str) else name


class Explanation(NamedTuple):
    """The implementation that takes a call, why those before it decline, and the one of second derivatives."""

    name: str
    declined: tuple[tuple[str, str], ...]
    second_order: str


def reproducible_kernels(run: int | None = None) -> tuple[AbstractKernel, ...]:
    """The canonical kernels of all platforms, for keys in runs of `run` positions; the last runs on CPUs."""
    return CanonicalTPU(run), CanonicalGPU(run), Canonical(run)


def candidates(
    implementation: Candidate | Sequence[Candidate] | None, reproducible: bool = False
) -> tuple[Candidate, ...]:
    """The implementations to try for the user's `implementation=` and `reproducible=`, checked."""
    if check_flag("reproducible", reproducible):
        if implementation is not None:
            raise ValueError(
                f"implementation: wanted None with reproducible=True, got {received(implementation)}"
            )
        return reproducible_kernels()
    if implementation is None:
        return tried()
    is_single = isinstance(implementation, (str, AbstractKernel))
    choices = (implementation,) if is_single else implementation
    if not (
        isinstance(choices, Sequence)
        and choices
        and all(isinstance(x, (str, AbstractKernel)) for x in choices)
    ):
        raise TypeError(
            f"implementation: wanted a name, a kernel, several of these or None, "
            f"got {received(implementation)}"
        )
    return tuple(x for each in choices for x in _named(each))


def _named(candidate: Candidate) -> Sequence[Candidate]:
    if candidate == "xla":
        return [name for name, kernel in _REGISTRY.items() if not kernel.platforms]
    if isinstance(candidate, AbstractKernel):
        _check_kernel(candidate)
    elif candidate not in _REGISTRY:
        known = ", ".join(map(repr, _REGISTRY))
        raise ValueError(f"implementation: wanted one of {known} or 'xla', got {candidate!r}")
    return [candidate]


def _check_kernel(kernel: AbstractKernel) -> None:
    missing = [x for x in get_annotations(AbstractKernel) if x not in dir(kernel)]
    if missing:
        raise TypeError(
            f"implementation: wanted a kernel that says its {', '.join(missing)}, "
            f"got {received(kernel)}"
        )
    try:
        hash(kernel)
    except TypeError:
        raise TypeError(
            f"implementation: wanted a kernel that can be hashed, as a frozen dataclass, "
            f"got {received(kernel)}"
        ) from None


# Compiled here, so that calls outside of jit are traced and compiled once for their shapes.
@functools.partial(jax.jit, static_argnums=(0, 1))
def attend(names: tuple[Candidate, ...], settings: Settings, operands: Operands) -> AttentionState:
    """Runs the first of the implementations `names`, or kernels, that takes the call.

    Among kernels for single platforms, the choice is made when the program is lowered. Raises the reason of the only
    one that declines, or an `ExceptionGroup` of all reasons.
    """
    operands = vary_together(operands)
    kernels, _ = accepting(names, settings, operands)
    if operands.scales.key is not None:
        operands = operands.positioned(read=False)
        return function_call(EightBits(attend, names, kernels, settings), operands)
    if kernels[0].differentiated_by_jax:
        state = kernels[0].forward(as_read(kernels[0], KernelCall(operands, settings)))
        # `jax.experimental.jet`, for kernels that are named, knows no checkpoint names
        return state if differentiated_by_jax(names) else with_checkpoint_names(state)
    return function_call(Attention(kernels, settings), operands)


@functools.partial(jax.jit, static_argnums=(0, 1))
def attend_and_maximum(
    names: tuple[Candidate, ...], settings: Settings, operands: Operands
) -> tuple[AttentionState, Array]:
    """The state of `attend`, and the largest score of each row; minus infinity for a fully masked row."""
    operands = vary_together(operands)
    kernels, _ = accepting(names, settings, operands)
    if operands.scales.key is not None or kernels[0].differentiated_by_jax:
        largest = score_maximum(settings, dequantized(operands.positioned(read=False)))
        return attend(names, settings, operands), largest
    state, _, maximum = function_call(AttentionAndMaximum(kernels, settings), operands)
    return state, maximum


def local_attention(
    query: Float[Array, "*#B T N H"],
    key: Float[Array, "*#B S K H"],
    value: Float[Array, "*#B S K Hv"],
    *,
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    **options: Unpack[KernelOptions],
) -> AttentionState:
    r"""The state `(out, lse)` of an attention over the keys given: one kernel pass.

    $$F(\zeta) = \log \sum_a \exp(\mathrm{scale}\; q\cdot k_a + b_a + \zeta\cdot v_a), \qquad
      \mathrm{lse} = F(\zeta), \quad \mathrm{out} = \nabla F(\zeta) = \sum_a P_a v_a$$

    with the sum over the keys that the query sees. Both outputs are differentiable in query, key,
    value, source and bias. [`merge`][energy_attn.kernels.merge] joins states of disjoint keys.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`; float16, bfloat16, float32 or float64.
        key: `[B, S, K, H]` or `[S, K, H]`, of query's dtype. `K` divides `N`: query head `n` reads
            key head `n // (N / K)`, and no key is repeated in memory. `S` may be 0.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`; `Hv` may differ from `H`.
        source: the source $\zeta$, `[B, T, N, Hv]`; None means zero and costs nothing.
        bias: added to the scaled scores; four axes (leading ones may be left out), each of size 1
            or that of `[B, N, T, S]`.
        mask: a mask of [`masks`][energy_attn.kernels.masks.AbstractMask], as `Causal() | Prefix(n)`; or
            boolean, shaped like `bias`, True where a key takes part.
        **options: the keys of `KernelOptions`, which says what each does.

    Returns:
        `out` `[B, T, N, Hv]` in value's dtype, and `lse` `[B, T, N]` in float32 (float64 for
        float64), in nats. Fully masked rows have `out = 0`, `lse = -inf` and zero gradients.

    Raises:
        TypeError: an argument is not an array or has another dtype, or an unknown option.
        ValueError: shapes do not fit, values are out of range, or a name is unknown.
        NotImplementedError: the implementation named declines the call (if several are named, an
            `ExceptionGroup` of their reasons).

    Source: Tree Attention (arXiv 2408.04093), equations 6 and 15; FlashAttention-2
    (arXiv 2307.08691) for the blockwise passes.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.kernels import local_attention, merge
        >>> q, k, v = (jax.random.normal(key, (1, 6, 2, 4)) for key in jax.random.split(jax.random.key(0), 3))
        >>> whole = local_attention(q, k, v)
        >>> halves = merge(local_attention(q, k[:, :3], v[:, :3]), local_attention(q, k[:, 3:], v[:, 3:]))
        >>> bool(jnp.allclose(whole.out, halves.out, atol=1e-6))
        True
    """
    names = candidates(options.get("implementation"), options.get("reproducible", False))
    check_options(options, KernelOptions, "source", "bias", "mask")
    call = check_call(query, key, value, source, bias, mask, **options)
    if not differentiated_by_jax(names):
        check_taylor(call.operands)
    state = attend(names, call.settings, call.operands)
    return AttentionState(*(restored(x, call.axes) for x in state))


def explain(
    names: Sequence[str],
    settings: Settings,
    operands: Operands,
    platform: str,
    device: Device | None = None,
) -> Explanation:
    """Explains the choice among `names` for a call on a platform; raises as `attend`.

    `operands` may be `jax.ShapeDtypeStruct`s. Without a device, GPUs are of the class of H100.
    """
    kernels, declined = accepting(names, settings, operands)
    program = Program(platform, device=device, call=KernelCall(operands, settings))
    chosen = first_fitting(kernels, program)
    declined |= {
        kernel.name: reason for kernel in kernels if (reason := why_unfit(kernel, program))
    }
    before = names[: list(names).index(chosen.name)]
    made = [name for name in before if platform in (_REGISTRY[name].platforms or (platform,))]
    reasons = tuple((name, declined[name]) for name in made)
    return Explanation(chosen.name, reasons, second_order_kernel(kernels).name)


def accepting(
    names: Sequence[Candidate], settings: Settings, operands: Operands
) -> tuple[tuple[AbstractKernel, ...], dict[str, str]]:
    """The kernels that take a call, up to the first that runs everywhere, and why others decline."""
    call = KernelCall(operands, settings)
    kernels: list[AbstractKernel] = []
    slower: list[AbstractKernel] = []
    reasons: list[tuple[str, NotImplementedError]] = []
    for name in names:
        kernel, takes = _kernel_of(name), False
        try:
            if kernel.platforms:
                _check_for_kernels(operands)
            check_call_of(kernel, call)
            takes = True
            kernel.check_preferred(call)
        except NotImplementedError as reason:
            reasons.append((kernel.name, reason))
            slower += [kernel] * takes
            continue
        kernels.append(kernel)
        if not kernel.platforms:
            break
    # otherwise the last kernel runs everywhere, and slower ones are not needed
    if all(kernel.platforms for kernel in kernels):
        kernels += slower
    if kernels:
        return tuple(kernels), {name: str(reason) for name, reason in reasons}
    # the last canonical kernel takes every call that the others take
    if len(reasons) == 1 or is_reproducible(names):
        raise reasons[-1][1]
    raise ExceptionGroup(
        f"no implementation of {', '.join(x for x, _ in reasons)} takes this call",
        [x for _, x in reasons],
    )


def _check_for_kernels(operands: Operands) -> None:
    """Raises `NotImplementedError` for arrays that only XLA's operations take: of symbolic sizes, or split by type."""
    for name, x in operands.named().items():
        for array in jax.tree.leaves(x):
            if not is_static(*array.shape):
                raise NotImplementedError(
                    f"{name}: wanted sizes that are known, got shape {array.shape}"
                )
            is_type = isinstance(array, jax.ShapeDtypeStruct)
            split: Any = () if is_type else tuple(jax.typeof(array).sharding.spec)
            if any(part is not None for part in split):
                raise NotImplementedError(
                    f"{name}: wanted an array that its type does not split over a mesh (as inside "
                    f"jax.shard_map), got one split by {split}"
                )
