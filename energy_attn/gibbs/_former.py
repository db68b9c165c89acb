"""The functions that became methods of `Gibbs`, until all callers ask the measure itself."""

from typing import Any

from ._free_energy import measure_of
from ._gibbs import Gibbs


def _measure(query: Any, key: Any, value: Any, source: Any, options: dict[str, Any]) -> Gibbs:
    if isinstance(options.get("implementation"), list):
        options["implementation"] = tuple(options["implementation"])
    found = measure_of(query, key, value, **options)
    return found if source is None else found.tilt(source)


def covariance(
    query: Any, key: Any, value: Any, *, tangent: Any = None, source: Any = None, **options: Any
) -> Any:
    """See `Gibbs`."""
    return _measure(query, key, value, source, options).covariance(tangent)


def cumulant(
    query: Any, key: Any, value: Any, *, tangents: Any, source: Any = None, **options: Any
) -> Any:
    """See `Gibbs`."""
    return _measure(query, key, value, source, options).cumulant(tangents)


def moment(
    query: Any, key: Any, value: Any, *, tangents: Any, source: Any = None, **options: Any
) -> Any:
    """See `Gibbs`."""
    return _measure(query, key, value, source, options).moment(tangents)


def entropy(query: Any, key: Any, value: Any, *, source: Any = None, **options: Any) -> Any:
    """See `Gibbs`."""
    return _measure(query, key, value, source, options).entropy()


def score_moments(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """See `Gibbs`."""
    return _measure(query, key, value, None, options).score_moments()


def temperature_sensitivity(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """See `Gibbs`."""
    return _measure(query, key, value, None, options).temperature_sensitivity()


def sample_keys(
    query: Any,
    key: Any,
    value: Any,
    *,
    rng: Any,
    num_samples: int = 1,
    source: Any = None,
    **options: Any,
) -> Any:
    """See `Gibbs`."""
    return _measure(query, key, value, source, options).sample(key=rng, count=num_samples)
