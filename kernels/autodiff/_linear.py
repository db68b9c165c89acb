"""Linear maps with a transpose of their own: one primitive, for both modes of differentiation."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad, batching
from jaxtyping import Array, PyTree

from ._operation import TreeCall, axes_like, call_as_one, operation, unless_zero


class AbstractLinearMap(abc.ABC):
    """A function of two trees of arrays, linear in the second; static and hashable.

    `None` in a tree stands for what is absent: a direction that does not move, or a cotangent that is
    zero.
    """

    @abc.abstractmethod
    def apply(self, fixed: Any, moving: Any) -> Any:
        """The result, by whatever computes it fastest. JAX does not differentiate it."""

    @abc.abstractmethod
    def plain(self, fixed: Any, moving: Any) -> Any:
        """The result by JAX's operations, which JAX differentiates in `fixed`."""

    @abc.abstractmethod
    def transpose(self, fixed: Any, moving: Any, cotangent: Any) -> Any:
        """The cotangent of `moving`, given by its types, from the cotangent of the result.

        It is itself made of `linear_call`s, so that it can be differentiated.
        """


def linear_call(linear_map: AbstractLinearMap, fixed: PyTree, moving: PyTree) -> Any:
    r"""`linear_map.apply(fixed, moving)`, differentiable to any order in both modes.

    With $y = L(x)\,u$, the derivative in $u$ is $L(x)$ again, whose transpose is the map's own; the
    derivative in $x$ is that of `plain`.
    """
    return call_as_one(linear_call_p, linear_map, fixed, moving)


linear_call_p = operation("linear_call")


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], *, program: ClosedJaxpr, call: TreeCall
) -> tuple[list[Any], list[Any]]:
    found = linear_call_p.bind(*primals, program=program, call=call)
    number = call.args[0].num_leaves
    moved = [i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero)]
    if min(moved) >= number:
        fixed, moving = call.split([*primals[:number], *map(unless_zero, tangents[number:])])
        return found, jax.tree.leaves(linear_call(call.owner, fixed, moving))

    # in one pass, that in the moving arguments with that in the fixed ones
    def plain(*some: Array) -> list[Any]:
        flat = list(primals)
        for i, x in zip(moved, some, strict=True):
            flat[i] = x
        return jax.tree.leaves(call.owner.plain(*call.split(flat)))

    given = [primals[i] for i in moved], [tangents[i] for i in moved]
    return found, jax.jvp(plain, *given)[1]


def _transpose(
    cotangents: Sequence[Any], *flat: Any, program: ClosedJaxpr, call: TreeCall
) -> list[Any]:
    del program
    number = call.args[0].num_leaves
    types = [x.aval for x in flat[number:]]
    fixed, moving = call.split([*flat[:number], *types])
    cotangent = call.result.unflatten(map(unless_zero, cotangents))
    found = call.args[1].flatten_up_to(call.owner.transpose(fixed, moving, cotangent))
    zeros = map(ad.Zero, types)
    return [None] * number + [z if x is None else x for x, z in zip(found, zeros, strict=True)]


class _MapFields(NamedTuple):
    """The fields of a map under `jax.vmap`: the map, and the mapped axis of each array it takes."""

    linear_map: AbstractLinearMap
    fixed: tuple[int | None, ...]
    moving: tuple[int | None, ...]


class _MappedMap(_MapFields, AbstractLinearMap):
    """A map under `jax.vmap`. The mapped axes of its results are in front."""

    def apply(self, fixed: Any, moving: Any) -> Any:
        return self._each(self.linear_map.apply, fixed, moving)

    def plain(self, fixed: Any, moving: Any) -> Any:
        return self._each(self.linear_map.plain, fixed, moving)

    def _each(self, function: Callable[[Any, Any], Any], fixed: Any, moving: Any) -> Any:
        axes = axes_like(fixed, self.fixed), axes_like(moving, self.moving)
        return jax.vmap(function, in_axes=axes)(fixed, moving)

    def transpose(self, fixed: Any, moving: Any, cotangent: Any) -> Any:
        """The transpose of the map for each index, summed for arguments that all indices share."""

        def one(fixed: Any, cotangent: Any) -> Any:
            return self.linear_map.transpose(fixed, moving, cotangent)

        found = jax.vmap(one, in_axes=(axes_like(fixed, self.fixed), 0))(fixed, cotangent)
        tree = jax.tree.structure(moving)
        taken = (
            None if x is None else x.sum(0) if axis is None else jnp.moveaxis(x, 0, axis)
            for x, axis in zip(tree.flatten_up_to(found), self.moving, strict=True)
        )
        return tree.unflatten(taken)


def _batch(
    flat: Sequence[Array], axes: Sequence[int | None], *, program: ClosedJaxpr, call: TreeCall
) -> tuple[list[Any], list[int]]:
    del program
    number = call.args[0].num_leaves
    mapped = _MappedMap(call.owner, tuple(axes[:number]), tuple(axes[number:]))
    found = jax.tree.leaves(linear_call(mapped, *call.split(flat)))
    return found, [0] * len(found)


ad.primitive_jvps[linear_call_p] = _jvp
ad.primitive_transposes[linear_call_p] = _transpose
batching.primitive_batchers[linear_call_p] = _batch
