"""A few figures of attention for each layer and head of a model."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import (
    RowOptions,
    check_array,
    check_flag,
    check_floating,
    holds_keys,
    received,
)
from energy_attn.kernels.masks import AbstractMask

from ..core._options import EnergyOptions
from ..gibbs._free_energy import measure_at, measure_of
from ..gibbs._gibbs import Gibbs
from ..nn._multihead import MultiheadAttention
from ..observables._entropy import row_observables

if TYPE_CHECKING:  # `import energy_attn` loads no models
    from ..models.decoder._cache import LlamaCache
    from ..models.decoder._decoder import AbstractDecoder

ProcessHeads = Callable[..., Sequence[Array]]


class EnergyReport(eqx.Module):
    """Figures of attention for each layer and head: `[layers, heads]`, or `[layers, B, T, heads]`.

    A pytree of arrays, returned by [`energy_report`][energy_attn.energy_report];
    [`plot.energy_report`][energy_attn.plot.energy_report] draws it.

    Attributes:
        energy: the free energy $F$, in nats; minus infinity for fully masked rows.
        entropy: $H$ of the attention weights, in nats.
        heat_capacity: the variance of the scores, $\\partial^2 F/\\partial\\beta^2$, in nats squared.
        variance: $\\mathrm{tr}\\,\\Sigma$, the mean square distance of values from the output, in
            the square of their unit.
        effective_keys: $e^H$, a number of keys; a mean is that of $e^H$ over rows.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> report = ea.energy_report(ea.FreeEnergy().at(0 * q, k, v))  # five equal keys
        >>> report.effective_keys.round(3).tolist()
        [[5.0, 5.0]]
    """

    energy: Float[Array, "layers *queries heads"]
    entropy: Float[Array, "layers *queries heads"]
    heat_capacity: Float[Array, "layers *queries heads"]
    variance: Float[Array, "layers *queries heads"]
    effective_keys: Float[Array, "layers *queries heads"]


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
    cache: "LlamaCache | None" = None,
    *,
    per_query: bool = False,
    **options: Unpack[EnergyOptions],
) -> EnergyReport: ...


def energy_report(
    model: object, *inputs: PyTree, per_query: bool = False, **options: Any
) -> EnergyReport:
    r"""Energy, entropy, heat capacity, variance and effective keys of every layer and head.

    $$F, \qquad H = F - \mathbb{E}_P[s], \qquad \mathrm{Var}_P(s), \qquad
      \mathrm{tr}\,\Sigma = \sum_a P_a \|v_a - \mathrm{out}\|^2, \qquad e^H$$

    of each row of attention, or their means over the queries that see a key. It costs about three
    flash passes for each layer, without a matrix of weights. It is a pure function of arrays: it works
    inside `jax.jit`, in a training step, and is differentiable.

    Three forms:

    - `energy_report(F)`: the measure of one attention, [`energy.at(...)`][energy_attn.FreeEnergy];
    - `energy_report(layer, query, key_, value, mask=None, **options)` for a
      [`MultiheadAttention`][energy_attn.MultiheadAttention]: inputs as in its call, or with a
      batch axis before them; `process_heads`, positions and the lengths of padded rows
      (`query_seq_lengths`, `key_value_seq_lengths`) are options. Dropout is off;
    - `energy_report(model, tokens, positions=None, cache=None, **options)` for a decoder, such as
      [`Llama`][energy_attn.models.Llama]: inputs as in its call; options besides `parallel` are
      those of `free_energy`.

    Args:
        model: a `Gibbs`, a `MultiheadAttention` or a decoder.
        *inputs: the arguments of its call.
        per_query: whether to return figures for each query instead of the means.
        **options: see above.

    Returns:
        An [`EnergyReport`][energy_attn.EnergyReport] of arrays `[layers, heads]`, or
        `[layers, B, T, heads]` (without `B` where the inputs have no batch); float32, or float64.
        Fully masked rows are left out of the means; their own figures are an energy of minus infinity
        and zeros.

    Raises:
        TypeError: `model` is none of the three, or an argument is of the wrong type.
        ValueError: shapes that do not fit, or values out of range.

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
    """
    from ..models.decoder._decoder import AbstractDecoder  # `import energy_attn` loads no models

    check_flag("per_query", per_query)
    if isinstance(model, AbstractDecoder):
        rows = _of_decoder(model, *inputs, **options)
    elif isinstance(model, MultiheadAttention):
        rows = _of_layer(model, *inputs, **options)
    elif isinstance(model, Gibbs):
        rows = _of_measure(model, *inputs, **options)
    else:
        raise TypeError(
            f"model: wanted a Gibbs, a MultiheadAttention or a decoder, got {received(model)}"
        )
    seen = holds_keys(rows.energy)
    effective = jnp.where(seen, jnp.exp(rows.entropy), 0.0)
    if per_query:
        return EnergyReport(*rows, effective)
    axes = tuple(range(1, seen.ndim - 1))
    count = seen.sum(axes, dtype=rows.energy.dtype)

    def mean(x: Array) -> Array:
        return jnp.where(seen, x, 0.0).sum(axes) / jnp.maximum(count, 1.0)

    energy, *others = map(mean, (*rows, effective))
    return EnergyReport(jnp.where(count > 0, energy, -jnp.inf), *others)


class _Rows(NamedTuple):
    """The figures of each row from which the others in a report follow."""

    energy: Array
    entropy: Array
    heat_capacity: Array
    variance: Array


def _observed(measure: Gibbs) -> tuple[Array, _Rows]:
    """Attention, widened, and the figures of its rows."""
    found = row_observables(*measure.prepared())
    return found.out, _Rows(*found[:-1])


def _of_measure(measure: Gibbs) -> _Rows:
    """The rows of one layer, in the shape of a model's."""
    return jax.tree.map(lambda x: x[None], _observed(measure)[1])


def _of_layer(
    layer: MultiheadAttention,
    query: Array,
    key_: Array,
    value: Array,
    mask: Array | AbstractMask | None = None,
    *,
    process_heads: ProcessHeads | None = None,
    **rows: Unpack[RowOptions],
) -> _Rows:
    project = functools.partial(layer.project, mask=mask, process_heads=process_heads)
    batched = check_floating("query", query).ndim == 3
    for name, x in (("key_", key_), ("value", value)) if batched else ():
        if check_array(name, x).shape[:1] != query.shape[:1]:
            raise ValueError(
                f"{name}: wanted shape ({query.shape[0]}, length, width), got {received(x)}"
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
) -> _Rows:
    def attend(
        query: Array, key: Array, value: Array, *, return_energy: bool, **call: Any
    ) -> tuple[Array, _Rows]:
        del return_energy  # as a report
        out, rows = _observed(measure_of(query, key, value, **call, **options))
        return out.astype(query.dtype), rows

    found = model(tokens, positions, cache, parallel=parallel, return_energies=True, attend=attend)
    rows: Any = found.energies
    return rows
