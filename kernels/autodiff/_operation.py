"""Functions that a program holds as one operation, with rules of their own, until it is lowered."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

Call = Callable[..., list[Any]]  # of arrays, to arrays; hashable


def operation(name: str) -> Primitive:
    """A primitive for calls of functions: it runs and lowers them, and knows their types.

    Its parameters are the `call` and the `program` that it was traced to.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(_run)
    primitive.def_abstract_eval(_types)
    mlir.register_lowering(primitive, mlir.lower_fun(_lowered, multiple_results=True))
    return primitive


@functools.partial(jax.jit, static_argnames="call")
def _apply(*flat: Any, call: Call) -> list[Any]:
    return call(*flat)


def _run(*flat: Any, program: ClosedJaxpr, call: Call) -> list[Any]:
    del program
    return _apply(*flat, call=call)


def _types(*flat: jax.core.ShapedArray, program: ClosedJaxpr, call: Call) -> list[Any]:
    del flat, call
    return program.out_avals


def _lowered(*flat: Any, program: ClosedJaxpr, call: Call) -> list[Any]:
    del call
    return jaxpr_as_fun(program)(*flat)
