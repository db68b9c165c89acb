"""A choice of kernel that is made when a program is lowered: by its platform and its partitioning.

A traced program may be lowered for any platform, so that tracing cannot choose; and whether XLA
will split the program over devices, as it can no hand-written kernel, is known only then. So one
primitive stands for the attention until it is lowered, and only the kernel chosen is traced.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ._arguments import Settings
from ._kernel import AbstractKernel

Task = Callable[..., Any]  # (kernel, settings, platform, *args) to arrays

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def run_chosen(
    task: Task,
    like: Callable[..., Any],
    kernels: Sequence[AbstractKernel],
    settings: Settings,
    *args: Any,
) -> Any:
    """`task(kernel, settings, platform, *args)`, of the kernel that `fitting` finds when lowered.

    `like(settings, *args)` makes arrays of the types that the results have. Raises as `fitting`
    does, when the program is lowered.
    """
    if not kernels[0].platforms:
        return task(kernels[0], settings, None, *args)
    flat, tree = jax.tree.flatten(args)
    found = _bind(
        *flat,
        task=task,
        like=like,
        kernels=tuple(kernels),
        settings=settings,
        levels=(),
        tree=tree,
    )
    results = jax.eval_shape(functools.partial(like, settings), *args)
    return jax.tree.unflatten(jax.tree.structure(results), found)


def fitting(
    kernels: Sequence[AbstractKernel], platform: str, *, partitioned: bool
) -> AbstractKernel:
    """The first kernel for a program that is lowered for `platform`.

    `partitioned`: whether XLA splits the program over devices, which only kernels of its own
    operations bear. If nothing else fits, the first kernel that can be interpreted does.

    Raises `NotImplementedError` if none is left.
    """
    for kernel in kernels:
        if not kernel.platforms or (platform in kernel.platforms and not partitioned):
            return kernel
    for kernel in kernels:
        if kernel.interpreted and platform not in kernel.platforms:
            return kernel
    names = ", ".join(kernel.name for kernel in kernels)
    if any(platform in kernel.platforms for kernel in kernels):
        raise NotImplementedError(
            f"implementation: XLA cannot split {names} over devices; wanted a call in a "
            f"jax.shard_map over all axes of the mesh, or beside {names} one of XLA's operations"
        )
    made_for = ", ".join(sorted({p for kernel in kernels for p in kernel.platforms}))
    raise NotImplementedError(
        f"implementation: {names} is made for {made_for}, got a program for {platform}"
    )


Levels = tuple[tuple[int | None, ...], ...]  # of nested vmaps, innermost first: the axes mapped


def _run(
    *flat: Any,
    task: Task,
    kernel: AbstractKernel,
    settings: Settings,
    platform: str,
    levels: Levels,
    tree: Any,
) -> list[Any]:
    def run(*flat: Any) -> list[Any]:
        return jax.tree.leaves(task(kernel, settings, platform, *jax.tree.unflatten(tree, flat)))

    if kernel.platforms:
        return _folded(run, levels, flat) if levels else run(*flat)
    for axes in levels:
        run = jax.vmap(run, in_axes=axes)
    return run(*flat)


def _folded(run: Callable[..., list[Any]], levels: Levels, flat: Any) -> list[Any]:
    """Vmapped calls as one of a larger batch: all arrays have their batch axis in front."""

    def forward(x: Any, axes: tuple[int | None, ...]) -> Any:
        for place, axis in enumerate(reversed(axes)):
            x = jnp.expand_dims(x, place) if axis is None else jnp.moveaxis(x, place + axis, place)
        return x

    moved = [forward(x, axes) for x, axes in zip(flat, zip(*levels, strict=True), strict=True)]
    depth = len(levels) + 1
    lead = tuple(max(sizes) for sizes in zip(*(x.shape[:depth] for x in moved), strict=True))

    def fold(x: Any) -> Any:
        # broadcast over the batch, and so over the larger one; of a batch of 1, nobody can tell
        if lead[-1] > 1 and math.prod(x.shape[:depth]) == 1:
            return x.reshape(1, *x.shape[depth:])
        x = jnp.broadcast_to(x, (*lead, *x.shape[depth:]))
        return x.reshape(-1, *x.shape[depth:])

    return [x.reshape(*lead, *x.shape[1:]) for x in run(*map(fold, moved))]


choice_p = Primitive("attention_kernel")
choice_p.multiple_results = True
_bind = jax.jit(
    choice_p.bind, static_argnames=("task", "like", "kernels", "settings", "levels", "tree")
)
choice_p.def_impl(_bind)


@choice_p.def_abstract_eval
def _types(
    *flat: Any, like: Any, settings: Settings, levels: Any, tree: Any, **params: Any
) -> list[Any]:
    def leaves(*flat: Any) -> list[Any]:
        return jax.tree.leaves(like(settings, *jax.tree.unflatten(tree, flat)))

    for axes in levels:
        leaves = jax.vmap(leaves, in_axes=axes)
    return jax.make_jaxpr(leaves)(*flat).out_avals


def _batch(flat: Any, axes: Any, *, levels: Any, **params: Any) -> tuple[list[Any], list[int]]:
    found = choice_p.bind(*flat, levels=(*levels, tuple(axes)), **params)
    return found, [0] * len(found)


batching.primitive_batchers[choice_p] = _batch


def _lower(ctx: Any, *flat: Any, on: str, kernels: Any, like: Any, **params: Any) -> Any:
    del like
    partitioned = not _whole(ctx.module_context.axis_context)
    kernel = fitting(kernels, on, partitioned=partitioned)
    run = functools.partial(_run, kernel=kernel, platform=on, **params)
    if kernel.platforms:
        # Inside jax.shard_map types say along which axes of the mesh an array may differ. No kernel
        # crosses devices, and Pallas (its interpreter above all) mixes such arrays with constants.
        plain = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
        ctx = ctx.replace(avals_in=plain)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *flat)


for _platform in PLATFORMS:
    mlir.register_lowering(choice_p, functools.partial(_lower, on=_platform), platform=_platform)


def platform_here() -> str:
    """The platform that programs are lowered for unless said otherwise. Raises nothing."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version else "cuda"


def _whole(context: Any) -> bool:
    """Whether a program is for one device, or for one of a jax.shard_map over all mesh axes."""
    if isinstance(context, mlir.SPMDAxisContext):
        mesh = context.mesh
        return context.manual_axes | set(mesh.manual_axes) == set(mesh.axis_names)
    return getattr(context, "num_devices", 1) == 1
