"""Records the energies of a model that runs, named by their places in it."""

import collections
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from energy_attn.kernels import Operands
from energy_attn.kernels.internal import checks, holds_keys

from ..core._gibbs import Gibbs, PreparedKeys
from ..core._module import FreeEnergy, with_name
from ..flax._nnx import holds_nnx, is_pure, run_pure
from ..functional._free_energy import Source, StaticCall
from ..functional._tag import AbstractRecorder, recorders
from ..observables._entropy import row_observables
from ._lift import Recorded, RecordLevel, lift, traced

# How Equinox's methods and transformed modules hold the module, in paths.
_WRAPPER = re.compile(r"^(\.__self__|\._fun)*\.?")

# The fields of an energy report.
FIGURES = "energy", "entropy", "heat_capacity", "variance", "effective_keys"

Recording = collections.OrderedDict[str, dict[str, PyTree[Array]]]


def record(
    function: Callable[..., Any], *quantities: str, **functions: Callable[[Gibbs], PyTree[Array]]
) -> Callable[..., tuple[Any, Recording]]:
    r"""Transforms a function into one that also returns figures of each free energy that runs inside it.

    $$f(x) \quad\to\quad \bigl(f(x),\; (F_i, H_i, \dots)_i\bigr)$$

    for each call $i$, in order, of a [`FreeEnergy`][energy_attn.FreeEnergy] (a call, `attention` or
    `at`), of a [`MultiheadAttention`][energy_attn.nn.MultiheadAttention], of
    [`attention`][energy_attn.attention] or of [`free_energy`][energy_attn.free_energy] inside `function`.

        out, seen = ea.record(model)(x)
        out, seen = jax.vmap(ea.record(model, "entropy"))(batch)

    It is a transformation of functions like `jax.grad`: pure, differentiable in both modes (a penalty on
    the figures trains the model), and composable with `jax.jit`, `vmap`, `grad` and
    `jax.shard_map`. Calls inside of these transformations are recorded, too:

    - `jit`, `jax.checkpoint` and a mesh do not change the values;
    - `jax.vmap` inside `function` adds its axis in front of the values, `lax.scan` an axis of steps;
    - `jax.shard_map` adds an axis in front, with an entry for each device along its axes;
    - branches of `lax.cond` that are not taken have values of NaN (under `vmap` with a mapped
      condition, JAX runs all branches, and all are recorded);
    - inside a `jax.custom_jvp` or `jax.custom_vjp`, the values have the derivative of the function itself;
    - of `jax.grad` inside `function`, the forward pass is recorded;
    - a loop of unknown length (`lax.while_loop`) raises.

    Under `jit`, energies come from the same pass as attention; other figures, and the gradients of figures, take
    passes of their own.

    Args:
        function: any function or Equinox module, or a method of one. It is compiled as by
            `equinox.filter_jit`.
        *quantities: names of figures: `"energy"`, `"entropy"`, `"heat_capacity"`,
            `"variance"`, `"effective_keys"`, as in an [`energy_report`][energy_attn.energy_report], or of
            methods of [`Gibbs`][energy_attn.Gibbs] that need no arguments, as `"score_max"`. Without
            quantities and functions: the five figures.
        **functions: functions of the call's `Gibbs` that return arrays, by name. The measure of a call at a source
            is tilted by the source.

    Returns:
        A function with the arguments of `function` that returns `(out, seen)`. `seen` is an ordered
        dictionary, by the name of each call, of dictionaries by quantity. Figures have the shape
        `[*axes, T, N]` (`[*axes, B, T, N]` if the call has a batch) and are float32, or float64. Names are

        - the path of the `FreeEnergy` in `function`, if that is a module, as `layers[0].attention.energy`;
        - else, for one that is an argument, closed over or made on the way, its own `name`, or
          `FreeEnergy`, `attention` or `free_energy`, behind its layer in a decoder of
          [`models`][energy_attn.models.AbstractDecoder]: `layers[0].attention`;
        - with `#2`, `#3` and so on for the later calls under one name.

    Raises:
        TypeError: `function` is not callable, or a quantity not a name or function.
        ValueError: an unknown quantity; when called: no free energy runs.
        NotImplementedError: when called: a free energy runs inside a `lax.while_loop`, or inside a
            primitive whose function JAX does not describe.

    Source: `oryx.core.harvest` (sow and reap), for the transformation.

    Examples:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> class Block(eqx.Module):
        ...     attention: ea.nn.MultiheadAttention
        ...     def __call__(self, x):
        ...         return x + self.attention(x, x, x)
        >>> keys = jax.random.split(jax.random.key(0), 2)
        >>> model = eqx.nn.Sequential([
        ...     eqx.nn.Lambda(Block(ea.nn.MultiheadAttention(4, 16, key=key))) for key in keys
        ... ])
        >>> x = jax.random.normal(jax.random.key(1), (7, 16))
        >>> out, seen = ea.record(model, "entropy", mean=lambda F: F.attention())(x)
        >>> list(seen)
        ['layers[0].fn.attention.energy', 'layers[1].fn.attention.energy']
        >>> seen["layers[0].fn.attention.energy"]["entropy"].shape
        (7, 4)
    """
    check_callable(function)
    return Partial(_recorded, (recorder(quantities, functions), function))


class _RecorderFields(NamedTuple):
    names: tuple[str, ...]
    functions: tuple[tuple[str, Callable[[Gibbs], Any]], ...]


class Recorder(_RecorderFields, AbstractRecorder):
    """Records figures and methods by name, and functions of the measure; arrays of the functions are leaves."""

    def observe(self, call: StaticCall, operands: Operands, source: Source) -> dict[str, Any]:
        measure = Gibbs((PreparedKeys(call, operands),))
        if source is not None:
            measure = measure.tilt(jnp.asarray(source))
        figures = _figures_of(measure, tuple(x for x in self.names if x in FIGURES))
        result = {x: figures[x] if x in figures else getattr(measure, x)() for x in self.names}
        return result | {name: function(measure) for name, function in self.functions}


class Partial(eqx.Module):
    """A function with its first arguments; unlike `equinox.Partial`, hashable if they are."""

    run: Callable[..., Any] = eqx.field(static=True)
    first: tuple[Any, ...]

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """`run(*first, *args, **kwargs)`."""
        return self.run(*self.first, *args, **kwargs)


def check_callable(function: object) -> None:
    if not callable(function):
        raise TypeError(f"function: wanted a function or a module, got {checks.received(function)}")


def check_calls(function: object, calls: bool) -> None:
    if not calls:
        got = "one with modules of NNX" if is_pure(function) else checks.received(function)
        raise ValueError(
            "function: wanted one that calls a FreeEnergy, as a model does after replace_attention(model), "
            f"got {got}, which calls none"
        )


def _recorded(
    active: Recorder, function: Any, /, *args: Any, **kwargs: Any
) -> tuple[Any, Recording]:
    out, recorded = run_recorded(active, function, *args, **kwargs)
    return out, collections.OrderedDict(
        (name, x.values) for name, x in zip(names_of(recorded), recorded, strict=True)
    )


def run_recorded(
    active: Recorder, function: Any, /, *args: Any, **kwargs: Any
) -> tuple[Any, list[Recorded]]:
    """The result of a function, and the values that were recorded."""
    run = functools.partial(_run, active)
    if holds_nnx((function, args, kwargs)):
        return run_pure(run, function, args, kwargs)
    return run(function, *args, **kwargs)


@eqx.filter_jit
def _run(
    active: Recorder, function: Any, /, *args: Any, **kwargs: Any
) -> tuple[Any, list[Recorded]]:
    function = _named(function)
    with recorders((*recorders.value, active)):
        program, rebuild = traced(lambda: function(*args, **kwargs))
    outputs, recorded = lift(program, (), RecordLevel(len(recorders.value)))
    check_calls(function, bool(recorded))
    return rebuild(outputs), recorded


def names_of(recorded: Sequence[Recorded]) -> list[str]:
    """A name for each call: the name of its energy, numbered from the second call on."""
    count: collections.Counter[str] = collections.Counter()
    names = []
    for x in recorded:
        count[x.name] += 1
        names.append(x.name if count[x.name] == 1 else f"{x.name}#{count[x.name]}")
    return names


def _named(function: Any) -> Any:
    """Names each energy in a function after its path, unless it has a name."""

    def named(path: Any, x: Any) -> Any:
        if not isinstance(x, FreeEnergy) or x.name is not None:
            return x
        where = _WRAPPER.sub("", jax.tree_util.keystr(path))
        return with_name(x, where or None)

    return jax.tree_util.tree_map_with_path(
        named, function, is_leaf=lambda x: isinstance(x, FreeEnergy)
    )


def recorder(names: tuple[str, ...], functions: dict[str, Callable[[Gibbs], Any]]) -> Recorder:
    """The recorder of checked quantities and functions; by default of the five figures."""
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"quantities: wanted names; functions of a Gibbs are keywords; got {checks.received(name)}"
            )
        if name not in FIGURES:
            _check_method(name)
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(
                f"{name}: wanted a function of a Gibbs, got {checks.received(function)}"
            )
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
    parameters = list(inspect.signature(method).parameters.values())[1:]
    starred = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    if any(x.default is x.empty and x.kind not in starred for x in parameters):
        raise ValueError(
            f"quantities: wanted a method that needs no arguments, got {name!r}; "
            f"a function gives them: {name}=lambda F: F.{name}(...)"
        )


def _figures_of(measure: Gibbs, names: tuple[str, ...]) -> dict[str, Array]:
    """Figures of each row by their names, by as few passes as they need."""
    result: dict[str, Array] = {}
    if {"heat_capacity", "variance"} & set(names):
        result = row_observables(*measure._prepared())._asdict()
    elif names:
        result = {"energy": measure()}
        if set(names) - {"energy"}:
            result["entropy"] = measure.entropy()
    if "effective_keys" in names:
        result["effective_keys"] = effective_keys(result["energy"], result["entropy"])
    return {name: result[name] for name in names}


def effective_keys(energy: Array, entropy: Array) -> Array:
    return jnp.where(holds_keys(energy), jnp.exp(entropy), 0.0)
