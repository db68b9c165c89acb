"""Evaluates jaxprs by rules for equations, and lists equations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

# The outputs of an equation from its inputs: arrays, or whatever stands for them.
Rule = Callable[[JaxprEqn, list[Any]], Sequence[Any]]
# By the names of JAX's primitives, some of which differ between its versions.
REMAT = frozenset(("checkpoint", "remat", "remat2"))
CALLS = frozenset(("jit", "pjit", "closed_call"))
# the function alone, without the derivative that it has or how that is computed
CALLS_WITH_RULES = CALLS | REMAT | {"custom_jvp_call", "custom_vjp_call"}
_NO_MESH = jax.sharding.AbstractMesh((), ())


def without_mesh() -> AbstractContextManager[Any]:
    """A context for tracing functions whose operations are looked at, or evaluated, one by one.

    In a `jax.shard_map` JAX traces steps for devices' parts, which are not evaluated by themselves.
    """
    return jax.sharding.use_abstract_mesh(_NO_MESH)


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    rule: Rule,
    *,
    calls: frozenset[str] = CALLS,
    constant: Callable[[Any, Any], Any] | None = None,
) -> list[Any]:
    """The outputs of a jaxpr, whose equations `rule` evaluates in order.

    `inputs` may be anything that stands for its inputs, and `constant` gives what stands for a constant of a type: by
    default the value. Functions of the primitives in `calls` are evaluated equation by equation.
    """
    constant = constant or (lambda x, _: x)
    values = dict(zip(jaxpr.invars, inputs, strict=True))
    values |= {x: constant(y, x.aval) for x, y in zip(jaxpr.constvars, consts, strict=True)}

    def read(x: Any) -> Any:
        return constant(x.val, x.aval) if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        given = list(map(read, equation.invars))
        if equation.primitive.name in calls:
            params = equation.params
            inner = closed(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"])
            options: Any = {"calls": calls, "constant": constant}
            outputs = interpret(inner.jaxpr, inner.consts, given, rule, **options)
        else:
            outputs = rule(equation, given)
        values |= zip(equation.outvars, outputs, strict=True)
    return list(map(read, jaxpr.outvars))


def closed(program: ClosedJaxpr | Jaxpr) -> ClosedJaxpr:
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())


def function_of(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """The function of a jaxpr's constants and inputs, as JAX evaluates it."""
    count = len(jaxpr.constvars)
    return lambda *flat: jaxpr_as_fun(ClosedJaxpr(jaxpr, flat[:count]))(*flat[count:])


def bind(
    equation: JaxprEqn, inputs: Sequence[Any], params: dict[str, Any] | None = None
) -> list[Any]:
    """The rule of JAX: the outputs of an equation's primitive, with its own or other parameters."""
    primitive = equation.primitive
    given: Any = primitive.get_bind_params(equation.params if params is None else params)
    # JAX before 0.9 gives functions apart from the parameters
    functions, static = given if isinstance(given, tuple) else ((), given)
    found: Any = primitive.bind(*functions, *inputs, **static)
    return list(found) if primitive.multiple_results else [found]


def evaluate_by(
    evaluate: Callable[[Jaxpr, Sequence[Any], Sequence[Any]], list[Any]],
    function: Callable[..., Any],
    *args: Any,
) -> Any:
    """`function(*args)` of trees of arrays, by a function of its jaxpr, the constants of this, and the arrays."""
    program, struct = jax.make_jaxpr(function, return_shape=True)(*args)
    found = evaluate(program.jaxpr, program.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(struct), found)


def as_array(x: Any, type_: Any) -> jax.Array:
    """A constant of a program as an array of its type."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x, type_.dtype)


def without_shardings(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of an equation without shardings, which name the mesh of the trace."""
    return {**params, **dict.fromkeys({"sharding", "out_sharding"} & params.keys())}


def programs(equation: JaxprEqn) -> list[ClosedJaxpr | Jaxpr]:
    """The programs among the parameters of an equation: of a call, a loop, branches and their like."""

    def is_program(x: object) -> bool:
        return isinstance(x, (ClosedJaxpr, Jaxpr))

    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)
    return list(filter(is_program, leaves))


def equations(program: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a program, and of the programs inside it, outer equations first."""
    for equation in program.eqns:
        yield equation
        for inner in programs(equation):
            yield from equations(inner)
