"""The abstract class of a merge strategy, and states as messages, packed so that few collectives are sent."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array

from energy_attn.kernels import AttentionState, CovarianceState, merge_all
from energy_attn.kernels.internal import State, autodiff, mesh_axes

from ..cost._network import Topology, Transfer, Transfers
from ..cost._shape import Shape

Axes = tuple[str, ...]
Arrays = TypeVar("Arrays")


class AbstractMerge(abc.ABC):
    """Reduces the states of all devices to one, equal on all of them.

    A strategy is one class, in the list of `merge/_strategies.py`. Strategies are not
    differentiated: the derivative of a fold is the same for all, and `merge_across` defines it.

    Attributes:
        name: its name, for `merge=`.
        least_axes: how many mesh axes it needs.
        automatic: whether `"auto"` considers it.
    """

    name: ClassVar[str]
    least_axes: ClassVar[int] = 1
    automatic: ClassVar[bool] = True

    @abc.abstractmethod
    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        """The fold of each device's state, equal on all devices of `axes`, `out` in its own dtype."""

    @abc.abstractmethod
    def transfers(self, shape: Shape, topology: Topology) -> Transfers:
        """The collectives of `fold`, over several devices."""

    def scatter(self, states: AttentionState, axes: Axes) -> AttentionState:
        """The fold where queries are sharded: of states `[p, ...]`, device i keeps row i, in `lse`'s dtype."""
        exchanged = transfer(lambda x: lax.all_to_all(x, axes, 0, 0), states)
        return merge_all(promoted(exchanged), axis=0)

    def scatter_transfers(self, rows: int, shape: Shape, topology: Topology) -> Transfers:
        """The collectives of `scatter`, for this many rows of all devices together."""
        yield Transfer("all-to-all", rows * shape.state, topology.axes)


class AbstractMessageMerge(AbstractMerge):
    """A strategy that only sends states and merges them locally, and so folds covariances, too."""

    @abc.abstractmethod
    def fold(self, state: State, axes: Axes) -> State:
        """The fold of each device's state, of either kind, equal on all devices of `axes`."""


def transfer(collective: Callable[[Any], Any], state: AttentionState) -> AttentionState:
    """Applies one collective, which maps over trees and keeps last axes, to both arrays of a state."""

    # One array on CPUs, in lse's dtype, since gloo would send two separately.
    def as_one(out: Array, lse: Array) -> AttentionState:
        sent = collective(jnp.concatenate([out.astype(lse.dtype), lse[..., None]], -1))
        return AttentionState(sent[..., :-1].astype(out.dtype), sent[..., -1])

    # A pair elsewhere, which XLA combines without copying. With lse as one more lane of `out`, XLA:TPU would
    # pad the array to a multiple of 128 lanes.
    def pair(out: Array, lse: Array) -> AttentionState:
        return AttentionState(*collective((out, lse)))

    return lax.platform_dependent(*mesh_axes.vary_together(state), cpu=as_one, default=pair)


def moved(collective: Callable[[Array], Array], x: Array) -> Array:
    """Applies a collective that moves numbers without computing with them to an array."""
    # XLA:CPU would widen 16-bit floats, and send twice the bytes: they are sent as integers.
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize != 2:
        return collective(x)
    return autodiff.function_call(_AsBits(collective), x)


@dataclasses.dataclass(frozen=True)
class _AsBits(autodiff.AbstractFunction):
    collective: Callable[[Array], Array]

    def apply(self, args: Array) -> Array:
        as_integers = functools.partial(as_bits, self.collective)
        return lax.platform_dependent(args, cpu=as_integers, default=self.collective)

    def jvp(self, primals: Array, tangents: Array) -> tuple[Array, Array]:
        # Integers have no tangents. The transpose of a gather is a sum, which is taken in float32.
        return autodiff.function_call(self, primals), mesh_axes.apply_in_float32(
            self.collective, tangents
        )


def as_bits(collective: Callable[[Array], Array], x: Array) -> Array:
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(collective(bits), x.dtype)


def joined(tree: Arrays, axes: Axes, axis: int) -> Arrays:
    """Gathers the shards of arrays, end to end along `axis`."""

    def whole(x: Array) -> Array:
        if x.size == 0:  # HLO gathers no empty arrays
            shape = list(x.shape)
            shape[axis] *= lax.axis_size(axes)
            return lax.full_like(x, 0, shape=tuple(shape))
        return moved(lambda x: lax.all_gather(x, axes, axis=axis, tiled=True), x)

    return jax.tree.map(whole, tree) if axes else tree


def gathered(state: AttentionState, axes: Axes) -> AttentionState:
    """The states of all devices, on a leading axis. It has no derivative."""

    def gather(x: Arrays) -> Arrays:
        return lax.all_gather(x, axes)

    # XLA:TPU does not combine the gathers of two arrays (`tests/tpu`). There one array of bits is gathered,
    # with lse in rows below those of `out`.
    def stacked(out: Array, lse: Array) -> AttentionState:
        unit = jnp.dtype(f"uint{8 * min(out.dtype.itemsize, lse.dtype.itemsize)}")
        bits = [lax.bitcast_convert_type(x, unit) for x in (out, lse)]
        out_rows, lse_rows = bits[0].reshape(-1, out.shape[-1]), bits[1].reshape(-1)
        lse_rows = jnp.pad(lse_rows, (0, -lse_rows.size % out.shape[-1])).reshape(-1, out.shape[-1])
        gathered_rows = gather(jnp.concatenate([out_rows, lse_rows]))
        devices, rows = gathered_rows.shape[0], out_rows.shape[0]
        outs = gathered_rows[:, :rows].reshape(devices, *bits[0].shape)
        lses = gathered_rows[:, rows:].reshape(devices, -1)[:, : bits[1].size]
        lses = lses.reshape(devices, *bits[1].shape)
        return AttentionState(
            lax.bitcast_convert_type(outs, out.dtype), lax.bitcast_convert_type(lses, lse.dtype)
        )

    def plain(out: Array, lse: Array) -> AttentionState:
        return transfer(gather, AttentionState(out, lse))

    # XLA may have sharded the rows over an automatic mesh axis, and would gather them to stack them
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    automatic = any(kind == AxisType.Auto and mesh.shape[axis] > 1 for axis, kind in kinds)
    if state.out.size == 0 or automatic:
        return plain(*state)
    return lax.platform_dependent(*mesh_axes.vary_together(state), tpu=stacked, default=plain)


def as_invariant(tree: Arrays, axes: Axes) -> Arrays:
    """Casts arrays that are equal on all devices of `axes` to a type that does not vary over them. No derivative."""
    if not axes:
        return tree
    # JAX has no cast from varying to invariant. A maximum over groups of one device has the type, and sends
    # nothing. It is a maximum of bits, since XLA:CPU drops NaN (https://github.com/openxla/xla/issues/21461).
    groups = [[i] for i in range(lax.axis_size(axes))]
    largest = functools.partial(lax.pmax, axis_name=axes, axis_index_groups=groups)

    def cast(x: Array) -> Array:
        return as_bits(largest, x) if jnp.issubdtype(x.dtype, jnp.floating) else largest(x)

    return jax.tree.map(cast, tree)


def permuted(
    state: AttentionState, axis: str | Axes, pairs: list[tuple[int, int]]
) -> AttentionState:
    """Sends states along `pairs` of (source, target) devices."""
    return transfer(lambda x: lax.ppermute(x, axis, pairs), state)


def packed(state: State) -> AttentionState:
    """A state as a message; covariances follow `out`, in `lse`'s dtype."""
    if isinstance(state, AttentionState):
        return state
    covariance, out, lse = promoted(state)
    flat = covariance.reshape(*out.shape[:-1], out.shape[-1] ** 2)
    return AttentionState(jnp.concatenate([out, flat], -1), lse)


def unpacked(message: AttentionState, like: State) -> State:
    """Unpacks a message, or a stack of messages, to the kind of state of `like`."""
    if isinstance(like, AttentionState):
        return message
    width = like.out.shape[-1]
    out, flat = message.out[..., :width], message.out[..., width:]
    return CovarianceState(flat.reshape(*out.shape, width), out, message.lse)


# A state that is folded repeatedly has `out` in lse's dtype, and is rounded once, at the end.
def promoted(state: State) -> State:
    return jax.tree.map(lambda x: x.astype(state.lse.dtype), state)


def narrowed(state: State, like: State) -> State:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), state, like)


def flat_rows(state: AttentionState, multiple: int) -> AttentionState:
    """A state `[rows, width]`, padded with empty rows to a multiple."""
    rows, width = state.lse.size, state.out.shape[-1]
    missing = -rows % multiple
    out = jnp.pad(state.out.reshape(rows, width), ((0, missing), (0, 0)))
    lse = jnp.pad(state.lse.reshape(rows), (0, missing), constant_values=-jnp.inf)
    return AttentionState(out, lse)


def shaped_like(state: AttentionState, like: AttentionState) -> AttentionState:
    """The rows of a state from `flat_rows(like, ...)`, in its shape."""
    return jax.tree.map(lambda x, y: x[: like.lse.size].reshape(y.shape), state, like)
