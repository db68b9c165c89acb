"""Chooses a kernel when a program is lowered, by platform and partitioning.

A traced program may be lowered for any platform, and only lowering shows whether XLA partitions it
over devices, which it cannot do to a hand-written kernel. So a primitive stands for the attention
until then, and only the chosen kernel is traced.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, PyTree

from ..autodiff._function import run_compiled
from ..call._kernel import AbstractKernel, Device, as_read, check_call_of, lowered_for
from ..call._operands import KernelCall, Operands, Settings, is_static
from ._probe import obstacle

KernelMethod = Callable[..., Any]  # (kernel, call, *args) to arrays

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def run_when_lowered(
    method: KernelMethod,
    like: Callable[..., Any],
    kernels: Sequence[AbstractKernel],
    settings: Settings,
    operands: Operands,
    *others: PyTree,
) -> Any:
    """`method(kernel, call, *others)`, with the kernel chosen when the program is lowered.

    `like(settings, operands, *others)` returns arrays of the results' types. Lowering raises as `first_fitting`.
    """
    if not kernels[0].platforms:
        return method(kernels[0], as_read(kernels[0], KernelCall(operands, settings)), *others)
    args = operands, *others
    flat, tree = jax.tree.flatten(args)
    call: Any = {"method": method, "like": like, "kernels": tuple(kernels), "settings": settings}
    result = _bind(*flat, **call, levels=(), tree=tree)
    results = jax.eval_shape(functools.partial(like, settings), *args)
    return jax.tree.unflatten(jax.tree.structure(results), result)


class Program(NamedTuple):
    """The properties of a program that decide which kernels it may contain.

    `partitioned`: by XLA, over devices. `exported`: serialised, to be run by other versions of JAX. `symbolic`: of
    arrays with symbolic sizes. `device`: one that will run it, if known. `call`: the shapes of its call.
    """

    platform: str
    partitioned: bool = False
    exported: bool = False
    symbolic: bool = False
    device: Device | None = None
    call: KernelCall | None = None


def first_fitting(kernels: Sequence[AbstractKernel], program: Program) -> AbstractKernel:
    """The first kernel for a program: of its platform, or made of XLA's operations.

    Otherwise the first that fits but for serialisation, which JAX then refuses or allows; otherwise
    the first that can be interpreted. Raises `NotImplementedError` if there is none.
    """
    reasons = {}
    for kernel in kernels:
        reason = why_unfit(kernel, program)
        if reason is None:
            return kernel
        reasons[kernel.name] = reason
    for kernel in kernels:
        if why_unfit(kernel, program._replace(exported=False)) is None:
            return kernel
    for kernel in kernels:
        if program.platform in kernel.interpreted and not program.symbolic:
            return kernel
    raise NotImplementedError(
        "implementation: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    )


def why_unfit(kernel: AbstractKernel, program: Program) -> str | None:
    if not kernel.platforms:
        return None
    if program.platform not in kernel.platforms:
        made_for = ", ".join(kernel.platforms)
        return f"it is made for {made_for}, got a program for {program.platform}"
    if program.partitioned:
        return (
            "XLA cannot split it over devices; wanted a call in a jax.shard_map over all axes of "
            "the mesh, or a further implementation of XLA's operations"
        )
    if program.symbolic:
        return "wanted sizes that are known, got symbolic ones"
    if program.exported and not kernel.exported:
        return "JAX does not serialise programs with it (jax.export)"
    if program.device is not None and program.call is not None:
        try:  # again: the check at trace time did not know the device
            with lowered_for(program.device):
                check_call_of(kernel, program.call)
        except NotImplementedError as reason:
            return str(reason)
    return obstacle(kernel, program.platform)


Levels = tuple[tuple[int | None, ...], ...]  # the mapped axes of nested vmaps, innermost first


def _run(
    *flat: Array,
    method: KernelMethod,
    kernel: AbstractKernel,
    settings: Settings,
    platform: str,
    levels: Levels,
    tree: Any,
) -> list[Any]:
    def run(*flat: Array) -> list[Any]:
        operands, *others = jax.tree.unflatten(tree, flat)
        call = as_read(kernel, KernelCall(operands, settings, platform))
        return jax.tree.leaves(method(kernel, call, *others))

    # JAX maps XLA's operations; a hand-written kernel gets a larger batch, or one call after the other
    if kernel.platforms and levels and _is_one_batch(settings, tree.unflatten(flat), flat):
        return _as_one_batch(run, levels, flat)
    for axes in levels:
        run = _one_by_one(run, axes) if kernel.platforms else jax.vmap(run, in_axes=axes)
    return run(*flat)


def _is_one_batch(settings: Settings, args: Sequence[Any], flat: Sequence[Array]) -> bool:
    # Whether vmapped calls with these arguments are one call with a larger batch, which is not empty. A score counts
    # the entries of its own call, and its arrays and the numbers of its heads have no batch axis. Each call has its own
    # cotangent of a bias with batch axis 1.
    is_forward = len(args) == 1
    plain = settings.score is None and (is_forward or args[0].bias is None)
    return plain and all(x.size for x in flat)


def _one_by_one(
    run: Callable[..., list[Any]], axes: tuple[int | None, ...]
) -> Callable[..., list[Any]]:
    # `jax.vmap(run, in_axes=axes)` as a loop, for kernels that JAX does not batch.
    def mapped(*flat: Array) -> list[Any]:
        pairs = zip(flat, axes, strict=True)
        in_front = [None if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in pairs]

        def one(some: list[Any]) -> list[Any]:
            return run(*(x if y is None else y for x, y in zip(flat, some, strict=True)))

        return jax.lax.map(one, in_front)

    return mapped


def _as_one_batch(
    run: Callable[..., list[Any]], levels: Levels, flat: Sequence[Array]
) -> list[Any]:
    """Vmapped calls as one call with a larger batch; all arrays have their batch axis in front."""

    def forward(x: Array, axes: tuple[int | None, ...]) -> Array:
        for place, axis in enumerate(reversed(axes)):
            x = jnp.expand_dims(x, place) if axis is None else jnp.moveaxis(x, place + axis, place)
        return x

    in_front = [forward(x, axes) for x, axes in zip(flat, zip(*levels, strict=True), strict=True)]
    depth = len(levels) + 1
    lead = tuple(max(sizes) for sizes in zip(*(x.shape[:depth] for x in in_front), strict=True))

    def flatten_batch(x: Array) -> Array:
        # an array with batch axis 1 broadcasts over the larger batch, too, unless the batch itself is 1
        if lead[-1] > 1 and math.prod(x.shape[:depth]) == 1:
            return x.reshape(1, *x.shape[depth:])
        x = jnp.broadcast_to(x, (*lead, *x.shape[depth:]))
        return x.reshape(-1, *x.shape[depth:])

    return [x.reshape(*lead, *x.shape[1:]) for x in run(*map(flatten_batch, in_front))]


attention_kernel_p = Primitive("attention_kernel")
attention_kernel_p.multiple_results = True
_bind = run_compiled(
    attention_kernel_p, ("method", "like", "kernels", "settings", "levels", "tree")
)


@attention_kernel_p.def_abstract_eval
def _types(
    *flat: jax.core.ShapedArray,
    like: Callable[..., Any],
    settings: Settings,
    levels: Levels,
    tree: Any,
    **params: object,
) -> list[Any]:
    def leaves(*flat: Array) -> list[Any]:
        return jax.tree.leaves(like(settings, *jax.tree.unflatten(tree, flat)))

    for axes in levels:
        leaves = jax.vmap(leaves, in_axes=axes)
    return jax.make_jaxpr(leaves)(*flat).out_avals


def _batch(
    flat: Sequence[Array], axes: Sequence[int | None], *, levels: Levels, **params: object
) -> tuple[list[Any], list[int]]:
    result = attention_kernel_p.bind(*flat, levels=(*levels, tuple(axes)), **params)
    return result, [0] * len(result)


batching.primitive_batchers[attention_kernel_p] = _batch


def _lower(
    ctx: Any,
    *flat: mlir.ir.Value,
    on: str,
    kernels: Sequence[AbstractKernel],
    like: Callable[..., Any],
    **params: Any,
) -> Any:
    del like
    context = ctx.module_context
    program = Program(
        on,
        partitioned=not _is_unpartitioned(context.axis_context),
        exported=is_exported(context),
        symbolic=not all(is_static(*x.shape) for x in ctx.avals_in),
        device=device_of(context, on),
        call=KernelCall(_operands(ctx.avals_in, **params), params["settings"]),
    )
    kernel = first_fitting(kernels, program)
    run = functools.partial(_run, kernel=kernel, platform=on, **params)
    return lower_on(program.device, ctx, flat, run, plain=bool(kernel.platforms))


def lower_on(
    device: Device | None,
    ctx: Any,
    flat: Sequence[mlir.ir.Value],
    run: Callable[..., list[Any]],
    *,
    plain: bool,
) -> Any:
    """Lowers `run(*flat)` for a device.

    `plain`: without the varying mesh axes that types have inside `jax.shard_map`. No kernel communicates, and
    Pallas, its interpreter above all, mixes such arrays with constants.
    """
    if plain:
        types = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
        ctx = ctx.replace(avals_in=types)
    with lowered_for(device):
        return mlir.lower_fun(run, multiple_results=True)(ctx, *flat)


def _operands(
    flat: Sequence[jax.core.ShapedArray], *, tree: Any, levels: Levels, **params: object
) -> Operands:
    """The shapes of one call's operands, without mapped axes; a method's first argument."""

    def unmapped(x: jax.core.ShapedArray, axes: Sequence[int | None]) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        for axis in reversed(axes):  # the outermost first
            if axis is not None:
                del shape[axis]
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    mapped = zip(*levels, strict=True) if levels else ((),) * len(flat)
    return tree.unflatten([unmapped(*x) for x in zip(flat, mapped, strict=True)])[0]


def lower_by_platform(primitive: Primitive, lower: Callable[..., Any]) -> None:
    for platform in PLATFORMS:
        mlir.register_lowering(primitive, functools.partial(lower, on=platform), platform=platform)


lower_by_platform(attention_kernel_p, _lower)


def platform_here() -> str:
    return _platform_of(jax.devices()[0])


def _platform_of(device: Any) -> str:
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version else "cuda"


def device_of(context: mlir.ModuleContext, platform: str) -> Device | None:
    """Returns one of the devices of a program, or None where it is not known.

    A client, which JAX keeps one program for, has devices of one kind.
    """
    client = context.backend
    if client is None or is_exported(context) or tuple(context.platforms) != (platform,):
        return None
    device = client.devices()[0]
    return device if _platform_of(device) == platform else None


def is_exported(context: mlir.ModuleContext) -> bool:
    return context.lowering_parameters.for_export


def _is_unpartitioned(context: object) -> bool:
    """Whether a program runs on one device, or on each of a jax.shard_map over all mesh axes."""
    if isinstance(context, mlir.SPMDAxisContext):
        mesh = context.mesh
        return context.manual_axes | set(mesh.manual_axes) == set(mesh.axis_names)
    return getattr(context, "num_devices", 1) == 1


def unless_exported(function: Callable[..., Array], x: Array, *others: Array) -> Array:
    """`function(x, *others)`, of the type of `x`; in a program of `jax.export`, `x`.

    JAX does not serialise programs with callbacks; by this they are in other programs only.
    """
    return _bind_unless_exported(x, *others, function=function)


unless_exported_p = Primitive("unless_exported")
_bind_unless_exported = run_compiled(unless_exported_p, ("function",))


@unless_exported_p.def_abstract_eval
def _type_of_first(
    x: jax.core.ShapedArray, *others: object, **params: object
) -> jax.core.ShapedArray:
    return x


def _batch_unless_exported(
    args: Sequence[Array], axes: Sequence[int | None], *, function: Callable[..., Array]
) -> tuple[Array, int]:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    first, *others = axes
    x = batching.bdim_at_front(args[0], first, size)
    mapped = jax.vmap(function, in_axes=(0, *others))
    return unless_exported_p.bind(x, *args[1:], function=mapped), 0


batching.primitive_batchers[unless_exported_p] = _batch_unless_exported


def _lower_unless_exported(ctx: Any, *args: Any, function: Callable[..., Array]) -> Any:
    if is_exported(ctx.module_context):
        return [args[0]]
    return mlir.lower_fun(function, multiple_results=False)(ctx, *args)


mlir.register_lowering(unless_exported_p, _lower_unless_exported)
