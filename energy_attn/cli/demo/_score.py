"""How well a model of bytes predicts a text, with a short context and with a long one."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from ...models import Llama
from ._kernels import kernels

WINDOW = 512  # bytes of the pieces that the library's model has read for most of its training


def parameters(model: PyTree) -> int:
    """The number of weights."""
    return sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))


def surprise(model: Llama, tokens: Int[Array, "batch read"]) -> Float[Array, "batch time"]:
    r"""$-\log P$ of each byte after those before it, in nats."""
    logits = model(tokens[:, :-1]).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


class Score(NamedTuple):
    """The loss on the last `WINDOW` bytes, given at most `WINDOW` bytes each, and given all of them by `kernels`."""

    near: float
    far: float
    kernels: str


def score(model: Llama, text: np.ndarray) -> Score:
    """The losses of a model on the end of a text.

    `text` has at least twice `WINDOW` bytes.
    """
    half = WINDOW // 2
    pieces = np.stack([text[-WINDOW - half - 1 : -half], text[-WINDOW - 1 :]])
    losses = jax.jit(surprise)
    near = losses(model, jnp.asarray(pieces, jnp.int32))[:, -half:]
    whole = losses.trace(model, jnp.asarray(text[None], jnp.int32))
    far = losses(model, jnp.asarray(text[None], jnp.int32))[:, -WINDOW:]
    return Score(float(near.mean()), float(far.mean()), kernels(whole))
