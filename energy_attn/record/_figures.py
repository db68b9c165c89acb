"""The observables that a recording takes of each energy."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from energy_attn.kernels.internal import Operands, holds_keys, received

from ..core._gibbs import Gibbs, PreparedKeys
from ..functional._free_energy import Source, StaticCall
from ..functional._tag import AbstractRecorder
from ..observables._entropy import row_observables

# The fields of an energy report.
FIGURES = ("energy", "entropy", "heat_capacity", "variance", "effective_keys")


class _Fields(NamedTuple):
    names: tuple[str, ...]
    functions: tuple[tuple[str, Callable[[Gibbs], Any]], ...]


class Recorder(_Fields, AbstractRecorder):
    """The figures and methods of given names, and functions of the measure."""

    def observe(self, call: StaticCall, operands: Operands, source: Source) -> dict[str, Any]:
        """The values by name."""
        measure = Gibbs((PreparedKeys(call, operands),))
        if source is not None:
            measure = measure.tilt(jnp.asarray(source))
        figures = figures_of(measure, tuple(x for x in self.names if x in FIGURES))
        found = {x: figures[x] if x in figures else getattr(measure, x)() for x in self.names}
        return found | {name: function(measure) for name, function in self.functions}


def recorder(names: tuple[str, ...], functions: dict[str, Callable[[Gibbs], Any]]) -> Recorder:
    """Raises `TypeError` or `ValueError` for what cannot be asked of a measure."""
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"quantities: wanted names; functions of a Gibbs are keywords; got {received(name)}"
            )
        if name not in FIGURES:
            _check_method(name)
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name}: wanted a function of a Gibbs, got {received(function)}")
    if twice := [x for i, x in enumerate(names) if x in names[:i] or x in functions]:
        raise ValueError(f"quantities: wanted each once, got {twice[0]!r} twice")
    if not names and not functions:
        names = FIGURES
    return Recorder(names, tuple(functions.items()))


def _check_method(name: str) -> None:
    methods = {x: f for x, f in inspect.getmembers(Gibbs, inspect.isfunction) if x[0] != "_"}
    method = methods.get(name)
    if method is None:
        close = difflib.get_close_matches(name.lower(), (*FIGURES, *methods), 1)
        meant = f" (did you mean {close[0]!r}?)" if close else ", as 'score_max'"
        raise ValueError(
            f"quantities: wanted {', '.join(FIGURES)} or a method of Gibbs{meant}, got {name!r}"
        )
    if not _asks_nothing(method):
        raise ValueError(
            f"quantities: wanted a method that needs no arguments, got {name!r}; "
            f"a function gives them: {name}=lambda F: F.{name}(...)"
        )


def _asks_nothing(method: Callable[..., Any]) -> bool:
    """Whether a method needs no arguments."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    given = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(x.default is not x.empty or x.kind in given for x in parameters)


def figures_of(measure: Gibbs, names: tuple[str, ...]) -> dict[str, Array]:
    """Figures of each row by their names, by as few passes as they need."""
    found: dict[str, Array] = {}
    if {"heat_capacity", "variance"} & set(names):
        found = row_observables(*measure._prepared())._asdict()
    elif names:
        found = {"energy": measure()}
        if set(names) - {"energy"}:
            found["entropy"] = measure.entropy()
    if "effective_keys" in names:
        seen = holds_keys(found["energy"])
        found["effective_keys"] = jnp.where(seen, jnp.exp(found["entropy"]), 0.0)
    return {name: found[name] for name in names}
