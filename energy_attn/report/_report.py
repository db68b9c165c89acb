"""A few figures of attention for each layer and head of a model."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import RowOptions, checks, holds_keys
from energy_attn.kernels.masks import AbstractMask

from ..core._gibbs import Gibbs
from ..core._module import measure_at, measure_of
from ..functional._free_energy import EnergyOptions
from ..nn._multihead import MultiheadAttention
from ..observables._entropy import RowObservables, row_observables
from ..record._lift import Recorded
from ..record._record import effective_keys, names_of, recorder, run_recorded

if TYPE_CHECKING:  # `import energy_attn` loads no models
    from ..models import AbstractDecoder, DecoderCache

ProcessHeads = Callable[..., Sequence[Array]]


# The figures of rows from which the others in a report follow, `[layers, ..., N]` each.
Rows = tuple[Array, ...]
_FIGURES = RowObservables._fields[:-1]


class EnergyReport(eqx.Module):
    """The result of `energy_report`."""

    energy: Float[Array, "layers *queries heads"]
    entropy: Float[Array, "layers *queries heads"]
    heat_capacity: Float[Array, "layers *queries heads"]
    variance: Float[Array, "layers *queries heads"]
    effective_keys: Float[Array, "layers *queries heads"]
    names: tuple[str, ...] | None = eqx.field(static=True, default=None)


@overload
def energy_report(model: Gibbs, *, per_query: bool = False) -> EnergyReport: ...


@overload
def energy_report(
    model: MultiheadAttention,
    query: Float[Array, "*B T query_size"],
    key_: Float[Array, "*B S key_size"],
    value: Float[Array, "*B S value_size"],
    mask: Bool[Array, "..."] | None = None,
    *,
    per_query: bool = False,
    process_heads: ProcessHeads | None = None,
    **rows: Unpack[RowOptions],
) -> EnergyReport: ...


@overload
def energy_report(
    model: "AbstractDecoder",
    tokens: Int[Array, "B T"],
    positions: Int[Array, "#B T"] | None = None,
    cache: "DecoderCache | None" = None,
    *,
    per_query: bool = False,
    **options: Unpack[EnergyOptions],
) -> EnergyReport: ...


@overload
def energy_report(
    model: Callable[..., Any], *inputs: PyTree, per_query: bool = False, **options: Any
) -> EnergyReport: ...


def energy_report(
    model: object, *inputs: PyTree, per_query: bool = False, **options: Any
) -> EnergyReport:
    r"""Energy, entropy, heat capacity, variance and effective keys of every layer and head.

    $$F, \qquad H = F - \mathbb{E}_P[s], \qquad \mathrm{Var}_P(s), \qquad
      \mathrm{tr}\,\Sigma = \sum_a P_a \|v_a - \mathrm{out}\|^2, \qquad e^H$$

    The figures of each row of attention, or their means over the queries that see a key. It costs about three
    flash passes for each layer, without a matrix of weights. It is a pure function of arrays: it works
    inside `jax.jit`, in a training step, and is differentiable.

    Four forms:

    - `energy_report(F)`: the measure of one attention, [`energy.at(...)`][energy_attn.FreeEnergy];
    - `energy_report(layer, query, key_, value, mask=None, **options)` for a
      [`MultiheadAttention`][energy_attn.nn.MultiheadAttention]: inputs as in its call, or with a
      batch axis before them; `process_heads`, positions and the lengths of padded rows
      (`query_seq_lengths`, `key_value_seq_lengths`) are options. Dropout is off;
    - `energy_report(model, tokens, positions=None, cache=None, **options)` for a decoder, such as
      [`Llama`][energy_attn.models.Llama]: inputs as in its call; options are `parallel` and
      the options of `free_energy`;
    - `energy_report(function, *inputs, **options)` for any function or module that calls free energies,
      as for [`record`][energy_attn.record]. Each call is a
      layer, and so is each step of a `lax.scan` around it; means are also over the axes of `jax.vmap`. Where
      a layer has fewer heads than another, or is in a branch that was not taken, figures are NaN.

    Args:
        model: a `Gibbs`, a `MultiheadAttention`, a decoder, or another function.
        *inputs: the arguments of its call.
        per_query: whether to return figures for each query instead of the means.
        **options: options of the four forms.

    Returns:
        A pytree of arrays `[layers, heads]`, or `[layers, B, T, heads]` with `per_query` (without `B` if the inputs
        have no batch axis), in float32 (float64). [`plot.energy_report`][energy_attn.plot.energy_report] draws it.
        The means leave out fully masked rows, whose own energy is minus infinity and whose other figures are zero.

        - `energy`: $F$ in nats. `entropy`: $H$ of the attention weights in nats.
        - `heat_capacity`: the variance of the scores, $\partial^2 F / \partial\beta^2$, in nats squared.
        - `variance`: $\mathrm{tr}\,\Sigma$, the mean square distance of the values from the output.
        - `effective_keys`: $e^H$; a mean is the mean of $e^H$ over rows.
        - `names`: the layers' names if a function was recorded, else None.

    Raises:
        TypeError: `model` is none of the four, or an argument is of the wrong type.
        ValueError: shapes that do not fit, or values out of range; no free energy runs in a function;
            with `per_query`, layers whose rows differ in shape.

    Source: Tree Attention (arXiv 2408.04093), equation 15 as a thermodynamic potential.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn.models import Llama, LlamaConfig
        >>> config = LlamaConfig(256, 32, 64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = Llama(config, key=jax.random.key(0))
        >>> tokens = jnp.zeros((1, 8), jnp.int32)
        >>> report = ea.energy_report(model, tokens)
        >>> report.entropy.shape
        (2, 4)
        >>> ea.energy_report(model, tokens, per_query=True).entropy.shape
        (2, 1, 8, 4)
        >>> layer = ea.nn.MultiheadAttention(4, 16, key=jax.random.key(0))
        >>> custom = lambda x: layer(x, x, layer(x, x, x))  # a custom model
        >>> ea.energy_report(custom, jnp.ones((7, 16))).entropy.shape
        (2, 4)
    """
    from ..models import AbstractDecoder  # `import energy_attn` loads no models

    checks.check_flag("per_query", per_query)
    kinds = {AbstractDecoder: _of_decoder, MultiheadAttention: _of_layer, Gibbs: _of_measure}
    run: Callable[..., Rows] | None = next(
        (f for x, f in kinds.items() if isinstance(model, x)), None
    )
    if run is not None:
        _check_inputs(run, model, *inputs, **options)
        return _summary(run(model, *inputs, **options), per_query)
    if not callable(model):
        raise TypeError(
            f"model: wanted a Gibbs, a MultiheadAttention, a decoder or a function, "
            f"got {checks.received(model)}"
        )
    _, seen = run_recorded(recorder(_FIGURES, {}), model, *inputs, **options)
    layers = zip(names_of(seen), seen, strict=True)
    return _joined([_of_call(name, x, per_query) for name, x in layers])


def _check_inputs(
    run: Callable[..., Rows], model: object, *inputs: object, **options: object
) -> None:
    """Raises `TypeError`, with the names of inputs, unless inputs fit a kind of model."""
    signature = inspect.signature(run)
    try:
        signature.bind(model, *inputs, **options)
    except TypeError as error:
        taken = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD][1:]
        names = ", ".join(x.name for x in taken) or "no inputs"
        raise TypeError(f"inputs: wanted {names} for a {type(model).__name__}; {error}") from None


def _of_call(name: str, seen: Recorded, per_query: bool) -> EnergyReport:
    """The report of one call in a function: of one layer, or of a layer for each step of the loops around it."""
    steps = [i for i, axis in enumerate(seen.axes) if axis == "scan"]
    figures = [jnp.moveaxis(seen.values[x], steps, range(len(steps))) for x in _FIGURES]
    shape = figures[0].shape[: len(steps)]
    rows = tuple(x.reshape(-1, *x.shape[len(steps) :]) for x in figures)
    names = tuple(f"{name}{list(i) if i else ''}" for i in np.ndindex(*shape))
    return _summary(rows, per_query, names)


def _summary(rows: Rows, per_query: bool, names: tuple[str, ...] | None = None) -> EnergyReport:
    energy, entropy, *_ = rows
    figures, seen = [*rows, effective_keys(energy, entropy)], holds_keys(energy)
    if per_query:
        return EnergyReport(*figures, names=names)
    axes = tuple(range(1, seen.ndim - 1))
    count = seen.sum(axes, dtype=energy.dtype)

    def mean(x: Array) -> Array:
        return jnp.where(seen, x, 0.0).sum(axes) / jnp.maximum(count, 1.0)

    energy, *rest = map(mean, figures)
    return EnergyReport(jnp.where(count > 0, energy, -jnp.inf), *rest, names=names)


def _joined(reports: list[EnergyReport]) -> EnergyReport:
    heads = max(x.energy.shape[-1] for x in reports)
    names = tuple(name for x in reports for name in x.names or ())

    def join(*arrays: Array) -> Array:
        padding = ([(0, 0)] * (x.ndim - 1) + [(0, heads - x.shape[-1])] for x in arrays)
        padded = [
            jnp.pad(x, p, constant_values=jnp.nan) for x, p in zip(arrays, padding, strict=True)
        ]
        if len({x.shape[1:] for x in padded}) > 1:
            shapes = ", ".join(str(x.shape[1:-1]) for x in arrays)
            raise ValueError(
                f"per_query: wanted rows of one shape in all layers, got {shapes}; "
                f"energy_attn.record returns those of each"
            )
        return jnp.concatenate(padded)

    arrays = (dataclasses.replace(x, names=names) for x in reports)
    return jax.tree.map(join, *arrays)


def _of_measure(measure: Gibbs) -> Rows:
    *rows, _ = row_observables(*measure._prepared())
    return tuple(x[None] for x in rows)


def _of_layer(
    layer: MultiheadAttention,
    query: Array,
    key_: Array,
    value: Array,
    mask: Array | AbstractMask | None = None,
    *,
    process_heads: ProcessHeads | None = None,
    **rows: Unpack[RowOptions],
) -> Rows:
    project = functools.partial(layer.project, mask=mask, process_heads=process_heads)
    batched = checks.check_floating("query", query).ndim == 3
    for name, x in (("key_", key_), ("value", value)) if batched else ():
        if checks.check_array(name, x).shape[:1] != query.shape[:1]:
            raise ValueError(
                f"{name}: wanted shape ({query.shape[0]}, length, width), got {checks.received(x)}"
            )
    heads = (jax.vmap(project) if batched else project)(query, key_, value)
    return _of_measure(measure_at(layer.energy, *heads, None, mask, rows))


def _of_decoder(
    model: Callable[..., Any],
    tokens: Array,
    positions: Array | None = None,
    cache: PyTree = None,
    *,
    parallel: SequenceParallel | None = None,
    **options: Any,
) -> Rows:
    def attend(
        query: Array, key: Array, value: Array, *, return_energy: bool, **call: Any
    ) -> tuple[Array, Rows]:
        del return_energy  # the report takes its place
        measure = measure_of(query, key, value, **call, **options)
        *rows, out = row_observables(*measure._prepared())
        return out.astype(query.dtype), tuple(rows)

    output = model(tokens, positions, cache, parallel=parallel, return_energies=True, attend=attend)
    rows: Any = output.energies
    return rows
