"""Benchmarks of directional derivatives, compared with dense attention."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

import energy_attn

from .attention import SQUARE, Job, on_arrays
from .runner import JAX_NN, ONE_GRADIENT, ONE_PASS, OURS, Case

_ours, _dense = energy_attn.attention, jax.nn.dot_product_attention


def _along(attend: Job) -> Job:
    """The derivative along a direction of query, key and value, in which each moves along the next."""
    return lambda *x: jax.jvp(attend, x, (*x[1:], x[0]))[1]


def _along_query(attend: Job) -> Job:
    return lambda q, k, v: jax.jvp(lambda query: attend(query, k, v), (q,), (k,))[1]


def _gradient(attend: Job) -> Job:
    return jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), argnums=(0, 1, 2))


def _case(name: str, derive: Callable[[Job], Job], unit: dict[str, Job]) -> Case:
    jobs = {OURS: derive(_ours), JAX_NN: derive(_dense), **unit}
    return Case(name, "float32", SQUARE, on_arrays(jobs))


CASES = (
    _case("jvp", _along, {ONE_PASS: _ours}),
    _case("jvp in the query", _along_query, {ONE_PASS: _ours}),
    _case(
        "Hessian-vector product", lambda x: _along(_gradient(x)), {ONE_GRADIENT: _gradient(_ours)}
    ),
)
