"""Weights of the documents of a context, whose derivative is what each did for an answer."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float, Int, PyTree

from energy_attn.kernels.internal import additions, checks, jaxprs

from ..flax._nnx import holds_nnx, run_pure
from ._lift import traced
from ._record import Partial, check_callable, check_calls


def weigh(function: Callable[..., Any]) -> Callable[..., Any]:
    r"""A function whose attention weighs the documents of its context, in every layer of any model.

    $$s_{ia} \to s_{ia} + w_{d(a)}$$

    in each [`attention`][energy_attn.attention], [`free_energy`][energy_attn.free_energy] or
    [`FreeEnergy`][energy_attn.FreeEnergy] that runs inside `function`, where $d(a)$ is the document of key $a$. At
    $w = 0$ it is the function itself; $w_d = -\infty$ hides document $d$ from all that follows it. The
    derivative $\partial f / \partial w_d$ is what the document did for $f$, to first order, for all documents in one
    backward pass:

        answer = lambda model, tokens: log_probability_of_the_answer(model(tokens))
        effects = jax.grad(ea.weigh(answer))(jnp.zeros(16), documents, model, tokens)

    Far from first order, as where one document has all the attention or two say the same, the derivative is small
    whatever they did: [`attribute`][energy_attn.attribute] follows a path.

    What it costs: `function` and its backward, and a number for each key in every attention. Where keys lie on many
    devices, so do these numbers.

    Args:
        function: any function or Equinox module, or a method of one, as for [`record`][energy_attn.record]; models of
            Flax's NNX, too. It attends to its whole context at once: a cache has other keys than
            the context.

    Returns:
        A function `(log_weights, segments, *args, **kwargs)` that returns what `function(*args, **kwargs)` does.
        `log_weights` are $w$, floating `[D]` or `[B, D]`, in nats. `segments` are integers `[S]` or `[B, S]`, the
        document of each key; a negative one is that of a key without one, which keeps its scores. For a
        weight of each token, `segments` are `jnp.arange(S)`.

    Raises:
        TypeError: `function` is not callable; when called: `log_weights` is not a floating array, or `segments` not
            an integer one.
        ValueError: when called: shapes that do not match, a segment that is no document, an attention over another
            number of keys, or no attention in `function`.
        NotImplementedError: when called: an attention inside a `jax.custom_jvp` or `jax.custom_vjp` of the user's.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 6, 2, 4))
        >>> answer = lambda v: ea.attention(q, k, v)[-1].sum()
        >>> documents = jnp.array([0, 0, 1, 1, -1, -1])
        >>> effects = jax.grad(ea.weigh(answer))(jnp.zeros(2), documents, v)
        >>> without = ea.weigh(answer)(jnp.array([0.0, -jnp.inf]), documents, v)  # the second document
        >>> effects.shape, without.shape
        ((2,), ())
    """
    check_callable(function)
    return Partial(weighed, (operator.call, function))


def weighed(
    ask: Callable[[Callable[[Array], Any], Array], Any],
    function: Callable[..., Any],
    /,
    log_weights: Float[Array | np.ndarray, "*B documents"],
    segments: Int[Array | np.ndarray, "*rows S"],
    *args: PyTree,
    **kwargs: PyTree,
) -> PyTree:
    """`ask(value, log_weights)`, where `value` is the function of the weights."""
    weights, numbers = _checked(log_weights, segments)
    run = functools.partial(_run, ask, weights, numbers)
    if holds_nnx((function, args, kwargs)):
        return run_pure(lambda *x, **y: (run(*x, **y), None), function, args, kwargs)[0]
    return run(function, *args, **kwargs)


def _checked(log_weights: object, segments: object) -> tuple[Array, Array]:
    weights = jnp.asarray(checks.check_floating("log_weights", log_weights))
    numbers = checks.check_integral("segments", segments)
    if weights.ndim not in (1, 2):
        raise ValueError(
            f"log_weights: wanted shape (documents,) or (batch, documents), got {checks.received(log_weights)}"
        )
    if numbers.ndim not in (1, 2) or (
        weights.ndim == numbers.ndim == 2 and len(weights) != len(numbers)
    ):
        raise ValueError(
            f"segments: wanted shape (keys,) or (batch, keys) beside log_weights {weights.shape}, "
            f"got {checks.received(segments)}"
        )
    if not isinstance(numbers, jax.core.Tracer):
        last = int(np.max(np.asarray(numbers), initial=-1))
        if last >= weights.shape[-1]:
            raise ValueError(f"segments: wanted documents below {weights.shape[-1]}, got {last}")
    return weights, jnp.asarray(numbers)


@eqx.filter_jit
def _run(
    ask: Callable[[Callable[[Array], Any], Array], Any],
    weights: Array,
    numbers: Array,
    function: Callable[..., Any],
    /,
    *args: PyTree,
    **kwargs: PyTree,
) -> PyTree:
    def run(weights: Array) -> PyTree:
        active = additions.TokenScores(_scores_of(weights, numbers))
        with additions.active_token_scores((*additions.active_token_scores.value, active)):
            out = function(*args, **kwargs)
        check_calls(function, active.used)
        return out

    program, rebuild = traced(run, weights)
    _check_rules(program)
    return ask(lambda weights: rebuild(jaxpr_as_fun(program)(weights)), weights)


def _check_rules(program: ClosedJaxpr) -> None:
    """Raises `NotImplementedError` for an attention inside a function whose own rule would not see the weights."""
    for equation in jaxprs.equations(program):
        kind = equation.primitive.name
        inside = (x for inner in jaxprs.programs(equation) for x in jaxprs.equations(inner))
        if kind.startswith(("custom_jvp", "custom_vjp")) and any(
            x.params.get("name") == additions.TOKEN_SCORES for x in inside
        ):
            raise NotImplementedError(
                "function: wanted attention outside of functions with a derivative of their own, which would "
                f"lose that in log_weights, got one inside a {kind}"
            )


def _scores_of(weights: Array, numbers: Array) -> Array:
    """The weight of each key's document, `[B or 1, S]`; zero without one, NaN for a number that is none."""
    weights, numbers = (x if x.ndim == 2 else x[None] for x in (weights, numbers))
    options = {"mode": "fill", "fill_value": jnp.nan}
    taken = jnp.take_along_axis(weights, jnp.maximum(numbers, 0), 1, **options)
    return jnp.where(numbers < 0, 0.0, taken)
