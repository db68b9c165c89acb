"""Calls that a program holds as one operation, with rules of their own, until it is lowered."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.core
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir
from jaxtyping import Array, PyTree


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


def call_as_one(primitive: Primitive, owner: Any, *args: PyTree) -> Any:
    """`owner.apply(*args)`, as one operation of a primitive that `operation` returned."""
    program, types = jax.make_jaxpr(owner.apply, return_shape=True)(*args)
    call = TreeCall(owner, tuple(map(jax.tree.structure, args)), jax.tree.structure(types))
    return call.result.unflatten(primitive.bind(*jax.tree.leaves(args), program=program, call=call))


def operation(name: str) -> Primitive:
    """A primitive for calls of functions: it runs and lowers them, and knows their types.

    Its parameters are the `call` and the `program` that it was traced to.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *flat, program, call: _apply(*flat, call=call))
    primitive.def_abstract_eval(lambda *flat, program, call: program.out_avals)
    mlir.register_lowering(primitive, mlir.lower_fun(_lowered, multiple_results=True))
    return primitive


@functools.partial(jax.jit, static_argnames="call")
def _apply(*flat: Any, call: Callable[..., list[Any]]) -> list[Any]:
    return call(*flat)


def _lowered(*flat: Any, program: ClosedJaxpr, call: TreeCall) -> list[Any]:
    del call
    return jaxpr_as_fun(program)(*flat)


def unless_zero(tangent: Any) -> Any:
    """A tangent, or None for a symbolic zero."""
    return None if isinstance(tangent, ad.Zero) else tangent


def axes_like(tree: PyTree, axes: tuple[int | None, ...]) -> Any:
    return jax.tree.structure(tree).unflatten(axes)
