"""Evaluates jaxprs by rules for their equations, and lists their operations.

In the list of operations calls are inlined, and each value knows which inputs it depends on, and its constant.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from .._checks import is_concrete

# The outputs of an equation from its inputs: arrays, or whatever stands for them.
Rule = Callable[[JaxprEqn, list[Any]], Sequence[Any]]
# By the names of JAX's primitives, some of which differ between its versions.
REMAT = frozenset(("checkpoint", "remat", "remat2"))
CALLS = frozenset(("jit", "pjit", "closed_call"))
# also calls with custom derivatives or rematerialisation, which are inlined without them
CALLS_WITH_RULES = CALLS | REMAT | {"custom_jvp_call", "custom_vjp_call"}
_NO_MESH = jax.sharding.AbstractMesh((), ())


def without_mesh() -> AbstractContextManager[Any]:
    """A context for tracing functions whose operations are inspected or evaluated one by one.

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
        args = list(map(read, equation.invars))
        if equation.primitive.name in calls:
            params = equation.params
            inner = closed(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"])
            options: Any = {"calls": calls, "constant": constant}
            outputs = interpret(inner.jaxpr, inner.consts, args, rule, **options)
        else:
            outputs = rule(equation, args)
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
    bound: Any = primitive.get_bind_params(equation.params if params is None else params)
    # JAX before 0.9 returns functions separately from the parameters
    functions, static = bound if isinstance(bound, tuple) else ((), bound)
    result: Any = primitive.bind(*functions, *inputs, **static)
    return list(result) if primitive.multiple_results else [result]


def evaluate_by(
    evaluate: Callable[[Jaxpr, Sequence[Any], Sequence[Any]], list[Any]],
    function: Callable[..., Any],
    *args: Any,
) -> Any:
    """Evaluates `function(*args)`, of trees of arrays, by `evaluate(jaxpr, consts, arrays)`."""
    program, struct = jax.make_jaxpr(function, return_shape=True)(*args)
    result = evaluate(program.jaxpr, program.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(struct), result)


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


class ProgramValue:
    """A value of a program; compared by identity.

    `reads` are the names of the inputs that it depends on; `known` is its value if it depends on constants alone.
    """

    def __init__(self, type_: Any, reads: Iterable[str] = (), known: Any = None):
        self.shape, self.dtype = tuple(type_.shape), type_.dtype
        self.reads, self.known = frozenset(reads), known

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Operation(NamedTuple):
    equation: JaxprEqn
    inputs: tuple[ProgramValue, ...]
    outputs: tuple[ProgramValue, ...]

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def is_known(self) -> bool:
        return bool(self.outputs) and all(x.known is not None for x in self.outputs)

    @property
    def reads(self) -> frozenset[str]:
        return reads(self.inputs)


def reads(values: Iterable[ProgramValue]) -> frozenset[str]:
    """The names of the inputs that any of these depends on."""
    return frozenset().union(*(x.reads for x in values))


def inputs_of(program: ClosedJaxpr, *names: str) -> list[ProgramValue]:
    """The inputs of a program, the first with these names; the others have none, and count as not read."""
    variables = program.jaxpr.invars
    named = [ProgramValue(x.aval, (name,)) for x, name in zip(variables, names, strict=False)]
    return named + [ProgramValue(x.aval) for x in variables[len(names) :]]


def operations_of(
    program: ClosedJaxpr,
    inputs: Sequence[ProgramValue],
    *,
    calls: frozenset[str] = CALLS,
    foldable: float = math.inf,
) -> tuple[list[Operation], list[ProgramValue]]:
    """The operations of a program in order, and its outputs.

    An operation of constants is evaluated if it has no effect, and at most `foldable` entries in its outputs.
    """
    operations: list[Operation] = []

    def add(equation: JaxprEqn, args: list[ProgramValue]) -> tuple[ProgramValue, ...]:
        outputs = tuple(ProgramValue(x.aval, reads(args)) for x in equation.outvars)
        operations.append(Operation(equation, tuple(args), outputs))
        small = all(x.size <= foldable for x in outputs)
        if small and not equation.effects and all(x.known is not None for x in args):
            with without_mesh(), jax.ensure_compile_time_eval():
                result = bind(equation, [x.known for x in args])
            for output, x in zip(outputs, result, strict=True):
                output.known = _constant(x, output)
        return outputs

    def constant(x: Any, type_: Any) -> ProgramValue:
        return ProgramValue(type_, known=_constant(x, type_))

    options: Any = {"calls": calls, "constant": constant}
    outputs = interpret(program.jaxpr, program.consts, inputs, add, **options)
    return operations, outputs


def _constant(x: Any, type_: Any) -> Any:
    # as a NumPy array: JAX's would be on the current mesh, and the program may be used on another
    is_number = is_concrete(x) and not jnp.issubdtype(type_.dtype, jax.dtypes.extended)
    return np.asarray(x, type_.dtype) if is_number else x


def needed(
    operations: Sequence[Operation], results: Iterable[ProgramValue]
) -> tuple[list[Operation], set[ProgramValue]]:
    """The subset of `operations` that computes `results`, and the other values that it reads."""
    wanted, result = set(results), []
    for x in reversed(operations):
        if not wanted.isdisjoint(x.outputs):
            wanted = wanted.difference(x.outputs).union(x.inputs)
            result.append(x)
    return result[::-1], wanted


def value_of(values: dict[ProgramValue, Any], x: ProgramValue) -> Any:
    return values[x] if x in values else x.known


def run(
    operations: Iterable[Operation], values: dict[ProgramValue, Any], rule: Rule = bind
) -> None:
    """Adds the values of the outputs of operations to `values`."""
    for x in operations:
        result = rule(x.equation, [value_of(values, y) for y in x.inputs])
        values |= zip(x.outputs, result, strict=True)


def bind_in_kernel(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """`bind`, by operations that the compilers of kernels support."""
    if equation.primitive.name == "sign" and jnp.issubdtype(inputs[0].dtype, jnp.integer):
        # From integer divisions. JAX cannot lower `sign` for TPUs ahead of time; if it can, the test
        # `test_functions_of_scores` of tests/tpu passes with `sign` in the kernel's TARGET.
        one = np.ones((), inputs[0].dtype)[()]
        return [lax.clamp(-one, inputs[0], one)]
    return bind(equation, inputs)


def reads_first(function: Callable[..., Any], *types: Any) -> bool:
    """Whether the results of a function depend on its first argument; all are arrays, or their types."""
    with without_mesh():
        program = jax.make_jaxpr(function)(*types)
    _, outputs = operations_of(program, inputs_of(program, "first"), foldable=0)
    return "first" in reads(outputs)
