"""Minimisation of one convex function per row, all rows at once and each with its own step length."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, PyTree

from ..functional._solution import Result
from ..solvers import Optax

Tree = TypeVar("Tree")

RUNNING = -1  # in addition to the codes of `Result`


class Trial(NamedTuple):
    """Every row's function evaluated at one point; `[*B, T, N]`, and `[*B, T, N, V]` for vectors."""

    point: Array  # a vector; for a row that ends without a minimiser, its certificate
    value: Array  # of the function
    gradient: Array  # a vector
    direction: Array  # a vector, the step of damped Newton; gradient methods ignore it
    noise: Array  # a bound on the rounding error of `value`
    residual: Array  # the number that converges to zero
    threshold: Array  # the residual below which the row has converged
    status: Array  # int32, a code of `Result`, or `RUNNING`
    inner_steps: Array  # int32, the steps that this evaluation took


class Descent(NamedTuple):
    """The state of a descent."""

    last: Trial  # the last accepted trial of each row
    steps: Array  # int32 [*B, T, N], the number of accepted steps
    inner_steps: Array  # int32 [*B, T, N], the sum over all its trials
    path: (
        Array  # [recorded + 1, *B, T, N], the value after each step; constant after a row has ended
    )
    passes: Array  # the number of evaluations of all rows together


Evaluate = Callable[[Array, Array], Trial]
# Value and gradient of every row's function at `x`; the second argument is passed through to it.
Objective = Callable[[Array, PyTree], tuple[Array, Array]]


def descend(
    step: Callable[[Descent, Any], tuple[Descent, Any]], first: Trial, recorded: int, state: Any
) -> Descent:
    """Repeats `step(found, state)` until no row is running, with a path that has room for `recorded` steps."""
    path = jnp.broadcast_to(first.value[None], (recorded + 1, *first.value.shape))
    descent = Descent(first, jnp.zeros_like(first.status), first.inner_steps, path, jnp.int32(1))

    def any_running(carry: tuple[Descent, Any]) -> Array:
        return (carry[0].last.status == RUNNING).any()

    return lax.while_loop(any_running, lambda carry: step(*carry), (descent, state))[0]


def newton_descent(evaluate: Evaluate, start: Array, max_steps: int) -> Descent:
    """Damped Newton: each row moves along its own direction with its own step length (Armijo).

    One loop around one evaluation: in each pass a row either accepts its trial step or tries a
    shorter one in the next pass. Rows do not wait for each other, and a row that has ended does not
    move. After a shortened step, the next line search starts from a somewhat longer one.

    `evaluate(x, passes)` returns a `Trial`. A row ends unconverged after `max_steps` steps, or when
    its step length falls below the precision of the dtype.
    """

    def step(descent: Descent, step_length: Array) -> tuple[Descent, Array]:
        last = descent.last
        active = last.status == RUNNING
        move = jnp.where(active[..., None], step_length[..., None] * last.direction, 0.0)
        trial = evaluate(last.point + move, descent.passes)
        slope = (last.gradient * last.direction).sum(-1)
        enough = trial.value <= last.value + 0.1 * step_length * slope + last.noise
        # a certificate ends a row whether or not the value has decreased
        accepted = active & (enough | (trial.status == Result.outside_hull))
        descent = advance(descent, trial, accepted, max_steps)
        lost = active & ~accepted & (step_length < jnp.finfo(step_length.dtype).eps)
        status = jnp.where(lost, Result.max_steps_reached, descent.last.status)
        descent = descent._replace(last=descent.last._replace(status=status))
        return descent, jnp.where(accepted, jnp.minimum(1.0, 8 * step_length), 0.35 * step_length)

    first = evaluate(start, jnp.int32(0))
    return descend(step, first, max_steps, jnp.ones_like(first.value))


def advance(descent: Descent, trial: Trial, accepted: Array, max_steps: int) -> Descent:
    active = descent.last.status == RUNNING
    inner_steps = descent.inner_steps + jnp.where(active, trial.inner_steps, 0)
    last = select(accepted, trial, descent.last)
    steps = descent.steps + accepted.astype(descent.steps.dtype)
    over = (steps >= max_steps) & (last.status == RUNNING)
    last = last._replace(status=jnp.where(over, Result.max_steps_reached, last.status))
    later = (
        jnp.arange(len(descent.path), dtype=steps.dtype).reshape(-1, *[1] * steps.ndim)
        >= steps[None]
    )
    path = jnp.where(later, last.value[None], descent.path)
    return Descent(last, steps, inner_steps, path, descent.passes + 1)


def select(rows: Array, new: Tree, old: Tree) -> Tree:
    """`new` where `rows` is True, else `old`, whose arrays may have more axes than `rows`."""

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(rows.reshape(*rows.shape, *[1] * (new.ndim - rows.ndim)), new, old)

    return jax.tree.map(choose, new, old)


def optax_descent(
    solver: Optax,
    evaluate: Evaluate,
    objective: Objective,
    inputs: PyTree,
    start: Array,
    recorded: int | None = None,
) -> Descent:
    """Minimises each row's function by an optimiser of Optax, with a separate state for each row.

    Rows share nothing: each has its own memory and line search, and a row that has ended does not
    move. Line searches evaluate `objective(x, inputs)`; `evaluate` decides when a row ends, and the
    directions of its trials are ignored. `recorded`: for how many steps to keep the path; all by
    default.
    """
    optimiser = optax.with_extra_args_support(solver.optimiser)
    shape = start.shape
    row_value = _row_value(objective, shape)

    def flat(x: Array) -> Array:
        return x.reshape(-1, *x.shape[len(shape) - 1 :])

    def update(
        gradient: Array, state: optax.OptState, x: Array, value: Array, inputs: PyTree
    ) -> Any:
        more = {"value": value, "grad": gradient, "value_fn": lambda x: row_value(x, inputs)}
        # Optax relies on NumPy's promotion of dtypes and ranks; the user may have set strict ones.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optimiser.update(gradient, state, x, **more)
            return optax.apply_updates(x, updates), state

    def step(descent: Descent, state: Any) -> tuple[Descent, Any]:
        last = descent.last
        x = flat(last.point)
        new, new_state = jax.vmap(update, (0, 0, 0, 0, None))(
            flat(last.gradient), state, x, flat(last.value), inputs
        )
        active = last.status == RUNNING
        new = select(flat(active), new, x)
        state = select(flat(active), new_state, state)
        trial = evaluate(new.reshape(shape), descent.passes)
        return advance(descent, trial, active, solver.max_steps), state

    most = solver.max_steps if recorded is None else recorded
    state = jax.vmap(optimiser.init)(flat(start))
    return descend(step, evaluate(start, jnp.int32(0)), most, state)


def _row_value(objective: Objective, shape: tuple[int, ...]) -> Callable[[Array, PyTree], Array]:
    # One row's function. Only a pass over all rows can evaluate it, so its batching rule is that
    # pass; unbatched, which never runs, it returns zeros of the right types.
    @custom_vmap
    def evaluated(x: Array, inputs: PyTree) -> tuple[Array, Array]:
        del inputs
        return jnp.zeros_like(x[0]), jnp.zeros_like(x)

    @evaluated.def_vmap
    def _(size: int, batched: Sequence[Any], x: Array, inputs: PyTree) -> Any:
        x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
        # inside a batched branch (lax.cond under vmap) what the rows share arrives copied per row
        inputs = jax.tree.map(lambda x, batched: x[0] if batched else x, inputs, batched[1])
        value, gradient = objective(x.reshape(shape), inputs)
        return (value.reshape(size), gradient.reshape(size, -1)), (True, True)

    @jax.custom_vjp
    def value(x: Array, inputs: PyTree) -> Array:
        return evaluated(x, inputs)[0]

    def forward(x: Array, inputs: PyTree) -> tuple[Array, Array]:
        return evaluated(x, inputs)

    def backward(gradient: Array, cotangent: Array) -> tuple[Array, None]:
        return cotangent * gradient, None

    value.defvjp(forward, backward)
    return value
