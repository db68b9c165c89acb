"""A butterfly of states as one TPU kernel, whose exchanges are copies from chip to chip.

XLA makes of a butterfly one collective for each round, and of the folds between them a fusion each.
Here one kernel does all rounds while the state stays in on-chip memory. It has to get right:

- **The partner.** In round r a device exchanges with the one whose index along the axis differs in
  bit r, the last axis first, as in `_butterfly.exchanged`. The two operands of a fold are ordered by
  index: partners do the same arithmetic on the same numbers, and all results are bitwise equal.
- **The first write into another chip's memory.** That chip must be running this call of the kernel.
  The kernel asks for no barrier semaphore of its own, so XLA puts its own in front: no device begins
  before all have come. Without it, a device that is one call ahead would overwrite a state that
  its partner has not read. A semaphore of our own would need a number that no other kernel of the
  program uses, and no register of those exists.
- **Rounds.** Each round has a buffer and semaphores of its own, so that a partner may run ahead by
  any number of rounds. The state that is sent is overwritten only after it has left, and the kernel
  ends only when no copy is under way, to it or from it.
- **Batches.** A grid over a batch would be calls without a barrier between them. So `vmap` makes a
  batch into more rows of one call.
"""

import functools
import math

import jax.numpy as jnp
from jax import Ref, lax
from jaxtyping import Array, Float, Int

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import holds_keys, result_like, safe_shift, vary_together

Axes = tuple[str, ...]

_LANES, _SUBLANES = 128, 8
# What the buffers of a call may take together: states of a few hundred rows. More of them are sent
# sooner by strategies that send less.
_MEMORY = 2 * 2**20


def fits(state: AttentionState, axes: Axes) -> bool:
    """Whether `fold_in_kernel` takes these states over axes of these sizes."""
    sizes = [lax.axis_size(axis) for axis in axes]
    rounds = math.prod(sizes).bit_length() - 1
    if rounds == 0 or any(size & (size - 1) for size in sizes):
        return False
    if state.lse.dtype != jnp.float32 or state.lse.size == 0:
        return False
    rows, lanes = _padded(state.lse.size, state.out.shape[-1])
    return rows * lanes * 4 * (rounds + 2) <= _MEMORY


def fold_in_kernel(
    state: AttentionState, axes: Axes, names: Axes, interpret: object = False
) -> AttentionState:
    """The fold by one kernel, of states for which `fits` holds.

    Args:
        state: this device's.
        axes: the mesh axes to fold over, the last one first.
        names: all axes of the mesh, in its order.
        interpret: as for `pallas_call`, for tests.
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
    partners: Ref,  # SMEM [2, rounds]: whom to exchange with, and whether it comes before
    given: Ref,  # VMEM [rows, lanes]
    mine: Ref,  # VMEM [rows, lanes]
    theirs: Ref,  # VMEM [rounds, rows, lanes], written by the partners
    sent: Ref,
    arrived: Ref,
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
