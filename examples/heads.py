"""Measures the heads of a trained decoder: behaviour, cost of removal, and energies.

Each head of the byte model is measured on held-out text and on random bytes that are repeated; then its output is
removed. MiniLM's heads, whose first key is a sink, are measured in examples/minilm/heads.py.

Writes the numbers of docs/heads.md:

    python examples/heads.py --out docs/benchmarks/heads.json
"""

import os
import platform
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import stats

import energy_attn as ea
from energy_attn.cli.demo import byte_llama, held_out_text
from energy_attn.models import Llama

sys.path.insert(0, str(Path(__file__).parent))
from attribution import main, processor
from minilm.heads import all_but_one, by_head
from minilm_energies import SENTENCES, get_model_path, load, plain, tokenize

TEXTS, LENGTH = 24, 512
# Queries of text that are averaged have at least this number of keys before them.
FIRST = 64
# Random texts, and bytes of each half: all printable bytes but the space, in two sets.
RANDOM, HALF = 64, 47
# Where the weight of the first key is averaged over queries.
SPANS = ((64, 128), (128, 256), (256, 512))
SHOWN = 8  # random texts of which each query is written
RESAMPLED = 10_000

FIGURES = ("entropy", "relative_entropy", "energy", "gap", "heat_capacity")
BEHAVIOURS = ("previous", "first", "heaviest", "induction")
COSTS = ("zero on text", "mean on text", "zero on repeats", "mean on repeats")


def pieces() -> Array:
    """Text that the model was not trained on, `[TEXTS, LENGTH + 1]`."""
    text = held_out_text()
    starts = np.linspace(0, len(text) - LENGTH - 1, TEXTS).astype(int)
    return jnp.asarray(np.stack([text[x : x + LENGTH + 1] for x in starts]), jnp.int32)


def random_texts(seed: int = 0) -> dict[str, Array]:
    """Random texts `[RANDOM, 2 HALF]` with the same second halves, by kind of first half.

    The second half has each byte of a random set once. The first half is the same (`repeated`), has the same bytes in
    another order (`shuffled`), or the bytes of the other set (`others`).
    """
    rng = np.random.default_rng(seed)
    texts: dict[str, list[np.ndarray]] = {"repeated": [], "shuffled": [], "others": []}
    for _ in range(RANDOM):
        order = rng.permutation(np.arange(33, 33 + 2 * HALF))
        once, others = order[:HALF], order[HALF:]
        for name, first in zip(texts, (once, rng.permutation(once), others), strict=True):
            texts[name].append(np.concatenate([first, once]))
    return {name: jnp.asarray(np.stack(x), jnp.int32) for name, x in texts.items()}


def figures(F: ea.Gibbs) -> dict[str, Array]:
    """The energies of each row, `[B, T, N]`, and attention `[B, T, N, H]`, for keys that are seen causally."""
    entropy, energy = F.entropy(), F()
    keys = jnp.arange(1, entropy.shape[1] + 1, dtype=entropy.dtype)[:, None]
    return {
        "entropy": entropy,
        "relative_entropy": entropy / jnp.log(jnp.maximum(keys, 2)),
        "energy": energy,
        "gap": energy - F.score_max(),
        "heat_capacity": F.score_moments().variance,
        "out": F.attention(),
    }


def record(model: Llama, tokens: Array) -> dict[str, np.ndarray]:
    """The figures and weights of each layer: `[B, layers, N, T]`, `out` and `weights` with one axis more."""
    _, seen = ea.record(model, figures=figures, weights=lambda F: F.weights())(tokens)
    layers = [x["figures"] | {"weights": x["weights"]} for x in seen.values()]
    return {
        name: np.stack([np.moveaxis(np.asarray(x[name], np.float64), 2, 1) for x in layers], 1)
        for name in layers[0]
    }


def behaviour(weights: np.ndarray) -> dict[str, np.ndarray]:
    """Mean weights `[B, ...]` of the queries from `FIRST` on, given weights `[B, ..., T, S]`.

    `previous`: the key before; `first`: the first key; `heaviest`: of the keys before `FIRST`, which all these queries
    see, the one that has most.
    """
    late = weights[..., FIRST:, :]
    fixed = late[..., :FIRST].mean(-2)
    return {
        "previous": np.diagonal(late, FIRST - 1, -2, -1).mean(-1),
        "first": fixed[..., 0],
        "heaviest": fixed.max(-1),
    }


def matched(weights: np.ndarray) -> np.ndarray:
    """The weight of the key after the same place of the first half, `[..., HALF - 1]`, from `[..., T, S]`."""
    return np.diagonal(weights[..., HALF:-1, 1:HALF], 0, -2, -1)


def log_probabilities(model: Llama, tokens: Array, kept: Array, instead: Array) -> Array:
    """Log-probabilities of the next bytes, `[B, T, vocab]`.

    Heads that are not `kept`, `[layers, N]`, have the output `instead`, `[layers, N, H]`, at every position.
    """
    layers = iter(zip(kept, instead, strict=True))  # attention runs once in each, in their order

    def attend(query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Array]:
        out, energy = ea.attention(query, key, value, **options)
        stays, other = next(layers)
        return jnp.where(stays[:, None], out, other), energy

    return jax.nn.log_softmax(model(tokens, attend=attend).logits)


@eqx.filter_jit
def ablate(model: Llama, tokens: Array, instead: Array) -> tuple[Array, Array, Array]:
    """Losses `[B, T]`; without each head, their rise and the divergence of predictions, both `[layers, N, B, T]`."""
    read, after = tokens[:, :-1], tokens[:, 1:, None]
    everything = jnp.ones(instead.shape[:2], bool)
    whole = log_probabilities(model, read, everything, instead)

    def loss(log_p: Array) -> Array:
        return -jnp.take_along_axis(log_p, after, 2)[..., 0]

    def without(kept: Array) -> tuple[Array, Array]:
        other = log_probabilities(model, read, kept, instead)
        return loss(other) - loss(whole), (jnp.exp(whole) * (whole - other)).sum(-1)

    results = jax.lax.map(without, all_but_one(*everything.shape))
    rise, divergence = (x.reshape(*everything.shape, *read.shape) for x in results)
    return loss(whole), rise, divergence


def matched_without(
    model: Llama, tokens: Array, instead: Array, head: tuple[int, int]
) -> np.ndarray:
    """The weight that one head gives to matches where each head's output is replaced, `[B, layers, N]`."""
    selection = {"rows": slice(HALF, 2 * HALF - 1), "keys": slice(1, HALF)}

    @jax.jit
    def run(kept: Array) -> Array:
        read = ea.record(log_probabilities, weights=lambda F: F.weights(**selection))
        _, recorded = read(model, tokens, kept, instead)
        weights = list(recorded.values())[head[0]]["weights"][:, :, head[1]]
        return jnp.diagonal(weights, axis1=1, axis2=2).mean(-1)

    per_head = [run(kept) for kept in all_but_one(*instead.shape[:2])]
    return np.stack(per_head, 1).reshape(-1, *instead.shape[:2])


def mean_and_error(x: np.ndarray) -> list[Any]:
    """Mean over texts, the first axis, and its standard error."""
    return [x.mean(0), x.std(0, ddof=1) / np.sqrt(len(x))]


def rank_correlation(x: np.ndarray, y: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Spearman's over heads `[layers, N]`, in all and within layers, with p of permutations.

    `interval` is that of 95% over resampled heads.
    """

    def correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = (z - z.mean(-1, keepdims=True) for z in (x, y))
        norm = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
        return (x * y).sum(-1) / np.where(norm > 0, norm, np.inf)

    rng, (a, b) = np.random.default_rng(seed), (stats.rankdata(z) for z in (x, y))
    rho = correlation(a, b)
    drawn = rng.integers(a.size, size=(RESAMPLED, a.size))
    again = correlation(*(stats.rankdata(z.ravel()[drawn], axis=1) for z in (x, y)))
    chance = correlation(rng.permuted(np.tile(a, (RESAMPLED, 1)), axis=1), b)
    centred, other_centred = (stats.rankdata(z, axis=1) - (z.shape[1] + 1) / 2 for z in (x, y))
    inside = correlation(centred.ravel(), other_centred.ravel())
    permuted = rng.permuted(np.tile(centred, (RESAMPLED, 1, 1)), axis=2).reshape(RESAMPLED, -1)

    def p(rho: np.ndarray, chance: np.ndarray) -> float:
        return (1 + (np.abs(chance) >= abs(rho) - 1e-9).sum()) / (1 + RESAMPLED)

    return {
        "rho": rho,
        "interval": np.quantile(again, [0.025, 0.975]),
        "p": p(rho, chance),
        "within_layers": inside,
        "p_within_layers": p(inside, correlation(permuted, other_centred.ravel())),
    }


def separation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The probability that a number of `x` is above one of `y`, `[...]` from `[..., count]`: 1/2 if nothing differs."""
    ranks = stats.rankdata(np.concatenate([x, y], -1), axis=-1)[..., : x.shape[-1]]
    count = x.shape[-1]
    return (ranks.sum(-1) - count * (count + 1) / 2) / (count * y.shape[-1])


def by_position(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman's over the last axis."""
    return np.vectorize(lambda a, b: stats.spearmanr(a, b)[0], signature="(n),(n)->()")(x, y)


def contribution(weights: Any, out: np.ndarray, real: np.ndarray) -> dict[str, np.ndarray]:
    """Root mean square of each head's part of the stream, `[B, layers, N]`, and of its variation over tokens.

    `weights`, of each layer, are those of the output projection; `out` is `[B, layers, N, T, H]`, `real` `[B, T]`.
    """
    weights = np.stack([np.asarray(x, np.float64) for x in weights])
    weights = weights.reshape(*weights.shape[:2], out.shape[2], -1)
    added = np.einsum("ldnh,blnth->blntd", weights, out)
    share = (real / real.sum(1, keepdims=True))[:, None, None, :, None]
    mean = (added * share).sum(3, keepdims=True).mean(0)
    rms = (np.sqrt((x**2 * share).sum(3).mean(-1)) for x in (added, added - mean))
    return dict(zip(("norm", "varying_norm"), rms, strict=True))


def on_text(model: Llama) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Figures of each head on text, `[B, layers, N]`, and summaries for the page."""
    tokens = pieces()
    recorded = record(model, tokens[:, :-1])
    results = behaviour(recorded["weights"])
    results |= {name: recorded[name][..., FIRST:].mean(-1) for name in FIGURES}
    results["spread_of_energy"] = recorded["energy"][..., FIRST:].std(-1)
    weights = [x.self_attn.o_proj.weight for x in model.layers]
    results |= contribution(weights, recorded["out"], np.ones(tokens[:, 1:].shape))
    mean = recorded["out"].mean((0, 3))
    rest: dict[str, Any] = {}
    for name, instead in (("zero", 0 * mean), ("mean", mean)):
        loss, rise, divergence = ablate(model, tokens, jnp.asarray(instead, jnp.float32))
        rise, effect = (np.moveaxis(np.asarray(x, np.float64), 2, 0) for x in (rise, divergence))
        results[f"{name} on text"] = rise.mean(-1)
        rest["loss"] = mean_and_error(np.asarray(loss).mean(-1))
        rest[f"by_position, {name}"] = {
            x: mean_and_error(by_position(recorded[x][..., FIRST:], effect[..., FIRST:]))
            for x in FIGURES[1:]
        }
    first = recorded["weights"][..., 0]
    rest["first_by_span"] = [mean_and_error(first[..., a:b].mean(-1)) for a, b in SPANS]
    rest["uniform_by_span"] = [np.mean(1 / np.arange(a + 1, b + 1)) for a, b in SPANS]
    rest["cost_of_first"] = mean_and_error(-np.log1p(-first[..., FIRST:]).mean(-1))
    return results, rest


def on_random_texts(model: Llama) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Figures of each head on random texts: induction, and energies with and without an earlier occurrence."""
    texts = random_texts()
    recorded = {name: record(model, x) for name, x in texts.items()}
    rows = slice(HALF, 2 * HALF - 1)
    at = {name: {y: x[y][..., rows] for y in FIGURES} for name, x in recorded.items()}
    score = {name: matched(x["weights"]) for name, x in recorded.items()}
    results = {"induction": score["repeated"].mean(-1)}
    mean = recorded["repeated"]["out"].mean((0, 3))
    rest: dict[str, Any] = {"matched_weight": {}, "figures": {}, "separation": {}}
    for name, instead in (("zero", 0 * mean), ("mean", mean)):
        loss, rise, _ = ablate(model, texts["repeated"], jnp.asarray(instead, jnp.float32))
        rise = np.moveaxis(np.asarray(rise, np.float64), 2, 0)
        results[f"{name} on repeats"] = rise[..., HALF:].mean(-1)
        halves = np.asarray(loss)[:, : HALF - 1], np.asarray(loss)[:, HALF:]
        rest["losses_of_halves"] = [mean_and_error(x.mean(-1)) for x in halves]
    for name in texts:
        rest["matched_weight"][name] = mean_and_error(score[name].mean(-1))
        rest["figures"][name] = {y: mean_and_error(x.mean(-1)) for y, x in at[name].items()}
    for name in ("shuffled", "others"):
        rest["separation"][name] = {
            y: mean_and_error(separation(at["repeated"][y], at[name][y])) for y in FIGURES[1:]
        }
    head = np.unravel_index(results["induction"].mean(0).argmax(), mean.shape[:2])
    rest["most_inductive"] = [int(x) for x in head]
    left = matched_without(model, texts["repeated"], jnp.asarray(mean, jnp.float32), head)
    rest["matched_without"] = mean_and_error(left)
    weight, heat = (
        x[:, *head].ravel() for x in (score["repeated"], at["repeated"]["heat_capacity"])
    )
    rest["heat_capacity_by_weight"] = [  # of queries in equal groups
        [weight[x].mean(), *mean_and_error(heat[x])] for x in np.array_split(weight.argsort(), 6)
    ]
    rest["queries"] = {  # of the first texts, for the picture
        name: {y: at[name][y][:SHOWN, *head].ravel() for y in ("entropy", "heat_capacity")}
        | {"matched_weight": score[name][:SHOWN, *head].ravel()}
        for name in ("repeated", "others")
    }
    return results, rest


def measure(model: Llama) -> dict[str, Any]:
    """All numbers of the byte model."""
    text, about_text = on_text(model)
    repeats, about_repeats = on_random_texts(model)
    results = text | repeats
    mean = {name: x.mean(0) for name, x in results.items()}
    names = (*FIGURES[1:], "spread_of_energy", "norm", "varying_norm")
    pairs = {
        x: {y: rank_correlation(mean[x], mean[y]) for y in (*BEHAVIOURS, *COSTS)} for x in names
    }
    dead = {  # no cost that is told from zero, on neither kind of text
        name: np.all([abs(mean[x]) < 2 * mean_and_error(results[x])[1] for x in costs], 0)
        for name, costs in (("zero", COSTS[::2]), ("mean", COSTS[1::2]))
    }
    return plain(
        {
            "heads": {name: mean_and_error(x) for name, x in results.items()},
            "dead": {name: np.argwhere(x) for name, x in dead.items()},
            "rank_correlations": pairs,
            "text": about_text,
            "random": about_repeats,
        },
        decimals=6,
    )


def sentences() -> dict[str, Any]:
    """The numbers of MiniLM."""
    directory = get_model_path()
    model = load(directory)
    results, out, real = by_head(model, tokenize(directory, list(SENTENCES)))
    results |= contribution([x.attention.output_proj.weight for x in model.layers], out, real)
    mean = {name: x.mean(0) for name, x in results.items()}
    names = [x for x in mean if x not in ("zero", "mean")]
    return plain(
        {
            "heads": {name: mean_and_error(x) for name, x in results.items()},
            "rank_correlations": {
                x: {y: rank_correlation(mean[x], mean[y]) for y in ("first", "zero", "mean")}
                for x in names
            },
        },
        decimals=6,
    )


def report() -> dict[str, Any]:
    """All numbers of the page, the machine and the versions."""
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "energy_attn": ea.__version__,
        },
        "settings": {
            **{"texts": TEXTS, "length": LENGTH, "first": FIRST, "random": RANDOM, "half": HALF},
            **{"spans": SPANS, "resampled": RESAMPLED},
        },
        **measure(byte_llama()),
        "minilm": sentences(),
    }


if __name__ == "__main__":
    main(__doc__, report)
