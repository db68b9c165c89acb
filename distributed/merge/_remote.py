"""The merge strategy of one TPU kernel: a butterfly whose exchanges are copies from chip to chip.

Chips reach each other's memory within a slice only. The devices that a program is for are known
when it is lowered; the choice is made there, and falls on XLA's collectives if in doubt.

No TPU has run the kernel: on simulated chips its values are right and no race is found, and it
compiles for real ones. A collective that hangs is worse than a slow one, so `"auto"` never chooses
this strategy.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import Mesh
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import is_exported, private_names, vary_together

from ..network._shape import Shape
from ..network._topology import Topology, all_axes
from ..network._transfer import Transfer
from ._abstract import AbstractMerge, Axes
from ._butterfly import exchanged, exchanges
from ._packing import as_invariant, narrowed, widened
from ._remote_kernel import fits, fold_in_kernel
from ._scatter import EXCHANGE

# As `jax.Device.device_kind` has them: those that it compiles for. On TPU v5e, chips reach others
# only at distances that are powers of two, and a mesh need not be in the order of the chips.
_CHIPS = ("TPU v4", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")


class Remote(AbstractMerge):
    """The butterfly by one kernel, where the chips of one TPU slice can do it; elsewhere by XLA."""

    name = "remote"
    least_axes = 1
    automatic = False  # no TPU has run it
    scatter = EXCHANGE

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        return as_invariant(narrowed(_folded(widened(state), axes), state), axes)

    def transfers(self, shape: Shape, topology: Topology) -> Iterator[Transfer]:
        # of the kernel, too, whose copies are no collectives of the program
        yield from exchanges(shape.rows * shape.state, topology, all_axes(topology))


def _folded(state: AttentionState, axes: Axes) -> AttentionState:
    """By one kernel where a program is lowered for TPUs on which `reaches` and `fits` hold."""
    try:
        _depend_on_devices()
    except NotImplementedError:
        return exchanged(state, axes)
    names = jax.sharding.get_abstract_mesh().axis_names
    return AttentionState(*butterfly_p.bind(*vary_together(state, axes), axes=axes, names=names))


def reaches(mesh: object, manual: frozenset[str]) -> bool:
    """Whether each device of a mesh can write into the memory of all others, in a kernel.

    They are chips of one slice, of a kind that can; and the program is for one of them, as inside
    a `jax.shard_map` over all axes: XLA cannot split a kernel.
    """
    if not isinstance(mesh, Mesh) or manual != set(mesh.axis_names):
        return False
    devices = mesh.devices.ravel()
    # devices of a single slice may lack the attribute
    slices = {getattr(device, "slice_index", None) for device in devices}
    kinds = {device.device_kind for device in devices}
    return len(slices) == 1 and kinds <= set(_CHIPS)


butterfly_p = Primitive("butterfly")
butterfly_p.multiple_results = True


@butterfly_p.def_abstract_eval
def _types(out: ShapedArray, lse: ShapedArray, **params: Axes) -> list[ShapedArray]:
    return [out, lse]


def _batch(
    operands: Sequence[Array], dims: Sequence[int | None], **params: Axes
) -> tuple[list[Array], list[int]]:
    (size,) = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}

    def front(x: Array, dim: int | None) -> Array:
        return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)

    return butterfly_p.bind(*map(front, operands, dims), **params), [0, 0]


batching.primitive_batchers[butterfly_p] = _batch


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: mlir.ir.Value, axes: Axes, names: Axes
) -> Sequence[mlir.ir.Value]:
    def plain(out: Array, lse: Array) -> AttentionState:
        return exchanged(AttentionState(out, lse), axes)

    return mlir.lower_fun(plain, multiple_results=True)(ctx, *operands)


def _lower_tpu(
    ctx: Any, *operands: mlir.ir.Value, axes: Axes, names: Axes
) -> Sequence[mlir.ir.Value]:
    # An exported program may meet other devices than it was lowered for.
    module = ctx.module_context
    mesh = getattr(module.axis_context, "mesh", None)
    manual = frozenset(getattr(module.axis_context, "manual_axes", ()))
    if (
        is_exported(module)
        or not reaches(mesh, manual)
        or not fits(AttentionState(*ctx.avals_in), axes)
    ):
        return _lower(ctx, *operands, axes=axes, names=names)

    def kernel(out: Array, lse: Array) -> AttentionState:
        return fold_in_kernel(AttentionState(out, lse), axes, names)

    return mlir.lower_fun(kernel, multiple_results=True)(ctx, *operands)


mlir.register_lowering(butterfly_p, _lower)
mlir.register_lowering(butterfly_p, _lower_tpu, platform="tpu")


@functools.cache
def _depend_on_devices() -> None:
    # JAX lowers a program once for all devices that it may run on, unless it is told that they
    # matter; there is no public way to say so.
    private_names("lowering").need_devices.add(butterfly_p)
