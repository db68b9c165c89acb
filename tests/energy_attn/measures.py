"""A measure from the arguments of a problem, whose options are in one dictionary."""

from typing import Any

import energy_attn as ea

ENERGY = ("scale", "is_causal", "local_window_size", "implementation", "parallel")


def measure(query: Any, key: Any, value: Any, *, source: Any = None, **options: Any) -> ea.Gibbs:
    """`FreeEnergy(...).at(...)`, tilted by a source if there is one."""
    own = {name: options.pop(name) for name in ENERGY if name in options}
    if isinstance(own.get("implementation"), list):
        own["implementation"] = tuple(own["implementation"])
    found = ea.FreeEnergy(**own).at(query, key, value, **options)
    return found if source is None else found.tilt(source)
