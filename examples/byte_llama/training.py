"""The training of a small decoder of bytes."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Float, Int

import energy_attn as ea
from energy_attn.models import Llama, LlamaConfig

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
    eos_token_id=(0,),  # between files
)
# What the benchmark of generation drafts with.
DRAFT = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=192, num_hidden_layers=1)
WINDOW = 512  # bytes read at once for most of the training
_RATE = 0.02  # peak, of Muon for matrices
_ADAM_RATE = 0.003  # peak, of Adam for norms and embedding
_LOW = 1.0  # nats, the bound on entropies
_SEEN = 16  # the bound holds for rows that see more keys than this


class Stage(NamedTuple):
    """A part of the training: it ends at the share `until`, and reads `batch` pieces of `window` bytes."""

    until: float
    window: int
    batch: int


# Short pieces are cheap; the long ones at the end teach the model to use its whole context.
STAGES = (Stage(0.88, WINDOW, 4), Stage(0.97, 4096, 1), Stage(1.0, 8192, 1))
SHORT = (Stage(1.0, WINDOW, 4),)


class Training(NamedTuple):
    """A trained model, the losses of its steps in nats a byte, without the penalty, and the time taken."""

    model: Llama
    losses: np.ndarray
    seconds: float


def surprise(model: Llama, tokens: Int[Array, "batch read"]) -> Float[Array, "batch time"]:
    r"""$-\log P$ of each byte after those before it, in nats."""
    return -model.log_probs(tokens)


def _observed(
    *arrays: Array, is_causal: bool, parallel: Any, return_energy: bool, **rows: Any
) -> tuple[Array, tuple[Array, Array]]:
    del return_energy  # always
    F = ea.FreeEnergy(is_causal=is_causal, parallel=parallel).at(*arrays, **rows)
    out, energy = F.attention(return_energy=True)
    return out, (energy, F.entropy())


def _of_logits(logits: Array, tokens: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def _z_loss(model: Llama, tokens: Array, positions: Array) -> tuple[Array, Array]:
    out: Any = model(tokens[:, :-1], positions, return_energies=True)
    return _of_logits(out.logits, tokens), ea.lse_penalty(out.energies)


def _entropy(model: Llama, tokens: Array, positions: Array) -> tuple[Array, Array]:
    out: Any = model(tokens[:, :-1], positions, return_energies=True, attend=_observed)
    row = jnp.arange(out.logits.shape[1], dtype=jnp.int32)[None, None, :, None]
    added = ea.entropy_penalty(out.energies[1], where=row >= _SEEN, low=_LOW)
    return _of_logits(out.logits, tokens), added


def _none(model: Llama, tokens: Array, positions: Array) -> tuple[Array, Array]:
    p = model.distribution(tokens[:, :-1], positions)
    return ea.softmax_cross_entropy(p.hidden, p.weight, tokens[:, 1:]), jnp.float32(0)


class Penalty(NamedTuple):
    """An addition to the loss: its strength, and the function that returns mean loss and penalty."""

    strength: float
    read: Callable[[Llama, Array, Array], tuple[Array, Array]]


PENALTIES = {
    "none": Penalty(0.0, _none),
    "z-loss": Penalty(1e-3, _z_loss),
    "entropy": Penalty(0.1, _entropy),
}


class Observed(NamedTuple):
    """The loss of a model on some text, and figures of its attention over layers, rows and heads.

    Attributes:
        loss: nats a byte.
        energy: the mean absolute value of the energies, in nats.
        largest_energy: the largest absolute value.
        entropy: the mean entropy of the rows, in nats.
    """

    loss: Array
    energy: Array
    largest_energy: Array
    entropy: Array


@jax.jit
def observe(model: Llama, tokens: Int[Array, "batch read"]) -> Observed:
    """Loss and attention of a model on pieces of text."""
    out: Any = model(tokens[:, :-1], return_energies=True, attend=_observed)
    loss = _of_logits(out.logits, tokens)
    energies, entropies = out.energies
    sizes = jnp.abs(energies)
    return Observed(loss, sizes.mean(), sizes.max(), entropies.mean())


def stored(model: Llama) -> Llama:
    """The weights in bfloat16, rounded to five bits behind the point: as a file they compress to 1.3 MB."""
    return jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 5).astype(jnp.bfloat16), model)


def train(
    text: np.ndarray,
    seed: int,
    steps: int,
    config: LlamaConfig = CONFIG,
    penalty: str = "none",
    stages: Sequence[Stage] = STAGES,
    after: Callable[[int, Llama], None] = lambda step, model: None,
) -> Training:
    """Trains a model on pieces of `text`.

    The positions of a piece jump once, as far as the context of the model allows, so that the rotary
    embedding meets every distance of a long text at the cost of a short piece (PoSE, Zhu et al.,
    arXiv 2309.10400). Muon (Jordan et al., 2024) gets farther than AdamW: 1.53 against 1.75 nats after
    400 steps. The learning rate warms up, and then falls as a cosine of the share of the steps done.

    Args:
        text: the bytes, at least one more than the largest piece.
        seed: of weights and batches.
        steps: their number.
        config: of the model.
        penalty: the addition to the loss, a name in `PENALTIES`.
        stages: of the training, in order; the last one ends at 1.
        after: called after each step with its number, from 1 on, and the model, whose arrays the next
            step donates.

    Raises `KeyError` for another penalty, and what `after` raises.
    """
    model: Any = Llama(config, key=jax.random.key(seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 50, 1000, 0.02)
    rates = jax.tree.map(lambda matrix: _RATE if matrix else _ADAM_RATE, _matrices(model))
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            1.0,  # each step scales its updates by `rates`
            adam_b2=0.95,
            weight_decay=0.1,
            muon_weight_dimension_numbers=_dimensions,
        ),
    )
    strength, read = PENALTIES[penalty]

    def loss(model: Any, tokens: Array, positions: Array) -> tuple[Array, Array]:
        value, added = read(model, tokens, positions)
        return value + strength * added, value

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
    while (done := len(losses) / steps) < 1.0:
        run, stage = next(x for x in zip(runs, stages, strict=True) if done < x[1].until)
        scale = np.asarray(schedule(1000.0 * done), np.float32)
        model, state, value = run(model, state, scale, *batch(stage))
        losses.append(float(value))
        after(len(losses), model)
    return Training(model, np.array(losses), time.perf_counter() - began)


def _dimensions(model: Any) -> Any:
    """For Muon: marks leaves that are matrices `(out, in)`; Adam updates the others."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    return jax.tree.map(lambda found: matrix if found else None, _matrices(model))


def _matrices(model: Any) -> Any:
    """Marks the matrices of layers; the embedding is not one of them."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.ndim == 2 and path[0].name == "layers", model
    )
