"""The operations of a traced function, one by one."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive

_Value = TypeVar("_Value")
_CALLS = frozenset(("jit", "pjit", "closed_call"))
_NO_MESH = jax.sharding.AbstractMesh((), ())


def without_mesh() -> AbstractContextManager[Any]:
    """Where functions are traced whose operations are looked at, or evaluated, one by one.

    In a `jax.shard_map` JAX traces steps for devices' parts, which are not evaluated by themselves.
    """
    return jax.sharding.use_abstract_mesh(_NO_MESH)


def inlined(
    program: ClosedJaxpr,
    given: Sequence[_Value],
    constant: Callable[[Any], _Value],
    literal: Callable[[Literal], _Value],
    add: Callable[[JaxprEqn, tuple[_Value, ...]], Sequence[_Value]],
) -> list[_Value]:
    """Hands the equations of a program, in order, to `add`; returns what stands for its outputs.

    Inner calls are written out: one that is called twice has the same variables each time.

    Args:
        program: of any calls.
        given: what stands for its inputs.
        constant: what stands for the value of a constant.
        literal: what stands for a number in the program.
        add: what stands for the outputs of an equation, from what stands for its inputs.
    """
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.invars, given, strict=True))
    values |= zip(jaxpr.constvars, map(constant, program.consts), strict=True)

    def read(x: Any) -> _Value:
        return literal(x) if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        inputs = tuple(map(read, equation.invars))
        if equation.primitive.name in _CALLS:
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            outputs = inlined(inner, inputs, constant, literal, add)
        else:
            outputs = add(equation, inputs)
        values |= zip(equation.outvars, outputs, strict=True)
    return list(map(read, jaxpr.outvars))


def reads_first(function: Callable[..., Any], *types: Any) -> bool:
    """Whether the results of a function depend on its first argument; all are arrays, or their types."""
    program = jax.make_jaxpr(function)(*types)
    given = [i == 0 for i, _ in enumerate(types)]
    return any(
        inlined(
            program,
            given,
            lambda _: False,
            lambda _: False,
            lambda equation, reads: [any(reads)] * len(equation.outvars),
        )
    )


def bind(primitive: Primitive, params: dict[str, Any], values: Sequence[Any]) -> list[Any]:
    """The outputs of an operation with the parameters that it has in a program."""
    given: Any = primitive.get_bind_params(params)
    # JAX before 0.9 gives functions apart from the parameters
    functions, static = given if isinstance(given, tuple) else ((), given)
    found: Any = primitive.bind(*functions, *values, **static)
    return list(found) if primitive.multiple_results else [found]
