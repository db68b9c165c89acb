"""Checks a score by its jaxpr, once for each structure and shapes."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from .._checks import received
from ..program._operations import Operation, ProgramValue, inputs_of, operations_of
from ..program._read import CALLS_WITH_RULES, programs, without_mesh
from ._abstract import AbstractScore, At
from ._structure import ScoreStructure, floating, split_score

_KNOWN = 2**16  # entries of indices that are followed, at most
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
    inputs = inputs_of(program, *("score",) * (1 + len(jax.tree.leaves(indices_of_scores))))
    inputs[1].known, inputs[2].known = indices_of_scores[:2]
    _check_program(structure.name, program, inputs)


def _check_program(name: str, program: ClosedJaxpr, inputs: Sequence[ProgramValue]) -> None:
    """Checks each operation; values that have an entry for each score read "score"."""
    options: Any = {"calls": CALLS_WITH_RULES, "foldable": _KNOWN}
    for x in operations_of(program, inputs, **options)[0]:
        _check_operation(name, x)
        for inner in programs(x.equation):
            variables = inner.jaxpr.invars
            if len(variables) == len(x.inputs):
                pairs = zip(variables, x.inputs, strict=True)
                _check_program(name, inner, [ProgramValue(y.aval, z.reads) for y, z in pairs])


def _check_operation(name: str, operation: Operation) -> None:
    step = operation.name
    mixes = step in _MIXING or step.startswith(_MIXING_STARTS)
    # indices are concatenated from several arrays
    if step == "concatenate":
        mixes = not jnp.issubdtype(operation.outputs[0].dtype, jnp.integer)
    if (mixes and operation.reads) or (step == "gather" and operation.inputs[0].reads):
        raise ValueError(
            f"score: wanted an elementwise function of scores and places, got {name}, which takes "
            f"{step} of them"
        )
    if step == "gather" and operation.inputs[1].known is not None:
        sizes, index = operation.inputs[0].shape, operation.inputs[1].known
        for place, axis in enumerate(
            operation.equation.params["dimension_numbers"].start_index_map
        ):
            least, most = index[..., place].min(), index[..., place].max()
            if not 0 <= least <= most < sizes[axis]:
                raise ValueError(
                    f"score: wanted indices of {name} by head or batch from 0 to {sizes[axis] - 1}, "
                    f"the length of the array that it reads, {sizes}, got {least} to {most}"
                )
