"""Operations of a jaxpr with its calls inlined; each value knows which inputs it reads, and its constant."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._checks import is_concrete
from ._read import CALLS, Rule, bind, interpret, without_mesh


class ProgramValue:
    """A value of a program: equal to itself alone.

    `reads` are the names of the inputs that it depends on; `known` is what it is, if that depends on constants alone.
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
    """The inputs of a program, the first by their names; the others count for nothing that is read."""
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

    def add(equation: JaxprEqn, given: list[ProgramValue]) -> tuple[ProgramValue, ...]:
        outputs = tuple(ProgramValue(x.aval, reads(given)) for x in equation.outvars)
        operations.append(Operation(equation, tuple(given), outputs))
        small = all(x.size <= foldable for x in outputs)
        if small and not equation.effects and all(x.known is not None for x in given):
            with without_mesh(), jax.ensure_compile_time_eval():
                found = bind(equation, [x.known for x in given])
            for output, x in zip(outputs, found, strict=True):
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
    """The subset of `operations` that computes `results`, and the values that it takes from elsewhere."""
    wanted, found = set(results), []
    for x in reversed(operations):
        if not wanted.isdisjoint(x.outputs):
            wanted = wanted.difference(x.outputs).union(x.inputs)
            found.append(x)
    return found[::-1], wanted


def value_of(values: dict[ProgramValue, Any], x: ProgramValue) -> Any:
    return values[x] if x in values else x.known


def run(
    operations: Iterable[Operation], values: dict[ProgramValue, Any], rule: Rule = bind
) -> None:
    """Adds the values of the outputs of operations to `values`."""
    for x in operations:
        found = rule(x.equation, [value_of(values, y) for y in x.inputs])
        values |= zip(x.outputs, found, strict=True)


def bind_in_kernel(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """`bind`, in operations that compilers of kernels have."""
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
