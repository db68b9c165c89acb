"""Training of a small model: bytes in, next byte out, for a number of steps or a given time."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Float, Int

from ...core._attention import attention
from ...core._progress import progress_of
from ...models import Llama, LlamaConfig
from ...nn._penalty import entropy_penalty, lse_penalty
from ...observables._entropy import entropy

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=448,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    eos_token_id=(0,),  # what parts files
)
WINDOW = 512  # bytes read at once for most of the training
_RATE = 0.02  # of the matrices' orthogonal steps, at its peak
_ADAM_RATE = 0.003  # of the norms and the embedding
_LOW = 1.0  # nats, below which entropies are not to fall
_SEEN = 16  # keys at least, for a row of which this is asked


class Stage(NamedTuple):
    """Until which share of the training pieces of how many bytes are read, and how many at once."""

    until: float
    window: int
    batch: int


# Short pieces are the cheap ones; the last ones make the model look as far as it can.
STAGES = (Stage(0.88, WINDOW, 4), Stage(0.97, 4096, 1), Stage(1.0, 8192, 1))
SHORT = (Stage(1.0, WINDOW, 4),)


class Training(NamedTuple):
    """A trained model, and how it came about; losses in nats a byte, without a penalty."""

    model: Llama
    losses: np.ndarray
    seconds: float


def parameters(model: Any) -> int:
    """The number of weights. Raises nothing."""
    return sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))


def surprise(model: Llama, tokens: Int[Array, "batch read"]) -> Float[Array, "batch time"]:
    r"""$-\log P$ of each byte after those before it, in nats. Raises nothing."""
    logits = model(tokens[:, :-1]).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def _observed(query: Array, *arrays: Array, return_energy: bool, **options: Any) -> Any:
    out, energy = attention(query, *arrays, return_energy=return_energy, **options)
    return out, (energy, entropy(query, *arrays, **options))


def _z_loss(model: Llama, tokens: Array, positions: Array) -> tuple[Array, Array]:
    out: Any = model(tokens, positions, return_energies=True)
    return out.logits, lse_penalty(out.energies)


def _entropy(model: Llama, tokens: Array, positions: Array) -> tuple[Array, Array]:
    out: Any = model(tokens, positions, return_energies=True, attend=_observed)
    row = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, None, :, None]
    return out.logits, entropy_penalty(out.energies[1], where=row >= _SEEN, low=_LOW)


def _none(model: Llama, tokens: Array, positions: Array) -> tuple[Array, Array]:
    return model(tokens, positions).logits, jnp.float32(0)


class Penalty(NamedTuple):
    """What may be added to the loss: how much of it, and what gives the logits and the penalty."""

    strength: float
    read: Callable[[Llama, Array, Array], tuple[Array, Array]]


PENALTIES = {
    "none": Penalty(0.0, _none),
    "z-loss": Penalty(1e-3, _z_loss),
    "entropy": Penalty(0.1, _entropy),
}


class Observed(NamedTuple):
    """A model on some text: its loss, and what attention did, over layers, rows and heads.

    Attributes:
        loss: nats a byte.
        energy: the mean of the energies' sizes, in nats.
        largest_energy: the largest.
        entropy: the mean entropy of the rows, in nats.
    """

    loss: Array
    energy: Array
    largest_energy: Array
    entropy: Array


@jax.jit
def observe(model: Llama, tokens: Int[Array, "batch read"]) -> Observed:
    """What a model does on pieces of text, without a change to it. Raises nothing."""
    out: Any = model(tokens[:, :-1], return_energies=True, attend=_observed)
    loss = optax.softmax_cross_entropy_with_integer_labels(out.logits, tokens[:, 1:])
    energies, entropies = out.energies
    sizes = jnp.abs(energies)
    return Observed(loss.mean(), sizes.mean(), sizes.max(), entropies.mean())


def score(model: Llama, text: np.ndarray) -> tuple[float, float]:
    """The loss on the last `WINDOW` bytes: given at most `WINDOW` bytes each, and given them all.

    `text` has twice `WINDOW` bytes at least. Raises nothing.
    """
    half = WINDOW // 2
    pieces = np.stack([text[-WINDOW - half - 1 : -half], text[-WINDOW - 1 :]])
    losses = jax.jit(surprise)
    near = losses(model, jnp.asarray(pieces, jnp.int32))[:, -half:]
    far = losses(model, jnp.asarray(text[None], jnp.int32))[:, -WINDOW:]
    return float(near.mean()), float(far.mean())


def train(
    text: np.ndarray,
    seed: int,
    steps: int,
    seconds: float = math.inf,
    config: LlamaConfig = CONFIG,
    penalty: str = "none",
    stages: Sequence[Stage] = STAGES,
    after: Callable[[int, Llama], None] = lambda step, model: None,
) -> Training:
    """Trains a model on pieces of `text` for `steps` or `seconds`, whichever end first.

    The positions of a piece jump once by up to as far as the model's context allows, so that the
    rotary embedding meets every distance of a long text at the price of a short piece (PoSE, Zhu et
    al., arXiv 2309.10400). Muon (Jordan et al., 2024) gets farther than AdamW: 1.53 against 1.75
    nats after 400 steps. The learning rate warms up and falls as a cosine of the share that is done:
    of the steps, or of the time, compilation not counted.

    Args:
        text: the bytes, at least one more than the largest piece.
        seed: of weights and batches.
        steps: how many at most.
        seconds: how long at most; at least one step is made.
        config: of the model.
        penalty: what is added to the loss, of `PENALTIES`.
        stages: what is read when; the last one's share ends at 1.
        after: called after each step with its number from 1 and the model, which the next step
            takes for itself.

    Raises `KeyError` for another penalty, and what `after` raises.
    """
    model: Any = Llama(config, key=jax.random.key(seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 50, 1000, 0.02)
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
    strength, read = PENALTIES[penalty]

    def loss(model: Any, tokens: Array, positions: Array) -> tuple[Array, Array]:
        logits, added = read(model, tokens[:, :-1], positions)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean() + strength * added, losses.mean()

    def step(
        model: Any, state: Any, scale: Array, tokens: Array, positions: Array
    ) -> tuple[Any, Any, Array]:
        slope, value = jax.grad(loss, has_aux=True)(model, tokens, positions)
        updates, state = optimiser.update(slope, state, model)
        updates = jax.tree.map(lambda rate, update: scale * rate * update, rates, updates)
        return optax.apply_updates(model, updates), state, value

    rng = np.random.default_rng(seed)

    def batch(stage: Stage) -> tuple[np.ndarray, np.ndarray]:
        size, each = (stage.batch, 1), np.arange(stage.window)
        starts = rng.integers(0, len(text) - stage.window, size)
        tokens = text[starts + np.arange(stage.window + 1)]
        jump = rng.integers(0, max(1, config.max_position_embeddings - stage.window), size)
        jumped = each >= rng.integers(1, stage.window, size)
        return tokens.astype(np.int32), (each + jump * jumped).astype(np.int32)

    state = optimiser.init(model)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    runs = [jitted.lower(model, state, np.float32(0), *batch(x)).compile() for x in stages]
    losses: list[float] = []
    began = time.perf_counter()
    elapsed = done = 0.0
    with progress_of("training", True) as show:
        while done < 1.0:
            run, stage = next(x for x in zip(runs, stages, strict=True) if done < x[1].until)
            scale = np.asarray(schedule(1000.0 * done), np.float32)
            model, state, value = run(model, state, scale, *batch(stage))
            losses.append(float(value))
            after(len(losses), model)
            elapsed = time.perf_counter() - began
            done = max(elapsed / seconds if seconds > 0 else 1.0, len(losses) / steps)
            show(min(done, 1.0), f"loss {np.mean(losses[-20:]):.2f} nats/byte, {elapsed:.0f} s")
    return Training(model, np.array(losses), elapsed)


def _dimensions(model: Any) -> Any:
    """For Muon: which leaves are matrices `(out, in)`; the others are Adam's."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    return jax.tree.map(lambda found: matrix if found else None, _matrices(model))


def _matrices(model: Any) -> Any:
    """Which leaves are matrices of layers: the embedding is none."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.ndim == 2 and path[0].name == "layers", model
    )
