"""The butterfly of states as one TPU kernel, whose exchanges are copies from chip to chip.

XLA makes of a butterfly one collective for each round, and of the folds between them a fusion each.
Here one kernel does all rounds while the state stays in on-chip memory. What has to be right:

- **Who.** In round r a device exchanges with the one whose index along the axis differs in bit r,
  the last axis first: as `_ways.butterfly` does it. Even the two operands of a fold are ordered by
  index: partners do the same arithmetic on the same numbers, and all results are bitwise equal.
- **When may one write into another's memory?** Once that one runs this call of the kernel. The
  kernel asks for no barrier semaphore of its own, so XLA puts its own in front: no device begins
  before all have come. Without it, a device that is one call ahead would overwrite a state that
  its partner has not read. A semaphore of our own would need a number that no other kernel of the
  program uses, of which there is no register.
- **And within a call?** Each round has a buffer and semaphores of its own, so that a partner may
  run ahead by as many rounds as it likes. The state that is sent is overwritten only after it has
  left, and the kernel ends only when nothing is under way, to it or from it.
- **Batches.** A grid over a batch would be calls without a barrier between them. So `vmap` makes of
  a batch more rows of one call.
- **Where?** Chips reach each other's memory within a slice only. Which devices a program is for is
  known when it is lowered; the choice is made there, and is for XLA's collectives if in doubt.

No TPU has run it so far: on simulated chips its values are right and no race is found, and it
compiles for real ones. A collective that hangs is worse than a slow one, so it has to be `wanted`.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    holds_keys,
    is_exported,
    private_names,
    result_like,
    safe_shift,
    vary_together,
)

Axes = tuple[str, ...]
Fold = Callable[[AttentionState, Axes], AttentionState]

SWITCH = "ENERGY_ATTN_REMOTE_DMA"
# As `jax.Device.device_kind` has them: those that it compiles for. On TPU v5e, chips reach others
# only at distances that are powers of two, and a mesh need not be in the order of the chips.
_CHIPS = ("TPU v4", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")
_LANES, _SUBLANES = 128, 8
# What the buffers of a call may take together: states of a few hundred rows. More of them are sent
# sooner by ways that send less.
_MEMORY = 2 * 2**20


def wanted() -> bool:
    """Whether the user asks for kernels that reach into other chips' memory. Raises nothing."""
    return os.environ.get(SWITCH) == "1"


def folded(state: AttentionState, axes: Axes, otherwise: Fold) -> AttentionState:
    """The fold of the states of all devices of `axes`, with arithmetic in `lse`'s dtype.

    By one kernel where a program is lowered for TPUs on which `reaches` and `fits` hold, else by
    `otherwise`. It has no derivative. Raises nothing.
    """
    try:
        _depend_on_devices()
    except NotImplementedError:
        return otherwise(state, axes)
    names = jax.sharding.get_abstract_mesh().axis_names
    found = butterfly_p.bind(
        *vary_together(state, axes), axes=axes, names=names, otherwise=otherwise
    )
    return AttentionState(*found)


def fits(state: AttentionState, axes: Axes) -> bool:
    """Whether `exchanged` can fold such states over axes of such sizes. Raises nothing."""
    sizes = [lax.axis_size(axis) for axis in axes]
    rounds = math.prod(sizes).bit_length() - 1
    if rounds == 0 or any(size & (size - 1) for size in sizes):
        return False
    if state.lse.dtype != jnp.float32 or state.lse.size == 0:
        return False
    rows, lanes = _padded(state.lse.size, state.out.shape[-1])
    return rows * lanes * 4 * (rounds + 2) <= _MEMORY


def reaches(mesh: Any, manual: frozenset[str]) -> bool:
    """Whether each device of a mesh can write into the memory of all others, in a kernel.

    They are chips of one slice, of a kind that can; and the program is for one of them, as inside
    a `jax.shard_map` over all axes: XLA cannot split a kernel. Raises nothing.
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
def _types(out: Any, lse: Any, **params: Any) -> list[Any]:
    return [out, lse]


def _batch(operands: Any, dims: Any, **params: Any) -> tuple[list[Any], list[int]]:
    (size,) = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}

    def front(x: Array, dim: int | None) -> Array:
        return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)

    return butterfly_p.bind(*map(front, operands, dims), **params), [0, 0]


batching.primitive_batchers[butterfly_p] = _batch


def _lower(ctx: Any, *operands: Any, axes: Axes, names: Axes, otherwise: Fold) -> Any:
    def plain(out: Array, lse: Array) -> AttentionState:
        return otherwise(AttentionState(out, lse), axes)

    return mlir.lower_fun(plain, multiple_results=True)(ctx, *operands)


def _lower_tpu(ctx: Any, *operands: Any, axes: Axes, names: Axes, otherwise: Fold) -> Any:
    # An exported program may meet other devices than it was lowered for.
    module = ctx.module_context
    mesh = getattr(module.axis_context, "mesh", None)
    manual = frozenset(getattr(module.axis_context, "manual_axes", ()))
    if (
        is_exported(module)
        or not reaches(mesh, manual)
        or not fits(AttentionState(*ctx.avals_in), axes)
    ):
        return _lower(ctx, *operands, axes=axes, names=names, otherwise=otherwise)

    def kernel(out: Array, lse: Array) -> AttentionState:
        return exchanged(AttentionState(out, lse), axes, names)

    return mlir.lower_fun(kernel, multiple_results=True)(ctx, *operands)


mlir.register_lowering(butterfly_p, _lower)
mlir.register_lowering(butterfly_p, _lower_tpu, platform="tpu")


@functools.cache
def _depend_on_devices() -> None:
    # JAX lowers a program once for all devices that it may run on, unless it is told that they
    # matter; there is no public way to say so.
    private_names("lowering").need_devices.add(butterfly_p)


def exchanged(
    state: AttentionState, axes: Axes, names: Axes, interpret: Any = False
) -> AttentionState:
    """The fold by one kernel, of states that `fits` says can be.

    Args:
        state: this device's.
        axes: the mesh axes to fold over, the last one first.
        names: all axes of the mesh, in its order.
        interpret: what `pallas_call` wants, for tests.

    Raises nothing.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    out, lse = state
    width = out.shape[-1]
    rows, lanes = _padded(lse.size, width)
    message = jnp.concatenate([out.reshape(lse.size, width), lse.reshape(-1, 1)], 1)
    message = jnp.pad(message, ((0, rows - lse.size), (0, lanes - width - 1)))
    message, partners = vary_together([message, _partners(axes, names)])
    rounds = partners.shape[1]
    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    found = pl.pallas_call(
        functools.partial(_kernel, width=width),
        out_shape=result_like(message, message.shape, message.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), whole],
        out_specs=whole,
        scratch_shapes=[
            pltpu.VMEM((rounds, rows, lanes), message.dtype),
            pltpu.SemaphoreType.DMA((rounds,)),
            pltpu.SemaphoreType.DMA((rounds,)),
        ],
        interpret=interpret,
        name="butterfly",
    )(partners, message)[: lse.size]
    return AttentionState(found[:, :width].reshape(out.shape), found[:, width].reshape(lse.shape))


def _kernel(
    partners: Any,  # SMEM [2, rounds]: whom to exchange with, and whether it comes before
    given: Any,  # VMEM [rows, lanes]
    mine: Any,  # VMEM [rows, lanes]
    theirs: Any,  # VMEM [rounds, rows, lanes], written by the partners
    sent: Any,
    arrived: Any,
    *,
    width: int,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    mine[...] = given[...]
    for i in range(theirs.shape[0]):
        copy = pltpu.make_async_remote_copy(
            mine,
            theirs.at[i],
            sent.at[i],
            arrived.at[i],
            device_id=partners[0, i],
            device_id_type=pl.DeviceIdType.LOGICAL,
        )
        copy.start()
        copy.wait()  # for what is sent, and for what the partner sends here
        x, y, after = mine[...], theirs[i], partners[1, i] == 1
        mine[...] = _merged(jnp.where(after, y, x), jnp.where(after, x, y), width)


def _merged(
    x: Float[Array, "rows lanes"], y: Float[Array, "rows lanes"], width: int
) -> Float[Array, "rows lanes"]:
    # `kernels.merge`, but with energies in a column: of a vector of truths, as it has there, the
    # chips' compiler makes no column.
    first, second = (z[:, width : width + 1] for z in (x, y))
    shift = safe_shift(jnp.maximum(first, second))
    a, b = jnp.exp(first - shift), jnp.exp(second - shift)
    empty = a + b == 0
    total = jnp.where(empty, 1.0, a + b)
    out = jnp.where(holds_keys(first), x, 0.0) * a + jnp.where(holds_keys(second), y, 0.0) * b
    lse = jnp.where(empty, -jnp.inf, shift + jnp.log(total))
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(lane == width, lse, out / total)


def _partners(axes: Axes, names: Axes) -> Int[Array, "2 rounds"]:
    """For each round the partner's number in the mesh, and whether this device comes after it."""
    found = []
    for axis in reversed(axes):
        place, size = lax.axis_index(axis), lax.axis_size(axis)
        stride = math.prod(lax.axis_size(name) for name in names[names.index(axis) + 1 :])
        for bit in range(size.bit_length() - 1):
            after = (place >> bit) & 1
            found.append(((1 - 2 * after) * (stride << bit), after))
    away, after = (jnp.stack(vary_together(x)) for x in zip(*found, strict=True))
    return jnp.stack(vary_together([lax.axis_index(names) + away, after]))


def _padded(rows: int, width: int) -> tuple[int, int]:
    """The shape of a message: `lse` in the lane after `out`'s, filled up to whole tiles."""
    return (
        math.ceil(rows / _SUBLANES) * _SUBLANES,
        math.ceil((width + 1) / _LANES) * _LANES,
    )
