"""All observables by their definitions, the measures that are asked for them, and frequencies of samples."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import energy_attn as ea
from tests.support.problems import Problem
from tests.support.reference import dense, rows, shifted


def directions(problem: Problem) -> list[np.ndarray]:
    shape = (*problem.query.shape[:-1], problem.value.shape[-1])
    rng = problem.rng("directions")
    return [rng.standard_normal(shape) for _ in range(4)]


def exact(problem: Problem, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Those of the observables, energies and attention that are named, or all."""
    out, energy = dense(problem)
    found = {"energy": energy, "attention": out, **exactly(problem)}
    return found if names is None else {name: found[name] for name in names}


def slopes(f: Callable[[Problem], Any], problem: Problem, along: dict) -> Any:
    """The derivatives of a tree of numbers along tangents of the arrays: differences, extrapolated twice.

    `f` is given problems in `np.longdouble`.
    """

    def difference(h):
        ahead, behind = (f(shifted(problem, along, sign * np.longdouble(h))) for sign in (1, -1))
        return jax.tree.map(lambda x, y: (x - y) / (2 * np.longdouble(h)), ahead, behind)

    def combined(coarse, middle, fine):
        first, second = (4 * middle - coarse) / 3, (4 * fine - middle) / 3
        return np.float64((16 * second - first) / 15)

    return jax.tree.map(combined, *(difference(2.0**-n) for n in (7, 8, 9)))


ORDERS = (0, 0.5, 1, 2, 7.5, math.inf)


def renyi(weights: np.ndarray, order: float) -> np.ndarray:
    """Rényi's entropy of weights along the last axis; zero where there are none."""
    seen = weights > 0
    logs = np.log(np.where(seen, weights, 1))
    if order == 1:
        return -(weights * logs).sum(-1)
    if order == math.inf:
        return np.where(seen.any(-1), -logs.max(-1, where=seen, initial=-np.inf), 0)
    powers = np.where(seen, np.exp(order * logs), 0).sum(-1)
    return np.log(np.where(powers > 0, powers, 1)) / (1 - order)


def exactly(problem: Problem, precision=np.float64) -> dict[str, np.ndarray]:
    """All observables by their definitions; zero in fully masked rows."""
    along = [np.asarray(u, precision) for u in directions(problem)]
    r = rows(problem, precision)
    P, v = r.weights, r.value

    def mean(x):
        return np.einsum("bnts,bnts->btn", P, x)

    def centred(x):
        return x - mean(x).transpose(0, 2, 1)[..., None]

    x = [np.einsum("btnv,bsnv->bnts", u, v) for u in along]
    a, b, c, d = (centred(y) for y in x)
    apart = v[:, None] - r.out[:, :, None]
    covariance = np.einsum("bnts,btsnv,btsnw->btnvw", P, apart, apart)
    seen = np.isfinite(r.scores)
    scores = np.where(seen, r.scores, 0)
    score = np.einsum("bnts,bnts->bnt", P, scores)
    off = np.where(seen, scores - score[..., None], 0)
    logs = np.where(P > 0, np.log(np.where(P > 0, P, 1)), 0)
    return {
        "covariance": covariance,
        "product": np.einsum("btnvw,btnw->btnv", covariance, along[0]),
        "cumulant 1": mean(x[0]),
        "cumulant 2": mean(a * b),
        "cumulant 3": mean(a * b * c),
        "cumulant 4": mean(a * b * c * d)
        - mean(a * b) * mean(c * d)
        - mean(a * c) * mean(b * d)
        - mean(a * d) * mean(b * c),
        "moment 2": mean(x[0] * x[1]),
        "moment 3": mean(x[0] * x[1] * x[2]),
        "entropy": -mean(logs),
        "mean score": score.transpose(0, 2, 1),
        "heat capacity": mean(off**2),
        "sensitivity": np.einsum("bnts,bsnv->btnv", P * off, v),
        **{f"Rényi {order}": renyi(P.transpose(0, 2, 1, 3), order) for order in ORDERS},
    }


def distribution(logits, temperature=1.0, top_k=None, top_p=None):
    """The probabilities that one row of logits is drawn with, in float64."""
    logits = np.asarray(logits, np.float64)
    scaled = (logits - logits.max()) / temperature
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    order = [token for token in order[:top_k] if scaled[token] > -np.inf]
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights /= weights.sum()
    if top_p is not None and top_p < 1:
        reached = np.flatnonzero(np.cumsum(weights) >= top_p)
        kept = reached[0] + 1 if len(reached) else len(order)
        order, weights = order[:kept], weights[:kept] / weights[:kept].sum()
    P = np.zeros(len(scaled))
    P[order] = weights
    return P


def statistic(drawn: np.ndarray, weights: np.ndarray) -> float:
    """Pearson's, standardised: of about unit size if `drawn` `[B, T, N, n]` follows `weights` `[B, N, T, S]`.

    Keys that are expected less than five times are counted together.
    """
    weights = weights.transpose(0, 2, 1, 3)
    number, total, freedom, spread = drawn.shape[-1], 0.0, 0.0, 0.0
    for index in np.ndindex(drawn.shape[:-1]):
        P = weights[index]
        if not P.any():
            assert (drawn[index] == -1).all()
            continue
        counts = np.bincount(drawn[index], minlength=P.size)
        assert not counts[P == 0].any(), "a key that is not seen"
        often = P * number >= 5
        groups = [(counts[a], P[a] * number) for a in np.flatnonzero(often)]
        groups.append((counts[~often].sum(), P[~often].sum() * number))
        groups = [(c, e) for c, e in groups if e > 0]
        total += sum((c - e) ** 2 / e for c, e in groups if e >= 1)
        freedom += sum(e >= 1 for _, e in groups) - 1
        spread += 2 * max(sum(e >= 1 for _, e in groups) - 1, 0)
    return (total - freedom) / np.sqrt(spread)


ENERGY = ("scale", "is_causal", "local_window_size", "sink", "implementation", "parallel")


def measure(query: Any, key: Any, value: Any, *, source: Any = None, **options: Any) -> ea.Gibbs:
    """`FreeEnergy(...).at(...)`, tilted by a source if there is one."""
    own = {name: options.pop(name) for name in ENERGY if name in options}
    if isinstance(own.get("implementation"), list):
        own["implementation"] = tuple(own["implementation"])
    found = ea.FreeEnergy(**own).at(query, key, value, **options)
    return found if source is None else found.tilt(source)


def answers(F: ea.Gibbs, along: Sequence[Any]) -> dict[str, Array]:
    """All observables, along four tangents; see `few_answers`."""
    along, scores = list(map(jnp.asarray, along)), F.score_moments()
    return {
        "covariance": F.covariance(),
        "product": F.covariance(along[0]),
        **{f"cumulant {n}": F.cumulant(along[:n]) for n in (1, 2, 3, 4)},
        **{f"moment {n}": F.moment(along[:n]) for n in (2, 3)},
        "entropy": F.entropy(),
        "mean score": scores.mean,
        "heat capacity": scores.variance,
        "sensitivity": F.temperature_sensitivity(),
        **{f"Rényi {order}": F.renyi(order) for order in ORDERS},
    }


def few_answers(F: ea.Gibbs, along: Sequence[Any]) -> dict[str, Array]:
    """One question for each way through a measure: its state, a pullback of it, and a mean over the scores."""
    out, energy = F.attention(return_energy=True)
    return {
        "energy": energy,
        "attention": out,
        "product": F.covariance(jnp.asarray(along[0])),
        "entropy": F.entropy(),
    }
