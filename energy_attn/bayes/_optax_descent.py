"""Optax solvers applied to one problem per row."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, PyTree

from ..solvers import Optax
from ._descent import RUNNING, Descent, Evaluate, advance, any_running, initial_descent, select

# Value and gradient of every row's function at `x`; the second argument is passed through to it.
Objective = Callable[[Array, PyTree], tuple[Array, Array]]


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
    shape, width = start.shape, start.shape[-1]
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

    def step(carry: tuple[Descent, Any]) -> tuple[Descent, Any]:
        found, state = carry
        last = found.last
        x = flat(last.point)
        new, new_state = jax.vmap(update, (0, 0, 0, 0, None))(
            flat(last.gradient), state, x, flat(last.value), inputs
        )
        active = last.status == RUNNING
        new = select(flat(active), new, x)
        state = select(flat(active), new_state, state)
        trial = evaluate(new.reshape(shape), found.passes)
        return advance(found, trial, active, solver.max_steps), state

    most = solver.max_steps if recorded is None else recorded
    found = initial_descent(evaluate(start, jnp.int32(0)), most)
    carry = (found, jax.vmap(optimiser.init)(start.reshape(-1, width)))
    return lax.while_loop(lambda carry: any_running(carry[0]), step, carry)[0]


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
