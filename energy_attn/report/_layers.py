"""The rows of attention that run in a function, by layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..record._figures import recorder
from ..record._lift import Seen
from ..record._record import names_of, run_recorded


class Rows(NamedTuple):
    """The figures of each row from which the others in a report follow, `[layers, ..., N]`."""

    energy: Array
    entropy: Array
    heat_capacity: Array
    variance: Array


class Layers(NamedTuple):
    """The figures of one call in a function: of one layer, or of one for each step of the loops around it."""

    rows: Rows
    names: tuple[str, ...]


def layers_of(function: Callable[..., Any], *inputs: Any, **options: Any) -> list[Layers]:
    """The layers of a function, in the order of its calls. Raises as `record` and its result do."""
    _, seen = run_recorded(recorder(Rows._fields, {}), function, *inputs, **options)
    return [_layers(name, x) for name, x in zip(names_of(seen), seen, strict=True)]


def _layers(name: str, seen: Seen) -> Layers:
    steps = [i for i, axis in enumerate(seen.axes) if axis == "scan"]
    figures = [jnp.moveaxis(x, steps, range(len(steps))) for x in Rows(**seen.values)]
    shape = figures[0].shape[: len(steps)]
    rows = (x.reshape(-1, *x.shape[len(steps) :]) for x in figures)
    return Layers(Rows(*rows), tuple(f"{name}{list(i) if i else ''}" for i in np.ndindex(*shape)))
