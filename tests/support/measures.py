"""A measure from the arguments of a problem, whose options are in one dictionary, and what it is asked."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

import energy_attn as ea

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
