"""Training of the demo's small model: bytes in, next byte out, for a given time."""

import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Float, Int

from .. import attention
from ..models import Llama, LlamaConfig
from ._report import Progress
from ._temper import WINDOW, tempered

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
_BATCH = 4
_RATE = 0.02  # of the matrices' orthogonal steps, at its peak
_ADAM_RATE = 0.003  # of the norms and the embedding
_MAX_STEPS = 2000


class Training(NamedTuple):
    """A trained model, and how it came about; losses in nats a byte."""

    model: Llama
    losses: np.ndarray
    seconds: float
    compile_seconds: float


def parameters(model: Any) -> int:
    """The number of weights. Raises nothing."""
    return sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))


def loss(
    model: Llama, tokens: Int[Array, "batch read"], positions: Int[Array, "batch time"]
) -> Float[Array, ""]:
    r"""$-\log P$ of each byte after those before it, on average, in nats. Raises nothing."""
    logits = model(tokens[:, :-1], positions).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def score(model: Llama, text: np.ndarray) -> tuple[float, float]:
    """The loss on the last `WINDOW` bytes: given at most `WINDOW` bytes each, and given them all.

    `text` has twice `WINDOW` bytes at least. Raises nothing.
    """

    @jax.jit
    def surprise(model: Llama, tokens: Array) -> Array:
        positions = jnp.arange(tokens.shape[1] - 1, dtype=jnp.int32)[None]
        logits = model(tokens[:, :-1], positions, attend=tempered(attention)).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])

    half = WINDOW // 2
    pieces = [text[-WINDOW - half - 1 : -half], text[-WINDOW - 1 :]]
    near = surprise(model, jnp.asarray(np.stack(pieces), jnp.int32))[:, -half:]
    far = surprise(model, jnp.asarray(text[None], jnp.int32))[:, -WINDOW:]
    return float(near.mean()), float(far.mean())


def train(
    text: np.ndarray, context: int, seconds: float, seed: int, config: LlamaConfig = CONFIG
) -> Training:
    """Trains a model on pieces of `text` for `seconds`, compilation not counted.

    A piece is `WINDOW` bytes long, but its positions jump once by up to `context`, so that the
    rotary embedding meets every distance of a long prompt at the price of a short one (PoSE, Zhu et
    al., arXiv 2309.10400). Muon (Jordan et al., 2024) gets farther than AdamW:
    1.53 against 1.75 nats after 400 steps. The learning rate warms up and falls as a cosine of the
    time spent, so that the schedule is whole on a machine of any speed. Raises nothing.
    """
    model: Any = Llama(config, key=jax.random.key(seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 100, 1000, 0.05)
    rates = jax.tree.map(lambda matrix: _RATE if matrix else _ADAM_RATE, _matrices(model))
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            1.0,  # the rates come with each step
            adam_b2=0.95,
            weight_decay=0.1,
            muon_weight_dimension_numbers=_dimensions,
        ),
    )

    def step(
        model: Any, state: Any, scale: Array, tokens: Array, positions: Array
    ) -> tuple[Any, Any, Array]:
        value, slope = jax.value_and_grad(loss)(model, tokens, positions)
        updates, state = optimiser.update(slope, state, model)
        updates = jax.tree.map(lambda rate, update: scale * rate * update, rates, updates)
        return optax.apply_updates(model, updates), state, value

    rng = np.random.default_rng(seed)

    def batch() -> tuple[np.ndarray, np.ndarray]:
        starts = rng.integers(0, len(text) - WINDOW, (_BATCH, 1))
        tokens = text[starts + np.arange(WINDOW + 1)]
        jump = rng.integers(0, max(1, context - WINDOW), (_BATCH, 1))
        jumped = np.arange(WINDOW) >= rng.integers(1, WINDOW, (_BATCH, 1))
        return tokens.astype(np.int32), (np.arange(WINDOW) + jump * jumped).astype(np.int32)

    state = optimiser.init(model)
    began = time.perf_counter()
    run = (
        jax.jit(step, donate_argnums=(0, 1)).lower(model, state, np.float32(0), *batch()).compile()
    )
    compiled = time.perf_counter()
    losses: list[float] = []
    elapsed = done = 0.0
    with Progress("training") as progress:
        while done < 1.0:
            scale = np.asarray(schedule(1000.0 * done), np.float32)
            model, state, value = run(model, state, scale, *batch())
            losses.append(float(value))
            elapsed = time.perf_counter() - compiled
            done = max(elapsed / seconds, len(losses) / _MAX_STEPS) if seconds > 0 else 1.0
            progress.show(done, f"loss {np.mean(losses[-20:]):.2f} nats/byte, {elapsed:.0f} s")
    return Training(model, np.array(losses), elapsed, compiled - began)


def _dimensions(model: Any) -> Any:
    """For Muon: which leaves are matrices `(out, in)`; the others are Adam's."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    return jax.tree.map(lambda found: matrix if found else None, _matrices(model))


def _matrices(model: Any) -> Any:
    """Which leaves are matrices of layers: the embedding is none."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.ndim == 2 and path[0].name == "layers", model
    )
