"""Minimisers of one convex function for each row, all rows at once and each at its own pace."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..core._solution import Result

RUNNING = -1  # beside the codes of `Result`


class Trial(NamedTuple):
    """What is known of every row's function at one point; `[*B, T, N]`, with `V` for vectors.

    Attributes:
        at: `[*B, T, N, V]`, the point; of a row that ends without a minimiser, what it ends with.
        value: of the function.
        gradient: `[*B, T, N, V]`.
        direction: `[*B, T, N, V]`, where damped Newton goes from here; what follows gradients does
            not look at it.
        noise: what rounding may have added to `value`.
        residual: what is to become small.
        accepted: how small is small enough.
        verdict: int32, a code of `Result`, or `RUNNING`.
        inner: int32, how many steps it took to know all this.
    """

    at: Array
    value: Array
    gradient: Array
    direction: Array
    noise: Array
    residual: Array
    threshold: Array
    status: Array
    inner_steps: Array


class Descent(NamedTuple):
    """How far a descent is, and how it got there.

    Attributes:
        last: the last trial that each row has taken.
        steps: int32 `[*B, T, N]`, how many it has taken.
        inner: int32 `[*B, T, N]`, the steps inside of all its trials.
        path: `[recorded + 1, *B, T, N]`, the values, which go on with the last one of a row that
            has ended.
        passes: how many trials of all rows together there were.
    """

    last: Trial
    steps: Array
    inner_steps: Array
    path: Array
    passes: Array


Evaluate = Callable[[Array, Array], Trial]


def newton_descent(evaluate: Evaluate, start: Array, max_steps: int) -> Descent:
    """Damped Newton: each row along its own direction, with its own step length (Armijo).

    One loop with one evaluation in it: in each pass a row either takes the step that it tries, or
    tries a shorter one in the next. Rows do not wait for each other, and one that has ended stays
    put. A row that was cut short begins its next search a little longer than where this one ended.

    `evaluate(x, passes)` gives a `Trial`. A row ends unconverged after `max_steps` steps, or when
    its step has shrunk to nothing.
    """

    def step(carry: tuple[Descent, Array]) -> tuple[Descent, Array]:
        found, norm = carry
        last = found.last
        active = last.status == RUNNING
        move = jnp.where(active[..., None], norm[..., None] * last.direction, 0.0)
        trial = evaluate(last.at + move, found.passes)
        slope = (last.gradient * last.direction).sum(-1)
        enough = trial.value <= last.value + 0.1 * norm * slope + last.noise
        # a certificate ends a row whether it has descended or not
        moved = active & (enough | (trial.status == Result.outside_hull))
        found = advance(found, trial, moved, max_steps)
        lost = active & ~moved & (norm < jnp.finfo(norm.dtype).eps)
        status = jnp.where(lost, Result.max_steps_reached, found.last.status)
        found = found._replace(last=found.last._replace(status=status))
        return found, jnp.where(moved, jnp.minimum(1.0, 8 * norm), 0.35 * norm)

    found = initial_descent(evaluate(start, jnp.int32(0)), max_steps)
    carry = (found, jnp.ones_like(found.last.value))
    return lax.while_loop(lambda carry: any_running(carry[0]), step, carry)[0]


def initial_descent(first: Trial, recorded: int) -> Descent:
    """A descent of no steps, whose path will be `recorded` for so many."""
    path = jnp.broadcast_to(first.value[None], (recorded + 1, *first.value.shape))
    return Descent(first, jnp.zeros_like(first.status), first.inner_steps, path, jnp.int32(1))


def any_running(found: Descent) -> Array:
    """Whether any row has still to go on."""
    return (found.last.status == RUNNING).any()


def advance(found: Descent, trial: Trial, moved: Array, max_steps: int) -> Descent:
    """The descent after a trial that the rows `moved` take."""
    active = found.last.status == RUNNING
    inner_steps = found.inner_steps + jnp.where(active, trial.inner_steps, 0)
    last = select(moved, trial, found.last)
    steps = found.steps + moved.astype(found.steps.dtype)
    over = (steps >= max_steps) & (last.status == RUNNING)
    last = last._replace(status=jnp.where(over, Result.max_steps_reached, last.status))
    later = (
        jnp.arange(len(found.path), dtype=steps.dtype).reshape(-1, *[1] * steps.ndim) >= steps[None]
    )
    path = jnp.where(later, last.value[None], found.path)
    return Descent(last, steps, inner_steps, path, found.passes + 1)


def select(rows: Array, new: Any, old: Any) -> Any:
    """`new` for some rows and `old` for the others; further axes of arrays are behind."""

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(rows.reshape(*rows.shape, *[1] * (new.ndim - rows.ndim)), new, old)

    return jax.tree.map(choose, new, old)
