"""States as messages: what a collective is given so that as few as possible are sent."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import apply_widened, vary_together


def transfer(collective: Callable[[Any], Any], state: AttentionState) -> AttentionState:
    """Hands both arrays of a state to one collective, which maps over trees and keeps last axes.

    On CPUs they travel as one array, in `lse`'s dtype: gloo would send each by itself. Elsewhere as
    a pair: XLA joins the two without copying, and `lse` as one more lane of `out` would fill up the
    next 128 lanes of a TPU. Raises nothing.
    """

    def packed(out: Array, lse: Array) -> AttentionState:
        joined = jnp.concatenate([out.astype(lse.dtype), lse[..., None]], -1)
        joined = collective(joined)
        return AttentionState(joined[..., :-1].astype(out.dtype), joined[..., -1])

    def apart(out: Array, lse: Array) -> AttentionState:
        return AttentionState(*collective((out, lse)))

    return lax.platform_dependent(*vary_together(state), cpu=packed, default=apart)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def moved(collective: Callable[[Array], Array], x: Array) -> Array:
    """An array through a collective that moves numbers and computes none. Raises nothing.

    XLA:CPU would widen 16-bit floats and send twice the bytes; there they travel as integers.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize != 2:
        return collective(x)
    return lax.platform_dependent(x, cpu=functools.partial(as_bits, collective), default=collective)


@moved.defjvp
def _moved_jvp(
    collective: Callable[[Array], Array], primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    # integers have no tangents: those are sent as they are; what is gathered is summed on the way back
    return moved(collective, *primals), apply_widened(collective, *tangents)


def as_bits(collective: Callable[[Array], Array], x: Array) -> Array:
    """Floating numbers through a collective, as integers of their bits. Raises nothing."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(collective(bits), x.dtype)


def joined(x: Array, axes: tuple[str, ...], axis: int) -> Array:
    """The parts of an array that the devices hold, end to end along `axis`. Raises nothing."""
    if x.size == 0:  # HLO gathers no empty arrays
        devices = lax.axis_size(axes)
        shape = (n * devices if i == axis else n for i, n in enumerate(x.shape))
        return lax.full_like(x, 0, shape=tuple(shape))
    return moved(lambda x: lax.all_gather(x, axes, axis=axis, tiled=True), x)


def gathered(state: AttentionState, axes: tuple[str, ...]) -> AttentionState:
    """The states of all devices, on a leading axis. It has no derivative. Raises nothing.

    XLA:TPU does not join the gathers of two arrays. There they travel as the bits of one, `lse` in
    rows of its own below those of `out`; unless an automatic axis of the mesh may split the rows,
    which would first have to be brought together.
    """

    def gather(x: Any) -> Any:
        return lax.all_gather(x, axes)

    def stacked(out: Array, lse: Array) -> AttentionState:
        unit = jnp.dtype(f"uint{8 * min(out.dtype.itemsize, lse.dtype.itemsize)}")
        bits = [lax.bitcast_convert_type(x, unit) for x in (out, lse)]
        above, below = bits[0].reshape(-1, out.shape[-1]), bits[1].reshape(-1)
        below = jnp.pad(below, (0, -below.size % out.shape[-1])).reshape(-1, out.shape[-1])
        joined = gather(jnp.concatenate([above, below]))
        devices, rows = joined.shape[0], above.shape[0]
        outs = joined[:, :rows].reshape(devices, *bits[0].shape)
        lses = joined[:, rows:].reshape(devices, -1)[:, : bits[1].size]
        lses = lses.reshape(devices, *bits[1].shape)
        return AttentionState(
            lax.bitcast_convert_type(outs, out.dtype), lax.bitcast_convert_type(lses, lse.dtype)
        )

    def plain(out: Array, lse: Array) -> AttentionState:
        return transfer(gather, AttentionState(out, lse))

    mesh = jax.sharding.get_abstract_mesh()
    if state.out.size == 0 or any(kind == AxisType.Auto for kind in mesh.axis_types):
        return plain(*state)
    return lax.platform_dependent(*vary_together(state), tpu=stacked, default=plain)


def as_invariant(tree: Any, axes: tuple[str, ...]) -> Any:
    """Arrays that are equal on all devices of `axes`, with a type that says so; sends nothing.

    A maximum over groups of one device each is how JAX lets that be said; of bits, as XLA:CPU makes
    minus infinity of the maximum of a NaN. It has no derivative. Raises nothing.
    """
    alone = [[i] for i in range(lax.axis_size(axes))]
    largest = functools.partial(lax.pmax, axis_name=axes, axis_index_groups=alone)

    def said(x: Array) -> Array:
        return as_bits(largest, x) if jnp.issubdtype(x.dtype, jnp.floating) else largest(x)

    return jax.tree.map(said, tree)


def permuted(
    state: AttentionState, axis: str | tuple[str, ...], pairs: list[tuple[int, int]]
) -> AttentionState:
    """The state of the device that `pairs` of (source, target) name for this one."""
    return transfer(lambda x: lax.ppermute(x, axis, pairs), state)


def widened(state: AttentionState) -> AttentionState:
    """`out` in `lse`'s dtype: a state that is folded more than once is rounded only at the end."""
    return AttentionState(state.out.astype(state.lse.dtype), state.lse)


def narrowed(state: AttentionState, like: AttentionState) -> AttentionState:
    """`out` in the dtype of `like`'s."""
    return AttentionState(state.out.astype(like.out.dtype), state.lse)
