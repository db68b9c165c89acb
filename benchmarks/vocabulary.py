"""Training steps with losses over a vocabulary, compared with losses of dense logits."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import energy_attn

from .runner import OURS, Case, Output, Run, Sides

OPTAX, LOG_SOFTMAX = "optax", "jax.nn.log_softmax"

Layer = tuple[Array, Array]  # hidden states and an output matrix
Loss = Callable[[Layer, Layer], Array]  # of the model's layer and a reference model's
Parameters = dict[str, Float[Array, "rows columns"]]


def _run(loss: Loss, parameters: Parameters, tokens: Array) -> Run:
    matrix = 0.9 * parameters["embedding"]

    @jax.jit
    def step(parameters: Parameters, reference: Layer) -> tuple[Array, Parameters]:
        def value(parameters: Parameters) -> Array:
            x = parameters["embedding"][tokens]
            x = x + jax.nn.gelu(x @ parameters["widen"]) @ parameters["narrow"]
            return loss((x, parameters["embedding"]), reference)

        number, slope = jax.value_and_grad(value)(parameters)
        return number, jax.tree.map(lambda x, y: x - 0.1 * y, parameters, slope)

    args = parameters, (matrix[tokens], matrix)
    memory: Any = step.lower(*args).compile().memory_analysis()
    figures = {"temporary_MiB": memory.temp_size_in_bytes >> 20}
    return lambda: Output(step(*args), figures)


def _model(dtype: str, T: int, V: int, D: int) -> tuple[Parameters, Array]:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    shapes = {"embedding": (V, D), "widen": (D, 4 * D), "narrow": (4 * D, D)}
    parameters = {
        name: jax.random.normal(next(keys), x, dtype) * x[-1] ** -0.5 for name, x in shapes.items()
    }
    return parameters, jax.random.randint(next(keys), (T,), 0, V)


def _cross_entropy(dtype: str, T: int, V: int, D: int) -> Sides:
    parameters, tokens = _model(dtype, T, V, D)
    labels = jnp.roll(tokens, -1)

    def dense(layer: Layer, _: Layer) -> Array:
        hidden, weight = layer
        logits = jnp.einsum("td,vd->tv", hidden, weight, preferred_element_type=jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def ours(layer: Layer, _: Layer) -> Array:
        return energy_attn.softmax_cross_entropy(*layer, labels)

    losses = {OURS: ours, OPTAX: dense}
    return {x: functools.partial(_run, loss, parameters, tokens) for x, loss in losses.items()}


def _divergence(dtype: str, T: int, V: int, D: int) -> Sides:
    """The divergence from a reference model, and the entropy."""
    parameters, tokens = _model(dtype, T, V, D)

    def dense(layer: Layer, reference: Layer) -> Array:
        p, q = (jax.nn.log_softmax(x @ w.T) for x, w in (layer, reference))
        share = jnp.exp(p)
        return ((share * (p - q)).sum(-1) + 0.01 * (share * p).sum(-1)).mean()

    def each(p: energy_attn.Categorical, q: energy_attn.Categorical) -> Array:
        return p.kl_divergence(q) - 0.01 * p.entropy()

    def ours(layer: Layer, reference: Layer) -> Array:
        p, q = (energy_attn.Categorical(*x) for x in (layer, reference))
        return energy_attn.sum_over_tokens(each, p, q) / T

    losses = {OURS: ours, LOG_SOFTMAX: dense}
    return {x: functools.partial(_run, loss, parameters, tokens) for x, loss in losses.items()}


CASES = tuple(
    Case(name, dtype, {"T": T, "V": V, "D": D}, sides, long="TV")
    for name, sides, dtypes in (
        ("cross-entropy", _cross_entropy, ("float32", "bfloat16")),
        ("divergence and entropy", _divergence, ("float32",)),
    )
    for dtype in dtypes
    for T, V, D in (
        (512, 32_000, 1024),
        (512, 151_936, 256),
        (4096, 32_000, 256),
        (4096, 151_936, 256),
    )
)
