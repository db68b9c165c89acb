"""A problem for conjugates and modes, and how near a solution must come."""

import jax.numpy as jnp
import numpy as np

import energy_attn as ea
from tests.support.problems import Problem
from tests.support.reference import rows, visible

CONVERGED, OUTSIDE, NO_KEYS = ea.Result.converged, ea.Result.outside_hull, ea.Result.no_keys
INVERSE_TEMPERATURES = (0.25, 1.0, 4.0, 16.0, 64.0)


def make_problem() -> Problem:
    """Causal, with grouped heads and a bias; row 3 of the first batch is fully masked."""
    rng = np.random.default_rng(5)
    mask = np.ones((2, 1, 5, 9), bool)
    mask[0, :, 3] = False
    return Problem(
        "bayes",
        *(rng.standard_normal(s) for s in ((2, 5, 4, 3), (2, 9, 2, 3), (2, 9, 2, 2))),
        bias=rng.standard_normal((1, 4, 1, 9)),
        mask=mask,
        query_positions=np.arange(0, 10, 2, dtype=np.int32)[None].repeat(2, 0),
        key_positions=np.arange(9, dtype=np.int32)[None].repeat(2, 0),
        is_causal=True,
    )


PROBLEM = make_problem()


def points_inside(problem: Problem, seed=0) -> np.ndarray:
    """A mean of the values that each row sees, with weights drawn evenly from all weights."""
    weights = np.random.default_rng(seed).exponential(size=visible(problem).shape)
    weights = weights * visible(problem)
    total = weights.sum(-1, keepdims=True)
    weights /= np.where(total > 0, total, 1)
    return np.einsum("bnts,bsnv->btnv", weights, rows(problem).value)


POINT = points_inside(PROBLEM)
SEEN = visible(PROBLEM).any(-1).transpose(0, 2, 1)


def random_keys(dtype, seeds=50, keys=64, width=8):
    """Standard normal query, keys, values for each seed, one row each; and the generators for more."""
    generators = [np.random.default_rng(seed) for seed in range(seeds)]
    query, key, value = (
        np.stack([rng.standard_normal((n, 1, width)) for rng in generators])
        for n in (1, keys, keys)
    )
    return (*(jnp.asarray(x, dtype) for x in (query, key, value)), generators)


# Those rows of POINT that a whole neighbourhood of the hull surrounds: three keys or more, in two dimensions.
SOLID = (visible(PROBLEM).sum(-1) > 2).transpose(0, 2, 1)


def kl(p, q):
    """Relative entropy along the last axis; `q` is positive where `p` is."""
    some = p > 0
    ratio = np.where(some, p, 1) / np.where(some, q, 1)
    return (p * np.log(ratio)).sum(-1)
