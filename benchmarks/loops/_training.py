"""Gradients of a small GPT, and of its loss after a step: a `lax.scan` over layers, each under `jax.checkpoint`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

import energy_attn

from ..runner import JAX_NN, ONE_GRADIENT, OURS, PYTORCH, Output, Run, Sides, torch

TOKENS = 256  # of the vocabulary

Parameters = dict[str, Float[Array, "layers rows columns"]]
Attend = Callable[..., Array]  # of query, key and value
Loss = Callable[[Parameters, Array], Array]  # of tokens


def draw(dtype: str, layers: int, T: int, width: int) -> Parameters:
    """Random weights of the model."""
    shapes = {
        "embedding": (1, TOKENS, width),
        "position": (1, T, width),
        "project": (layers, width, 3 * width),
        "join": (layers, width, width),
        "widen": (layers, width, 4 * width),
        "narrow": (layers, 4 * width, width),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape, dtype) * shape[1] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def tokens(B: int, T: int) -> Array:
    """Random tokens, one more than are read: each is predicted from those before it."""
    return jax.random.randint(jax.random.key(1), (B, T + 1), 0, TOKENS, jnp.int32)


def _normalised(x: Array) -> Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def mean_loss(attend: Attend, heads: int) -> Loss:
    """The mean next-token cross-entropy."""

    @jax.checkpoint
    def layer(x: Array, weights: Parameters) -> tuple[Array, None]:
        projected = jnp.split(_normalised(x) @ weights["project"], 3, axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], heads, -1) for y in projected)
        x = x + attend(q, k, v, is_causal=True).reshape(x.shape) @ weights["join"]
        return x + jax.nn.gelu(_normalised(x) @ weights["widen"]) @ weights["narrow"], None

    def loss(parameters: Parameters, tokens: Array) -> Array:
        stacked = dict(parameters)
        embedding, position = (stacked.pop(name)[0] for name in ("embedding", "position"))
        x, _ = lax.scan(layer, embedding[tokens[:, :-1]] + position, stacked)
        logits = jax.nn.log_softmax(_normalised(x) @ embedding.T)
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()

    return loss


def after_a_step(loss: Loss) -> Loss:
    """The loss with the parameters that a step of gradient descent leads to."""

    def outer(parameters: Parameters, tokens: Array) -> Array:
        slope = jax.grad(loss)(parameters, tokens)
        return loss(jax.tree.map(lambda x, y: x - 0.1 * y, parameters, slope), tokens)

    return outer


def curvature(loss: Loss) -> Callable[[Parameters, Array], Parameters]:
    """The Hessian times the parameters, forward over reverse."""

    def product(parameters: Parameters, tokens: Array) -> Parameters:
        gradient = functools.partial(jax.grad(loss), tokens=tokens)
        return jax.jvp(gradient, (parameters,), (parameters,))[1]

    return product


def _torch(parameters: Parameters, tokens: Array, heads: int) -> Run:
    functional = torch().nn.functional
    weights = {name: torch().from_dlpack(x).clone() for name, x in parameters.items()}
    index = torch().from_dlpack(tokens).long()

    def normalised(x: Any) -> Any:
        return x * torch().rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)

    def layer(x: Any, project: Any, join: Any, widen: Any, narrow: Any) -> Any:
        projected = (normalised(x) @ project).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in projected)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2) @ join
        return x + functional.gelu(normalised(x) @ widen, approximate="tanh") @ narrow

    def run() -> list[Any]:
        leaves = {name: x.detach().requires_grad_() for name, x in weights.items()}
        embedding, position, *stacked = leaves.values()
        x = embedding[0][index[:, :-1]] + position[0]
        for each in zip(*stacked, strict=True):
            x = torch().utils.checkpoint.checkpoint(layer, x, *each, use_reentrant=False)
        logits = normalised(x) @ embedding[0].T
        functional.cross_entropy(logits.flatten(0, 1), index[:, 1:].flatten()).backward()
        # the order of axes in which results of PyTorch are read; the names' in that of JAX's trees
        return [leaves[name].grad.transpose(1, 2) for name in sorted(leaves)]

    return run


def sides(dtype: str, layers: int, B: int, T: int, N: int, width: int) -> Sides:
    """Ours by default and by `blockwise`, and the peers."""
    parameters = draw(dtype, layers, T, width)
    inputs = tokens(B, T)
    attentions: dict[str, Attend] = {
        OURS: energy_attn.attention,
        "our blockwise": functools.partial(energy_attn.attention, implementation="blockwise"),
        JAX_NN: jax.nn.dot_product_attention,
    }
    return {
        **{
            name: functools.partial(
                functools.partial, jax.jit(jax.grad(mean_loss(attend, N))), parameters, inputs
            )
            for name, attend in attentions.items()
        },
        PYTORCH: lambda: _torch(parameters, inputs, N),
    }


def second_order_sides(
    dtype: str, layers: int, B: int, T: int, N: int, width: int, forward: bool
) -> Sides:
    """A step's Hessian-vector product (`forward`), or its gradient through an inner step; and our gradient."""
    ours, dense = (mean_loss(x, N) for x in (energy_attn.attention, jax.nn.dot_product_attention))
    args = draw(dtype, layers, T, width), tokens(B, T)

    def run(job: Callable[..., Any]) -> Run:
        compiled = jax.jit(job).lower(*args).compile()
        memory: Any = compiled.memory_analysis()
        figures = {"temporary_MiB": memory.temp_size_in_bytes >> 20}
        return lambda: Output(compiled(*args), figures)

    def second(loss: Loss) -> Callable[..., Any]:
        return curvature(loss) if forward else jax.grad(after_a_step(loss))

    jobs = {OURS: second(ours), JAX_NN: second(dense), ONE_GRADIENT: jax.grad(ours)}
    return {name: functools.partial(run, job) for name, job in jobs.items()}
