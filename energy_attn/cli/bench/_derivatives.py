"""Derivatives in a direction, by us and of attention over the whole matrix of weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

import energy_attn

from ._observables import Job


def _along(attend: Job) -> Job:
    """The derivative of attention in a direction of query, key and value: the others of them, in turn."""

    def along(*x: Array) -> Any:
        return jax.jvp(attend, x, (*x[1:], x[0]))[1]

    return along


def _along_query(attend: Job) -> Job:
    def along(query: Array, key: Array, value: Array) -> Any:
        return jax.jvp(lambda query: attend(query, key, value), (query,), (key,))[1]

    return along


def _gradient(attend: Job) -> Job:
    def loss(*x: Array) -> Array:
        return jnp.sin(attend(*x)).sum()

    return jax.grad(loss, argnums=(0, 1, 2))


def _hessian_product(attend: Job) -> Job:
    gradient = _gradient(attend)
    return lambda *x: jax.jvp(gradient, x, (*x[1:], x[0]))[1]


_ours, _dense = energy_attn.attention, jax.nn.dot_product_attention

# The job of each case: ours, and that of `jax.nn`.
DERIVATIVES: dict[str, tuple[Job, Job]] = {
    "jvp": (_along(_ours), _along(_dense)),
    "jvp in the query": (_along_query(_ours), _along_query(_dense)),
    "Hessian-vector product": (_hessian_product(_ours), _hessian_product(_dense)),
}
# What ours is a multiple of: our attention, if not named here.
GRADIENT_OF = {"Hessian-vector product": _gradient(_ours)}
