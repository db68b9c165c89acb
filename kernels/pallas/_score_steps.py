"""The steps of a score: its jaxpr with calls inlined, where each value knows the inputs it depends on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from .._program import bind, inlined
from ..scores._abstract import At
from ..scores._structure import ScoreStructure, floating


class Name:
    """A value of a program, and which of its inputs it depends on."""

    def __init__(self, aval: Any, reads: frozenset[str] = frozenset()):
        self.shape, self.dtype, self.reads = tuple(aval.shape), aval.dtype, reads


class Step(NamedTuple):
    """An operation: its inputs are names and numbers, its outputs names."""

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @property
    def reads(self) -> frozenset[str]:
        """Which inputs of the program it depends on."""
        return reads(self.inputs)


class Traced(NamedTuple):
    """A score of single numbers.

    Attributes:
        inputs: "raw", "query", "key", "batch" and "head".
        arrays: those of the score.
        known: constants, with their values.
        steps: the operations, in order.
        output: the score.
    """

    inputs: dict[str, Name]
    arrays: list[Name]
    known: dict[Name, np.ndarray]
    steps: list[Step]
    output: Any


def traced(structure: ScoreStructure, types: tuple[Any, ...]) -> Traced:
    """The steps of a score with arrays of shapes and dtypes `types`, in float32.

    Raises `NotImplementedError` for a score that takes no single numbers.
    """

    def score(raw: Any, query: Any, key: Any, batch: Any, head: Any, *arrays: Any) -> Any:
        arrays_float32 = [x.astype(jnp.float32) if floating(x) else x for x in arrays]
        index = At(batch, head, query, key)
        if not structure.compares:
            index = At(batch, head, None, None)  # pyright: ignore[reportArgumentType]
        return structure.bind(arrays_float32)(raw, index)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    array_types = (jax.ShapeDtypeStruct(*x) for x in types)
    raw = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        program = jax.make_jaxpr(score)(raw, *[number] * 4, *array_types)
    except (TypeError, ValueError, IndexError) as reason:
        raise NotImplementedError(
            f"score: wanted a function that takes single numbers, got {structure.name} with {reason} "
            "(blockwise takes it)"
        ) from reason
    names = "raw", "query", "key", "batch", "head"
    variables = program.jaxpr.invars
    inputs = {
        name: Name(x.aval, frozenset({name})) for name, x in zip(names, variables, strict=False)
    }
    arrays = [Name(x.aval) for x in variables[len(names) :]]
    trace = Traced(inputs, arrays, {}, [], None)
    (output,) = _recorded(program, [*inputs.values(), *arrays], trace)
    return trace._replace(output=output)


def _recorded(program: ClosedJaxpr, inputs: Sequence[Any], trace: Traced) -> list[Any]:
    """Adds the steps of a program for given inputs; returns its outputs."""

    def constant(x: Any) -> Name:
        name = Name(jax.typeof(x))
        trace.known[name] = np.asarray(x)
        return name

    def number(x: Literal) -> Any:
        return np.asarray(x.val, getattr(x.aval, "dtype", None))[()]

    def add(equation: JaxprEqn, operands: tuple[Any, ...]) -> tuple[Name, ...]:
        outputs = tuple(Name(x.aval) for x in equation.outvars)
        trace.steps.append(Step(equation.primitive, equation.params, operands, outputs))
        return outputs

    return inlined(program, inputs, constant, number, add)


def reads(values: Sequence[Any]) -> frozenset[str]:
    """Which inputs of the program any of these depends on."""
    return frozenset().union(*(x.reads for x in values if isinstance(x, Name)))


def value(values: dict[Any, Any], x: Any) -> Any:
    """The value of a name, or a number itself."""
    return values[x] if isinstance(x, Name) else x


def run(steps: Sequence[Step], values: dict[Any, Any]) -> None:
    """Evaluates steps and adds the values of their outputs to `values`."""
    for step in steps:
        operands = [value(values, x) for x in step.inputs]
        if step.primitive.name == "sign" and jnp.issubdtype(operands[0].dtype, jnp.integer):
            # From integer divisions. JAX cannot lower `sign` for TPUs ahead of time; if it can, the test
            # `test_functions_of_scores` of tests/tpu passes with `sign` in the kernel's TARGET.
            one = np.ones((), operands[0].dtype)[()]
            values[step.outputs[0]] = lax.clamp(-one, operands[0], one)
            continue
        values |= zip(step.outputs, bind(step.primitive, step.params, operands), strict=True)
