"""Checks a score by its jaxpr, once for each structure and shapes."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array

from .._checks import received
from .._program import inlined, without_mesh
from ._abstract import AbstractScore, At
from ._structure import ScoreStructure, floating, split_score

# Operations that mix entries of an array, so that a score would depend on the other keys in its block.
_MIXING = (
    *("dot_general", "conv_general_dilated", "sort", "top_k", "rev", "transpose", "slice"),
    *("dynamic_slice", "dynamic_update_slice", "pad", "scatter", "scatter-add", "fft"),
)
_MIXING_STARTS = "reduce_", "cum", "arg"


def check_score(
    score: object, shape: tuple[Any, Any, Any, Any], dtype: jnp.dtype
) -> tuple[ScoreStructure | None, tuple[Any, ...]]:
    """The structure and the arrays of a score for scores `(B, N, T, S)` of `dtype`, or None and ().

    Raises `TypeError` for anything else than a score, and for one that returns another dtype;
    `ValueError` for one that returns another shape, mixes entries of the scores, reads beyond an array
    by the head or the batch, or closes over traced values.
    """
    structure, arrays = split_score(score)
    if structure is None or not isinstance(score, AbstractScore):
        return None, ()
    for x in arrays:
        kinds = (jnp.integer, jnp.bool_)
        if not floating(x) and not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
            raise TypeError(f"score: wanted arrays of real numbers, got {received(x)}")
    for x in score.per_head():
        if x.shape[0] != shape[1]:
            raise ValueError(
                f"score: wanted arrays of {structure.name} with an entry for each of the {shape[1]} "
                f"heads, got {received(x)}"
            )
    batch_and_heads = shape[:2] if all(isinstance(x, int) for x in shape[:2]) else (1, shape[1])
    _check(structure, tuple((x.shape, x.dtype) for x in arrays), batch_and_heads, jnp.dtype(dtype))
    return structure, tuple(jnp.asarray(x) for x in arrays)


@functools.lru_cache(maxsize=256)
def _check(
    structure: ScoreStructure, arrays: tuple[Any, ...], size: tuple[int, int], dtype: jnp.dtype
) -> None:
    batch, heads = size
    shape = batch, heads, 3, 2
    sizes = (batch, 0), (heads, 1), (shape[2], 2), (shape[3], 3)
    numbers: Any = (
        np.arange(size, dtype=np.int32).reshape([-1 if i == axis else 1 for i in range(4)])
        for size, axis in sizes
    )
    indices_of_scores = At(*numbers)
    if not structure.compares:
        indices_of_scores = At(*indices_of_scores[:2], None, None)  # pyright: ignore[reportArgumentType]

    def run(score: Array, at: At, *arrays: Array) -> Array:
        cast = (x.astype(dtype) if floating(x) else x for x in arrays)
        return structure.bind(tuple(cast))(score, at)

    types = [jax.ShapeDtypeStruct(*x) for x in arrays]
    traced = jax.make_jaxpr(run, return_shape=True)
    with without_mesh():
        program, out = traced(jax.ShapeDtypeStruct(shape, dtype), indices_of_scores, *types)
    if not hasattr(out, "dtype") or out.shape != shape:
        raise ValueError(
            f"score: wanted scores of the shape that {structure.name} was given, {shape}, "
            f"got {out if hasattr(out, 'shape') else received(out)}"
        )
    if out.dtype != dtype:
        raise TypeError(
            f"score: wanted scores of the dtype that {structure.name} was given, {dtype}, got "
            f"{out.dtype}"
        )
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        raise ValueError(
            f"score: wanted arrays that are traced as parameters of {structure.name}, got a function "
            "that closes over them"
        )
    known = [None, indices_of_scores.batch, indices_of_scores.head]
    count = 1 + len(jax.tree.leaves(indices_of_scores))
    inputs = [
        _Value(known[i] if i < len(known) else None, i < count)
        for i in range(len(program.jaxpr.invars))
    ]
    with without_mesh(), jax.ensure_compile_time_eval():
        _check_program(structure.name, program, inputs)


class _Value(NamedTuple):
    """A value of a score's program: what it is, None if not known, and whether it has an entry for each score."""

    constant: Any
    mixed: bool = False


def _check_program(name: str, program: ClosedJaxpr, inputs: Sequence[_Value]) -> list[_Value]:
    """Checks each step; returns what is known of the outputs."""

    def add(eqn: JaxprEqn, operands: tuple[_Value, ...]) -> list[_Value]:
        inner = _inner(eqn)
        if inner is not None and len(inner.jaxpr.invars) == len(operands):
            return _check_program(name, inner, operands)
        _check_step(name, eqn, operands)
        mixed = any(x.mixed for x in operands)
        return [_Value(x, mixed) for x in _constants(eqn, [x.constant for x in operands])]

    return inlined(program, inputs, _Value, lambda x: _Value(x.val), add)


def _inner(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program of a call, such as that of a jitted function."""
    for x in eqn.params.values():
        if isinstance(x, ClosedJaxpr):
            return x
    return None


def _type(x: Literal | Var) -> Any:
    return x.aval  # which is declared as the abstract class of types


def _check_step(name: str, eqn: JaxprEqn, operands: Sequence[_Value]) -> None:
    step = eqn.primitive.name
    mixes = step in _MIXING or step.startswith(_MIXING_STARTS)
    # indices are concatenated from several arrays
    if step == "concatenate":
        mixes = not jnp.issubdtype(_type(eqn.outvars[0]).dtype, jnp.integer)
    if (mixes and any(x.mixed for x in operands)) or (step == "gather" and operands[0].mixed):
        raise ValueError(
            f"score: wanted an elementwise function of scores and places, got {name}, which takes "
            f"{step} of them"
        )
    if step == "gather" and operands[1].constant is not None:
        sizes, index = _type(eqn.invars[0]).shape, np.asarray(operands[1].constant)
        for place, axis in enumerate(eqn.params["dimension_numbers"].start_index_map):
            least, most = index[..., place].min(), index[..., place].max()
            if not 0 <= least <= most < sizes[axis]:
                raise ValueError(
                    f"score: wanted indices of {name} by head or batch from 0 to {sizes[axis] - 1}, "
                    f"the length of the array that it reads, {sizes}, got {least} to {most}"
                )


def _constants(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    unknown = [None] * len(eqn.outvars)
    all_known = all(x is not None for x in operands) and not eqn.primitive.multiple_results
    small = all(math.prod(_type(x).shape) <= 2**16 for x in eqn.outvars)
    if not all_known or not small or eqn.effects or _inner(eqn) is not None:
        return unknown
    return [eqn.primitive.bind(*operands, **eqn.params)]
