"""The ways around a ring: all keys in one direction, or those of half of the heads in each."""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import Operands, Settings

from ._arguments import Axes
from ._hops import Tree, hop, origin, part


class AbstractWay(abc.ABC):
    """In which direction keys and their gradients go; a frozen dataclass, static."""

    @abc.abstractmethod
    def apart(self, tree: Any) -> Any:
        """The arrays of a tree in the form in which they go around."""

    @abc.abstractmethod
    def joined(self, tree: Any) -> Any:
        """The arrays of a tree, from that form."""

    @abc.abstractmethod
    def hop(self, tree: Any, axes: Axes) -> Any:
        """Sends a tree in that form one hop on, and returns what arrives."""

    @abc.abstractmethod
    def cut(
        self, x: Array | None, axis: int, turn: int | Array, size: int, axes: Axes
    ) -> Array | None:
        """The part of an array of all keys for the `size` keys of a turn; all of it if it is broadcast along them."""

    @abc.abstractmethod
    def uncut(self, found: Array, like: Array, axis: int, turn: int | Array, axes: Axes) -> Array:
        """An array of all keys that is zero but for those of a turn."""


@dataclasses.dataclass(frozen=True)
class OneWay(AbstractWay):
    """To the next device."""

    def apart(self, tree: Tree) -> Tree:
        return tree

    def joined(self, tree: Tree) -> Tree:
        return tree

    def hop(self, tree: Tree, axes: Axes) -> Tree:
        return hop(tree, axes)

    def cut(
        self, x: Array | None, axis: int, turn: int | Array, size: int, axes: Axes
    ) -> Array | None:
        return part(x, axis, origin(turn, axes), size)

    def uncut(self, found: Array, like: Array, axis: int, turn: int | Array, axes: Axes) -> Array:
        return _placed(found, like, axis, origin(turn, axes))


@dataclasses.dataclass(frozen=True)
class BothWays(AbstractWay):
    """Keys `[2 B, S, K / 2, H]`: to the next device the first half of the heads, back the second, below it.

    A turn has the first half of one device's heads and the second half of another's, so that rows have
    positions of their own. What is not made of keys keeps its form: a bias or mask `[B, N, T, p S]`,
    positions and segments `[B, p S]`.

    Attributes:
        rows: $B$.
    """

    rows: int

    def apart(self, tree: Any) -> Any:
        leaves, form = jax.tree.flatten(tree)
        # of one dtype as one array: a TPU has no more than five transfers on their way at a time
        kinds = tuple(x.dtype for x in leaves)
        alike = [[x for x in leaves if x.dtype == kind] for kind in dict.fromkeys(kinds)]
        packed = [jnp.split(jnp.concatenate(some, -1), 2) for some in alike]
        return _Halves(packed, form, kinds, tuple(x.shape[-1] for x in leaves))

    def joined(self, tree: Any) -> Any:
        if not isinstance(tree, _Halves):
            return tree
        kinds = dict.fromkeys(tree.kinds)
        whole = dict(zip(kinds, map(jnp.concatenate, tree.packed), strict=True))
        begin, leaves = dict.fromkeys(kinds, 0), []
        for kind, width in zip(tree.kinds, tree.widths, strict=True):
            first = begin[kind]
            leaves.append(whole[kind][..., first : first + width])
            begin[kind] += width
        return jax.tree.unflatten(tree.form, leaves)

    def hop(self, tree: Any, axes: Axes) -> Any:
        def pass_on(x: Any) -> Any:
            packed = [[hop(first, axes), hop(second, axes, -1)] for first, second in x.packed]
            return dataclasses.replace(x, packed=packed)

        return jax.tree.map(pass_on, tree, is_leaf=lambda x: isinstance(x, _Halves))

    def cut(
        self, x: Array | None, axis: int, turn: int | Array, size: int, axes: Axes
    ) -> Array | None:
        if x is None:
            return None

        def of(half: Array, way: int) -> Array:
            here: Any = part(half, axis, origin(turn, axes, way), size)
            return jnp.broadcast_to(here, (self.rows, *here.shape[1:]))

        first, second = _halves(x, axis)
        return jnp.concatenate([of(first, 1), of(second, -1)])

    def uncut(self, found: Array, like: Array, axis: int, turn: int | Array, axes: Axes) -> Array:
        wholes = []
        for half, way in zip(jnp.split(found, 2), (1, -1), strict=True):
            half = half.sum(0, keepdims=True) if like.shape[0] == 1 else half
            wholes.append(_placed(half, like, axis, origin(turn, axes, way)))
        return jnp.concatenate(wholes, 1) if like.shape[1] > 1 else wholes[0] + wholes[1]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("packed",),
    meta_fields=("form", "kinds", "widths"),
)
@dataclasses.dataclass(frozen=True)
class _Halves:
    """A tree of arrays whose first axis is cut in two, those of each dtype side by side along the last one."""

    packed: Any  # a pair of halves for each dtype
    form: Any
    kinds: tuple[Any, ...]
    widths: tuple[int, ...]


def _halves(x: Array, axis: int) -> tuple[Array, Array]:
    """An array for the heads of each half: only a bias or mask, cut along axis 3, has some of its own."""
    if axis == 1 or x.shape[1] == 1:
        return x, x
    first, second = jnp.split(x, 2, 1)
    return first, second


def _placed(found: Array, like: Array, axis: int, place: Array) -> Array:
    """Zeros along an axis as long as that of `like`, but for what was found of one device's."""
    if like.shape[axis] == 1:
        return found
    size = found.shape[axis]
    shape = (*found.shape[:axis], like.shape[axis], *found.shape[axis + 1 :])
    zeros = lax.full_like(found, 0.0, shape=shape)
    return lax.dynamic_update_slice_in_dim(zeros, found, place * size, axis)


def check_both_ways(settings: Settings, operands: Operands) -> None:
    """Raises `ValueError` for a call whose heads cannot go both ways."""
    heads = operands.key.shape[2]
    if heads % 2:
        raise ValueError(
            "bidirectional: wanted an even number of heads of keys on a device for True, "
            f"got {heads}; set it to False"
        )
    if settings.score is not None:
        raise ValueError(
            f"bidirectional: wanted False for a score=, got True and a score of {settings.score.name}"
        )


def by_halves(operands: Operands) -> Operands:
    """Operands with the second half of the heads as rows below those of the first."""

    def below(x: Array) -> Array:
        return jnp.concatenate(jnp.split(x, 2, 2))

    def again(x: Array) -> Array:
        return x if x.shape[0] == 1 else jnp.concatenate([x, x])

    return operands._replace(
        query=below(operands.query),
        key=below(operands.key),
        value=below(operands.value),
        tokens=operands.tokens.map_queries(again),
        mask_arrays=tuple(map(again, operands.mask_arrays)),
    )


def joined_halves(state: AttentionState) -> AttentionState:
    """The state of all heads, from that of operands `by_halves`."""
    return jax.tree.map(lambda x: jnp.concatenate(jnp.split(x, 2), 2), state)
