"""All observables by their definitions, over every row's whole distribution."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

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
    }
