"""Scores, and each one's definition on a dense array `[B, N, T, S]` of products, without the library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from energy_attn import scores
from tests.support.problems import Problem
from tests.support.reference import _positions, visible

HEADS, BATCH = 4, 2
RNG = np.random.default_rng(19)


@dataclasses.dataclass(frozen=True)
class Case:
    """A score `make(parameters)`, and its definition `dense(s, b, h, i, j, parameters)` on arrays that broadcast."""

    make: Callable[..., scores.AbstractScore]
    dense: Callable[..., Any]
    parameters: dict[str, np.ndarray]


class Layer(eqx.Module):
    """Two numbers, an activation that is a leaf, and an array that is not read."""

    weight: Any
    bias: Any
    activation: Callable[..., Any] = jnp.exp
    spare: Any = dataclasses.field(default_factory=lambda: np.ones(3))


class Bumps(scores.AbstractScore):
    """A custom score: a module with a layer inside."""

    layer: Layer

    def __call__(self, score, at):
        distance = (at.query - at.key).astype(score.dtype) / 5
        hidden = jnp.tanh(distance * self.layer.weight)
        return score * self.layer.activation(hidden + self.layer.bias)


def _mixed(score, at, gain, level):
    apart = jnp.abs(at.query - at.key).astype(score.dtype)
    return score * gain[at.head] + level[at.batch] * jnp.sin(score) / (1 + apart)


def _t5(i, j, buckets, most):
    """Bidirectional buckets by T5's formula, in float64."""
    half, far = buckets // 2, np.abs(j - i)
    exact = half // 2
    steps = np.log(np.maximum(far, 1) / exact) / np.log(most / exact) * (half - exact)
    large = np.minimum(exact + steps.astype(int), half - 1)
    return np.where(j > i, half, 0) + np.where(far < exact, far, large)


def _draw(*shape):
    return RNG.standard_normal(shape)


CASES = {
    "soft_cap": Case(
        lambda p: scores.SoftCap(p["cap"]),
        lambda s, b, h, i, j, p: p["cap"] * jnp.tanh(s / p["cap"]),
        {"cap": np.asarray(1.3)},
    ),
    "temperature": Case(
        lambda p: scores.Temperature(p["beta"]),
        lambda s, b, h, i, j, p: p["beta"][h] * s,
        {"beta": np.array([0.5, 1.0, -0.3, 2.0])},
    ),
    "alibi": Case(
        lambda p: scores.ALiBi(p["slopes"]),
        lambda s, b, h, i, j, p: s - p["slopes"][h] * abs(i - j),
        {"slopes": np.array([0.5, 0.1, 0.01, 1.0])},
    ),
    "relative": Case(
        lambda p: scores.RelativeBias(p["table"]),
        lambda s, b, h, i, j, p: s + p["table"][h, np.clip(j - i, -2, 2) + 2],
        {"table": _draw(HEADS, 5)},
    ),
    "t5": Case(
        lambda p: scores.RelativeBias(p["table"], scores.RelativeBias.t5_buckets(8, 6)),
        lambda s, b, h, i, j, p: s + p["table"][h, _t5(i, j, 8, 6)],
        {"table": _draw(HEADS, 8)},
    ),
    "distance": Case(
        lambda p: scores.Distance(lambda d: -jnp.log1p(jnp.abs(d))),
        lambda s, b, h, i, j, p: s - np.log1p(abs(i - j)),
        {},
    ),
    "composed": Case(
        lambda p: scores.Compose(scores.ALiBi(p["slopes"]), scores.SoftCap(p["cap"])),
        lambda s, b, h, i, j, p: p["cap"] * jnp.tanh((s - p["slopes"][h] * abs(i - j)) / p["cap"]),
        {"slopes": np.array([0.5, 0.1, 0.01, 1.0]), "cap": np.asarray(2.0)},
    ),
    "function": Case(
        lambda p: scores.Function(_mixed, p["gain"], p["level"]),
        lambda s, b, h, i, j, p: s * p["gain"][h] + p["level"][b] * jnp.sin(s) / (1 + abs(i - j)),
        {"gain": _draw(HEADS), "level": _draw(BATCH)},
    ),
    "module": Case(
        lambda p: Bumps(Layer(p["weight"], p["bias"])),
        lambda s, b, h, i, j, p: s * jnp.exp(jnp.tanh((i - j) / 5 * p["weight"]) + p["bias"]),
        {"weight": np.asarray(0.7), "bias": np.asarray(-0.2)},
    ),
}


def dense_energy(case, arrays, parameters, *, scale, seen=None, queries=None, keys=None):
    """`(out, energy)` with every array written out; `seen` `[B, N, T, S]` and positions are NumPy's."""
    query, key, value = (arrays[x] for x in ("query", "key", "value"))
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, 2) for x in (key, value))
    raw = scale * jnp.einsum("btnh,bsnh->bnts", query, key)
    batch, heads, query_len, key_len = raw.shape
    queries = np.arange(query_len)[None] if queries is None else queries
    keys = np.arange(key_len)[None] if keys is None else keys
    b, h = np.arange(batch)[:, None, None, None], np.arange(heads)[None, :, None, None]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        s = case.dense(raw, b, h, queries[:, None, :, None], keys[:, None, None, :], parameters)
        s = s + arrays.get("bias", 0)
    if "source" in arrays:
        s = s + jnp.einsum("btnv,bsnv->bnts", arrays["source"], value)
    seen = np.ones(raw.shape, bool) if seen is None else np.broadcast_to(seen, raw.shape)
    some = seen.any(-1)
    s = jnp.where(seen, s, -1e30)
    top = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(s - top), 0)
    total = jnp.where(some, weights.sum(-1), 1)
    energy = jnp.where(some, top[..., 0] + jnp.log(total), -jnp.inf)
    out = jnp.einsum("bnts,bsnv->btnv", weights / total[..., None], value)
    return out, energy.transpose(0, 2, 1)


SINK = np.array([0.7, -1.3, 2.1, 0.2, -0.4, 1.6, 0.9, -2.0])


def sink_of(problem: Problem, batched: bool = False) -> np.ndarray:
    """A sink `[N]`, or `[B, N]`, with another score for each head and row."""
    batch, _, heads, _ = problem.query.shape
    sink = np.resize(SINK, heads)
    return sink - np.arange(batch)[:, None] if batched else sink


def with_key(problem: Problem, sink: np.ndarray, name: str = "sink") -> Problem:
    """The problem with one more key, the sink's, which every present query sees; visibility is an array mask."""
    batch, query_len, heads, _ = problem.query.shape
    present = _positions(problem.query_positions, problem.query_seq_lengths, batch, query_len) >= 0
    columns = batch, heads, query_len, 1
    seen = np.broadcast_to(present[:, None, :, None], columns)
    bias = 0.0 if problem.bias is None else problem.bias
    bias = np.broadcast_to(bias, (*columns[:-1], problem.key.shape[1]))
    own = np.broadcast_to(np.atleast_2d(sink)[:, :, None, None], columns)

    def longer(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros_like(x, shape=(batch, 1, *x.shape[2:]))], 1)

    return Problem(
        f"{problem.name} {name}",
        problem.query,
        longer(problem.key),
        longer(problem.value),
        problem.source,
        np.concatenate([bias, own], -1),
        np.concatenate([visible(problem), seen], -1),
        problem.scale,
    )


def gradient_of(problem: Problem, sink: np.ndarray, gradients: dict) -> dict[str, np.ndarray]:
    """The gradients of the problem's arrays and of the sink, from those of the problem with a key more."""
    found = {}
    for name, array in problem.arrays.items():
        x = gradients[name]
        if name in ("key", "value"):
            x = x[:, :-1]
        if name == "bias":
            x = x[..., :-1]
            axes = tuple(i for i, n in enumerate(array.shape) if n == 1)
            x = x.sum(axes, keepdims=True)
        found[name] = x
    own = gradients["bias"][..., -1].sum(-1)  # [B, N]
    return found | {"sink": own if np.ndim(sink) == 2 else own.sum(0)}
