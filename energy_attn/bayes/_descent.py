"""Minimisation of one convex function per row, all rows at once and each with its own step length."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..functional._solution import Result

Tree = TypeVar("Tree")

RUNNING = -1  # in addition to the codes of `Result`


class Trial(NamedTuple):
    """Every row's function evaluated at one point; `[*B, T, N]`, and `[*B, T, N, V]` for vectors.

    Attributes:
        point: `[*B, T, N, V]`; for a row that ends without a minimiser, its certificate.
        value: of the function.
        gradient: `[*B, T, N, V]`.
        direction: `[*B, T, N, V]`, the step of damped Newton; gradient methods ignore it.
        noise: a bound on the rounding error of `value`.
        residual: the number that converges to zero.
        threshold: the residual below which the row has converged.
        status: int32, a code of `Result`, or `RUNNING`.
        inner_steps: int32, the steps that this evaluation took.
    """

    point: Array
    value: Array
    gradient: Array
    direction: Array
    noise: Array
    residual: Array
    threshold: Array
    status: Array
    inner_steps: Array


class Descent(NamedTuple):
    """The state of a descent.

    Attributes:
        last: the last trial that each row has accepted.
        steps: int32 `[*B, T, N]`, how many it has accepted.
        inner_steps: int32 `[*B, T, N]`, the sum over all its trials.
        path: `[recorded + 1, *B, T, N]`, the value after each step; a row that has ended repeats
            its last one.
        passes: the number of evaluations of all rows together.
    """

    last: Trial
    steps: Array
    inner_steps: Array
    path: Array
    passes: Array


Evaluate = Callable[[Array, Array], Trial]


def newton_descent(evaluate: Evaluate, start: Array, max_steps: int) -> Descent:
    """Damped Newton: each row moves along its own direction with its own step length (Armijo).

    One loop around one evaluation: in each pass a row either accepts its trial step or tries a
    shorter one in the next pass. Rows do not wait for each other, and a row that has ended does not
    move. After a shortened step, the next line search starts from a somewhat longer one.

    `evaluate(x, passes)` returns a `Trial`. A row ends unconverged after `max_steps` steps, or when
    its step length falls below the precision of the dtype.
    """

    def step(carry: tuple[Descent, Array]) -> tuple[Descent, Array]:
        found, step_length = carry
        last = found.last
        active = last.status == RUNNING
        move = jnp.where(active[..., None], step_length[..., None] * last.direction, 0.0)
        trial = evaluate(last.point + move, found.passes)
        slope = (last.gradient * last.direction).sum(-1)
        enough = trial.value <= last.value + 0.1 * step_length * slope + last.noise
        # a certificate ends a row whether or not the value has decreased
        moved = active & (enough | (trial.status == Result.outside_hull))
        found = advance(found, trial, moved, max_steps)
        lost = active & ~moved & (step_length < jnp.finfo(step_length.dtype).eps)
        status = jnp.where(lost, Result.max_steps_reached, found.last.status)
        found = found._replace(last=found.last._replace(status=status))
        return found, jnp.where(moved, jnp.minimum(1.0, 8 * step_length), 0.35 * step_length)

    found = initial_descent(evaluate(start, jnp.int32(0)), max_steps)
    carry = (found, jnp.ones_like(found.last.value))
    return lax.while_loop(lambda carry: any_running(carry[0]), step, carry)[0]


def initial_descent(first: Trial, recorded: int) -> Descent:
    """A descent before its first step, whose path has room for `recorded` steps."""
    path = jnp.broadcast_to(first.value[None], (recorded + 1, *first.value.shape))
    return Descent(first, jnp.zeros_like(first.status), first.inner_steps, path, jnp.int32(1))


def any_running(found: Descent) -> Array:
    """Whether any row is still running."""
    return (found.last.status == RUNNING).any()


def advance(found: Descent, trial: Trial, moved: Array, max_steps: int) -> Descent:
    """The descent after a trial that the rows in `moved` accept."""
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


def select(rows: Array, new: Tree, old: Tree) -> Tree:
    """`new` where `rows` is True, else `old`; arrays may have further axes after those of `rows`."""

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(rows.reshape(*rows.shape, *[1] * (new.ndim - rows.ndim)), new, old)

    return jax.tree.map(choose, new, old)
