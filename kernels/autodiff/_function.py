"""Functions with a derivative of their own, for both modes: what `jax.custom_jvp` is, as a primitive.

In `grad(grad(f))` and `jvp` of `grad` of an `f` with a `lax.scan`, JAX 0.10.2 ignores the rules of a `custom_jvp` in
its body and differentiates the functions themselves; JAX 0.12.0 does not. A primitive has no other rules
(`test_compositions`, "loop").
"""

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad, batching
from jaxtyping import Array, PyTree

from ._operation import TreeCall, axes_like, call_as_one, operation, unless_zero


class AbstractFunction(abc.ABC):
    """A function of a tree of arrays; static and hashable."""

    @abc.abstractmethod
    def apply(self, args: Any) -> Any:
        """The result. JAX does not differentiate it."""

    @abc.abstractmethod
    def jvp(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        """The result and its tangent, for tangents that are None where they are zero, as results' may be.

        It is itself made of a `function_call`, so that it can be differentiated.
        """


def with_zeros(tangents: Any, primals: Any) -> Any:
    """Tangents with zeros where they are None."""
    tree = jax.tree.structure(primals)
    pairs = zip(tree.flatten_up_to(tangents), jax.tree.leaves(primals), strict=True)
    return tree.unflatten(jnp.zeros_like(x) if t is None else t for t, x in pairs)


def function_call(function: AbstractFunction, args: PyTree) -> Any:
    """`function.apply(args)`, differentiable by its `jvp` to any order in both modes."""
    return call_as_one(function_call_p, function, args)


function_call_p = operation("function_call")


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, program: ClosedJaxpr, call: TreeCall
) -> tuple[list[Any], list[Any]]:
    del program
    (args,), (changes,) = call.split(primals), call.split(map(unless_zero, tangents))
    found, change = call.owner.jvp(args, changes)
    results = jax.tree.leaves(found)
    pairs = zip(results, call.result.flatten_up_to(change), strict=True)
    return results, [_zero(x) if t is None else t for x, t in pairs]


def _zero(x: Any) -> Any:
    kind: Any = jax.typeof(x)
    return ad.Zero(kind.to_tangent_aval())


class _FunctionFields(NamedTuple):
    function: AbstractFunction
    axes: tuple[int | None, ...]
    name: Hashable  # of the axis that is mapped, over which the function may reduce
    size: int


class _MappedFunction(_FunctionFields, AbstractFunction):
    """A function under `jax.vmap`. The mapped axes of its results are in front."""

    def apply(self, args: Any) -> Any:
        return self._each(self.function.apply, (axes_like(args, self.axes),))(args)

    def jvp(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        changes = jax.tree.structure(primals).flatten_up_to(tangents)
        kept = (None if x is None else axis for x, axis in zip(changes, self.axes, strict=True))
        axes = axes_like(primals, self.axes), axes_like(primals, tuple(kept))
        return self._each(self.function.jvp, axes)(primals, tangents)

    def _each(self, f: Callable[..., Any], axes: tuple[Any, ...]) -> Callable[..., Any]:
        return jax.vmap(f, in_axes=axes, axis_name=self.name, axis_size=self.size)


def _batch(
    axis: Any,
    flat: Sequence[Array],
    axes: Sequence[int | None],
    *,
    program: ClosedJaxpr,
    call: TreeCall,
) -> tuple[list[Any], list[int | None]]:
    if all(x is None for x in axes):
        found = function_call_p.bind(*flat, program=program, call=call)
        return found, [None] * len(found)
    mapped = _MappedFunction(call.owner, tuple(axes), axis.name, axis.size)
    found = jax.tree.leaves(function_call(mapped, *call.split(flat)))
    return found, [0] * len(found)


ad.primitive_jvps[function_call_p] = _jvp
batching.fancy_primitive_batchers[function_call_p] = _batch
