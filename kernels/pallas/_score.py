"""Inputs of a kernel's score, computed from the score's arrays, with tangents and cotangents."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..call._operands import Operands, Settings
from ..scores._structure import floating
from ._score_program import Numbers, ScoreProgram, Target, score_program


def score_of(operands: Operands, settings: Settings, target: Target) -> ScoreProgram | None:
    """Returns the score program of a call for a target; None without a score.

    Raises `NotImplementedError` if the target cannot run it.
    """
    if settings.score is None:
        return None
    if settings.scored_width is not None:
        raise NotImplementedError(
            f"score: wanted None with a source, got {settings.score.name} (blockwise takes it)"
        )
    types = tuple((x.shape, jnp.dtype(x.dtype)) for x in operands.score_arrays)
    return score_program(settings.score, types, target, jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]


def score_numbers(operands: Operands, program: ScoreProgram | None) -> Numbers:
    """Returns the score's numbers `[B or 1, N or 1]` and tables `[B or 1, N or 1, D]`; empty without a score."""
    if program is None:
        return Numbers()
    return program.outside(operands.score_arrays, *operands.part_indices())


def score_directions(
    operands: Operands, program: ScoreProgram | None, directions: Operands
) -> Numbers | None:
    """Returns the tangents of numbers and tables from the tangents of the score's arrays; None if all are None."""
    directions_of_arrays = directions.score_arrays
    if program is None or all(x is None for x in directions_of_arrays):
        return None
    # dn = ∂n/∂θ dθ
    numbers_of, arrays = _moving_numbers(operands, program)
    pairs = ((directions_of_arrays[i], x) for i, x in arrays.items())
    tangents = [jnp.zeros_like(x) if d is None else d.astype(x.dtype) for d, x in pairs]
    return jax.jvp(numbers_of, (list(arrays.values()),), (tangents,))[1]


def score_cotangents(
    operands: Operands, program: ScoreProgram | None, rows: Numbers
) -> tuple[Array | None, ...]:
    """Returns the cotangents of the score's arrays, from per-row cotangents `[B, T, N]` of numbers and tables."""
    if program is None:
        return ()
    # dθ = (∂n/∂θ)^T Σ_i dn_i, over the rows i that share a number
    numbers_of, arrays = _moving_numbers(operands, program)
    numbers, pullback = jax.vjp(numbers_of, list(arrays.values()))

    def summed(x: Array, like: Array) -> Array:
        x = x.sum(1)
        axes = tuple(i for i in (0, 1) if like.shape[i] < x.shape[i])
        return x.sum(axes, keepdims=True)

    (array_cotangents,) = pullback(jax.tree.map(summed, rows._replace(fixed=()), numbers))
    by_index = dict(zip(arrays, array_cotangents, strict=True))
    return tuple(by_index.get(i) for i in range(len(operands.score_arrays)))


def _moving_numbers(operands: Operands, program: ScoreProgram) -> tuple[Any, dict[int, Array]]:
    """Returns the differentiable numbers as a function of the floating arrays, and these arrays by index."""
    moving = {i: x for i, x in enumerate(operands.score_arrays) if floating(x)}

    def numbers_of(floats: Sequence[Array]) -> Numbers:
        arrays = list(operands.score_arrays)
        for i, x in zip(moving, floats, strict=True):
            arrays[i] = x
        return program.outside(arrays, *operands.part_indices())._replace(fixed=())

    return numbers_of, moving
