"""The inputs that a kernel's score needs, computed from the score's arrays, and their derivatives."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..call._operands import Operands, Settings
from ..scores._structure import floating
from ._score_program import Numbers, ScoreProgram, Target, score_program


def score_of(operands: Operands, settings: Settings, target: Target) -> ScoreProgram | None:
    """The program of a call's score for kernels of a target; None without a score.

    Raises `NotImplementedError` if they cannot run it.
    """
    if settings.score is None:
        return None
    if settings.scored_width is not None:
        raise NotImplementedError(
            f"score: wanted None beside a source, got {settings.score.name} (blockwise takes it)"
        )
    types = tuple((x.shape, jnp.dtype(x.dtype)) for x in operands.score_arrays)
    return score_program(settings.score, types, target, jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]


def score_numbers(operands: Operands, program: ScoreProgram | None) -> Numbers:
    """The inputs of the score, `[B or 1, N or 1]` and `[B or 1, N or 1, D]`; empty without a score."""
    if program is None:
        return Numbers()
    return program.outside(operands.score_arrays, *operands.part_indices())


def score_directions(
    operands: Operands, program: ScoreProgram | None, directions: Operands
) -> Numbers | None:
    """The change of the numbers and tables in the directions of the score's arrays; None: none move."""
    directions_of_arrays = directions.score_arrays
    if program is None or all(x is None for x in directions_of_arrays):
        return None
    arrays = _differentiable(operands)
    tangents = [
        jnp.zeros_like(x)
        if directions_of_arrays[i] is None
        else directions_of_arrays[i].astype(x.dtype)
        for i, x in arrays.items()
    ]
    numbers_of = _numbers_of_moving(operands, program)
    _, changes = jax.jvp(numbers_of, (list(arrays.values()),), (tangents,))
    return changes


def score_cotangents(
    operands: Operands, program: ScoreProgram | None, rows: Numbers
) -> tuple[Array | None, ...]:
    """The cotangents of the score's arrays, from those of its numbers `[B, T, N]` and tables for each row."""
    if program is None:
        return ()
    differentiable = _differentiable(operands)
    numbers, pullback = jax.vjp(
        _numbers_of_moving(operands, program), list(differentiable.values())
    )

    def summed(x: Array, like: Array) -> Array:
        x = x.sum(1)
        axes = tuple(i for i in (0, 1) if like.shape[i] < x.shape[i])
        return x.sum(axes, keepdims=True)

    (array_cotangents,) = pullback(jax.tree.map(summed, rows._replace(fixed=()), numbers))
    cotangents: list[Any] = [None] * len(operands.score_arrays)
    for i, x in zip(differentiable, array_cotangents, strict=True):
        cotangents[i] = x
    return tuple(cotangents)


def _differentiable(operands: Operands) -> dict[int, Array]:
    return {i: x for i, x in enumerate(operands.score_arrays) if floating(x)}


def _numbers_of_moving(operands: Operands, program: ScoreProgram) -> Any:
    """The function from these arrays to the numbers that have derivatives."""
    indices = tuple(_differentiable(operands))

    def numbers_of(moving: Sequence[Array]) -> Numbers:
        arrays = list(operands.score_arrays)
        for i, x in zip(indices, moving, strict=True):
            arrays[i] = x
        numbers = program.outside(arrays, *operands.part_indices())
        return numbers._replace(fixed=())

    return numbers_of
