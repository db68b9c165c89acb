"""Functions and linear maps with custom derivatives, as primitives: in both modes and to any order.

In `grad(grad(f))` and `jvp` of `grad` of an `f` with a `lax.scan`, JAX 0.10.2 ignores the rules of a `jax.custom_jvp`
in its body and differentiates the functions themselves; JAX 0.12.0 does not. A primitive has no other rules
(`test_compositions`, "loop").
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree


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


class AbstractLinearMap(abc.ABC):
    """A function of two trees of arrays, linear in the second; static and hashable.

    `None` in a tree stands for a tangent or a cotangent that is zero.
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


def function_call(function: AbstractFunction, args: PyTree) -> Any:
    """`function.apply(args)`, differentiable by its `jvp` to any order in both modes."""
    return _call(function_call_p, function, args)


def linear_call(linear_map: AbstractLinearMap, fixed: PyTree, moving: PyTree) -> Any:
    r"""`linear_map.apply(fixed, moving)`, differentiable to any order in both modes.

    With $y = L(x)\,u$, the derivative in $u$ is $L(x)$ again, whose transpose is the map's own; the
    derivative in $x$ is that of `plain`.
    """
    return _call(linear_call_p, linear_map, fixed, moving)


def check_closure(program: ClosedJaxpr) -> None:
    """Raises `ValueError` for traced arrays that a function does not take as arguments: they would have no gradient."""
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        raise ValueError(
            "f: wanted a function that takes traced arrays as arguments, got one that takes some from elsewhere"
        )


def with_zeros(tangents: Any, primals: Any) -> Any:
    """Tangents with zeros where they are None."""
    tree = jax.tree.structure(primals)
    pairs = zip(tree.flatten_up_to(tangents), jax.tree.leaves(primals), strict=True)
    return tree.unflatten(jnp.zeros_like(x) if t is None else t for t, x in pairs)


def jvp_of_some(
    f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    """`jax.jvp` of `f(*primals)` in the directions that are not None, at least one."""
    indices = [i for i, x in enumerate(tangents) if x is not None]

    def run(*some: Any) -> Any:
        by_index = dict(zip(indices, some, strict=True))
        return f(*(by_index.get(i, x) for i, x in enumerate(primals)))

    return jax.jvp(run, [primals[i] for i in indices], [tangents[i] for i in indices])


def run_compiled(primitive: Primitive, static: tuple[str, ...]) -> Callable[..., Any]:
    """Makes a primitive run its calls by `jax.jit`, with these static parameters; returns its `bind`."""
    bind = jax.jit(primitive.bind, static_argnames=static)

    @primitive.def_impl
    def _(*flat: Any, **params: Any) -> Any:
        # the primitive has no other implementation, even under `jax.disable_jit`
        with jax.disable_jit(False):
            return bind(*flat, **params)

    return bind


# No tuple: JAX 0.8 makes weak references to static arguments, which tuples do not support.
@dataclasses.dataclass(frozen=True)
class TreeCall:
    """A call of `owner.apply`, as a function of flat arrays: the structures of its arguments and result; static."""

    owner: Any
    args: tuple[Any, ...]
    result: Any

    def __call__(self, *flat: Array) -> list[Any]:
        return jax.tree.leaves(self.owner.apply(*self.split(flat)))

    def split(self, flat: Iterable[Any]) -> list[Any]:
        """The trees of the arguments, of leaves that may be None."""
        leaves = iter(flat)
        return [x.unflatten(itertools.islice(leaves, x.num_leaves)) for x in self.args]


def _call(primitive: Primitive, owner: Any, *args: PyTree) -> Any:
    program, types = jax.make_jaxpr(owner.apply, return_shape=True)(*args)
    check_closure(program)
    call = TreeCall(owner, tuple(map(jax.tree.structure, args)), jax.tree.structure(types))
    return call.result.unflatten(primitive.bind(*jax.tree.leaves(args), program=program, call=call))


@functools.partial(jax.jit, static_argnames="call")
def _apply(*flat: Any, call: Callable[..., list[Any]]) -> list[Any]:
    return call(*flat)


@dataclasses.dataclass(frozen=True)
class _UnderVmap:
    """A call of a function or a linear map under `jax.vmap`; results have the mapped axis in front."""

    call: TreeCall
    axes: tuple[int | None, ...]
    name: Hashable  # of the axis that is mapped, over which the function may reduce
    size: int

    def each(self, method: Callable[..., Any], in_axes: Sequence[Any], *args: PyTree) -> Any:
        mapped = jax.vmap(method, tuple(in_axes), axis_name=self.name, axis_size=self.size)
        return mapped(*args)


class _MappedFunction(_UnderVmap, AbstractFunction):
    def apply(self, args: PyTree) -> Any:
        return self.each(self.call.owner.apply, self.call.split(self.axes), args)

    def jvp(self, primals: PyTree, tangents: PyTree) -> tuple[Any, Any]:
        axes = self.call.split(self.axes)
        return self.each(self.call.owner.jvp, axes * 2, primals, tangents)


class _MappedMap(_UnderVmap, AbstractLinearMap):
    def apply(self, fixed: PyTree, moving: PyTree) -> Any:
        return self.each(self.call.owner.apply, self.call.split(self.axes), fixed, moving)

    def plain(self, fixed: PyTree, moving: PyTree) -> Any:
        return self.each(self.call.owner.plain, self.call.split(self.axes), fixed, moving)

    def transpose(self, fixed: PyTree, moving: PyTree, cotangent: PyTree) -> Any:
        """The transpose of the map for each index, summed for arguments that all indices share."""

        def one(fixed: PyTree, cotangent: PyTree) -> Any:
            return self.call.owner.transpose(fixed, moving, cotangent)

        cotangents = self.each(one, (self.call.split(self.axes)[0], 0), fixed, cotangent)
        tree, axes = self.call.args[1], self.axes[self.call.args[0].num_leaves :]
        taken = (
            None if x is None else x.sum(0) if axis is None else jnp.moveaxis(x, 0, axis)
            for x, axis in zip(tree.flatten_up_to(cotangents), axes, strict=True)
        )
        return tree.unflatten(taken)


def _operation(name: str, mapped: type[_UnderVmap]) -> Primitive:
    """A primitive for calls, whose parameters are the `call` and the `program` that it was traced to."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *flat, program, call: _apply(*flat, call=call))
    primitive.def_abstract_eval(lambda *flat, program, call: program.out_avals)
    lowered = mlir.lower_fun(lambda *flat, program, call: jaxpr_as_fun(program)(*flat))
    mlir.register_lowering(primitive, lowered)

    def batch(
        axis: Any,
        flat: Sequence[Array],
        axes: Sequence[int | None],
        *,
        program: ClosedJaxpr,
        call: TreeCall,
    ) -> tuple[list[Any], list[int | None]]:
        if all(x is None for x in axes):
            result = primitive.bind(*flat, program=program, call=call)
            return result, [None] * len(result)
        owner = mapped(call, tuple(axes), axis.name, axis.size)
        result = jax.tree.leaves(_call(primitive, owner, *call.split(flat)))
        return result, [0] * len(result)

    batching.fancy_primitive_batchers[primitive] = batch
    return primitive


function_call_p = _operation("function_call", _MappedFunction)
linear_call_p = _operation("linear_call", _MappedMap)


def _unless_symbolic(tangent: Any) -> Any:
    return None if isinstance(tangent, ad.Zero) else tangent


def _jvp_of_function(
    primals: Sequence[Any], tangents: Sequence[Any], *, program: ClosedJaxpr, call: TreeCall
) -> tuple[list[Any], list[Any]]:
    del program
    (args,), (changes,) = call.split(primals), call.split(map(_unless_symbolic, tangents))
    result, change = call.owner.jvp(args, changes)
    leaves = jax.tree.leaves(result)
    pairs = zip(leaves, call.result.flatten_up_to(change), strict=True)
    return leaves, [_zero(x) if t is None else t for x, t in pairs]


def _zero(x: Any) -> Any:
    kind: Any = jax.typeof(x)
    return ad.Zero(kind.to_tangent_aval())


def _jvp_of_map(
    primals: Sequence[Array], tangents: Sequence[Any], *, program: ClosedJaxpr, call: TreeCall
) -> tuple[list[Any], list[Any]]:
    result = linear_call_p.bind(*primals, program=program, call=call)
    number = call.args[0].num_leaves
    changes = list(map(_unless_symbolic, tangents))
    # d(L(x) u) = L(x) du where x has no tangent
    if all(x is None for x in changes[:number]):
        fixed, moving = call.split([*primals[:number], *changes[number:]])
        return result, jax.tree.leaves(linear_call(call.owner, fixed, moving))

    # d(L(x) u) = L(x) du + (dL(x)) u: both terms in one pass of the plain function
    def plain(*flat: Array) -> list[Any]:
        return jax.tree.leaves(call.owner.plain(*call.split(flat)))

    return result, jvp_of_some(plain, primals, changes)[1]


def _transpose_of_map(
    cotangents: Sequence[Any], *flat: Any, program: ClosedJaxpr, call: TreeCall
) -> list[Any]:
    del program
    number = call.args[0].num_leaves
    types = [x.aval for x in flat[number:]]
    fixed, moving = call.split([*flat[:number], *types])
    # the cotangent of u in L(x) u is L(x)^T times that of the result
    cotangent = call.result.unflatten(map(_unless_symbolic, cotangents))
    result = call.args[1].flatten_up_to(call.owner.transpose(fixed, moving, cotangent))
    pairs = zip(result, map(ad.Zero, types), strict=True)
    return [None] * number + [zero if x is None else x for x, zero in pairs]


ad.primitive_jvps[function_call_p] = _jvp_of_function
ad.primitive_jvps[linear_call_p] = _jvp_of_map
ad.primitive_transposes[linear_call_p] = _transpose_of_map
