"""The free energy as a function of the source, and the Gibbs measure whose generating function it is."""

import abc
import dataclasses
from typing import Any, Literal, overload

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from energy_attn.kernels import Operands
from energy_attn.kernels.internal import (
    RowOptions,
    additions,
    arguments,
    batches,
    check_options,
    checks,
    join_masks,
    lse_dtype,
)
from energy_attn.kernels.masks import AbstractMask

from ..bayes._measure import AbstractConjugate
from ..functional._free_energy import (
    Calls,
    EnergyOptions,
    ModuleOptions,
    Parts,
    Source,
    StaticCall,
    attention_and_energy,
    both_computed,
    energy_at,
    prepare,
    state_at,
)
from ..functional._tag import recorders
from ..observables._at_source import promoted, sinks_as_keys
from ..sparse._tsallis import Tsallis


class AbstractEnergy(eqx.Module):
    """The options of a call, a mask that is combined with the call's mask, and a regulariser."""

    mask: eqx.AbstractVar[AbstractMask | None]
    regulariser: eqx.AbstractVar[Tsallis | None]

    @abc.abstractmethod
    def _options(self) -> EnergyOptions: ...


class KeySet(eqx.Module):
    """The arguments of one call, and the energy that scores them."""

    energy: AbstractEnergy
    query: Float[Array, "*#B T N H"]
    key: Float[Array, "*#B S K H"]
    value: Float[Array, "*#B S K Hv"]
    bias: Float[Array, "..."] | None
    mask: Bool[Array, "..."] | AbstractMask | None
    rows: dict[str, Int[Array, "..."]]  # lengths, positions and segment ids by name
    source: Float[Array, "*B T N Hv"] | None = None  # added to the scores


class PreparedKeys(eqx.Module):
    """A checked call, as a recording has it."""

    call: StaticCall = eqx.field(static=True)
    operands: Operands
    source: Float[Array, "*B T N Hv"] | None = None  # added to the scores

    @property
    def query(self) -> Array:
        return batches.restored(self.operands.query, self.call.axes)

    @property
    def key(self) -> Array:
        return batches.restored(self.operands.key, self.call.axes)

    @property
    def value(self) -> Array:
        return batches.restored(self.operands.value, self.call.axes)


Keys = KeySet | PreparedKeys


# Functions, because a bound method of an Equinox module is a module, which is slow to construct.
def prepare_keys(keys: Keys) -> tuple[StaticCall, Operands]:
    """The prepared call, with the source in its scores. Raises as `free_energy` does."""
    if isinstance(keys, PreparedKeys):
        call, operands = keys.call, keys.operands
    else:
        arguments = keys.query, keys.key, keys.value, keys.bias, keys.mask
        rows: Any = keys.rows
        call, operands = prepare_at(keys.energy, *arguments, rows)
    if keys.source is None:
        return call, operands
    source = jnp.asarray(batches.joined(keys.source, len(call.axes)))
    settings, operands = additions.with_source(call.settings, operands, source)
    value = operands.value.astype(operands.query.dtype)
    return call._replace(settings=settings), operands._replace(value=value)


def check_rows(rows: RowOptions) -> None:
    check_options(rows, RowOptions, "bias", "mask", fields=ModuleOptions)


def check_gibbs(energy: AbstractEnergy) -> None:
    """Raises `NotImplementedError` for an energy with a regulariser."""
    if energy.regulariser is not None:
        raise NotImplementedError(
            "regulariser: wanted None for a Gibbs measure or a recording; the energy's call and attention take one; "
            f"got {energy.regulariser}"
        )


# The parameters are the arguments of a call of an energy.
def prepare_at(
    energy: AbstractEnergy,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | AbstractMask | None,
    rows: RowOptions,
    name: str | None = None,
    source: Source = None,
) -> tuple[StaticCall, Operands]:
    """The prepared call of an energy, recorded if it has a name. Raises as `FreeEnergy.at`."""
    if name is not None and recorders.value:
        check_gibbs(energy)
    check_rows(rows)
    mask = join_masks(energy.mask, mask)
    options: Any = {**energy._options(), **rows}
    return prepare(query, key, value, bias, mask, name=name, source=source, **options)


def _sum_of_sources(first: Source, second: Source) -> Source:
    """The sum, in the precision of energies; None is zero."""
    if first is None or second is None:
        return second if first is None else first
    wide = lse_dtype(first.dtype, second.dtype)
    return jnp.asarray(first, wide) + jnp.asarray(second, wide)


class Gibbs(AbstractConjugate):
    r"""The free energy of given queries and keys: a function of the source alone, and a measure.

    $$F(\zeta) = \log \sum_a e^{s_a + \zeta \cdot v_a}, \qquad P_a = e^{s_a - F(0)}, \qquad
      \nabla F(0) = \mathbb{E}_P[v] = \mathrm{attention}$$

    Made by [`FreeEnergy.at`][energy_attn.FreeEnergy]. $F - F(0)$ is the cumulant generating function
    of the values under $P$, so `jax.grad(lambda z: F(z).sum())(zeros)` is attention, at the cost of
    one kernel pass, on a mesh too. Under `jit` attention and the energies share one pass, and equal calls are
    computed once; other methods make their own passes. Scores include the bias, the `score` and the source of a
    tilted measure.

    A pytree whose leaves are the arrays: it passes `jax.jit`, `vmap` over the batch, `lax.scan`,
    donation and shardings, and is differentiated in its arrays.

    Attributes:
        parts: the disjoint sets of keys, one unless measures were merged; each has `query`, `key` and `value`.
        source: the source of a tilted measure; None is zero.

    Source: Tree Attention (arXiv 2408.04093), equations 6 to 15.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> F = ea.FreeEnergy(is_causal=True).at(q, k, v)
        >>> out = jax.grad(lambda source: F(source).sum())(np.zeros(q.shape, q.dtype))
        >>> bool(jnp.all(out == F.attention())), F.entropy().shape
        (True, (5, 2))
    """

    parts: tuple[Keys, ...]
    source: Float[Array, "*B T N Hv"] | None = None

    def __call__(
        self, source: Float[Array | np.ndarray, "*B T N Hv"] | None = None
    ) -> Float[Array, "*B T N"]:
        r"""The free energies at a source.

        $$F(\zeta) = \log \sum_a e^{s_a + \zeta \cdot v_a}$$

        At the cost of [`free_energy`][energy_attn.free_energy]. A tilted measure adds its own source.

        Args:
            source: $\zeta$, `[B, T, N, Hv]` or `[T, N, Hv]`, one for each query and head; None is zero.

        Returns:
            `[B, T, N]` or `[T, N]` in nats; float32, or float64 for float64 arrays. Minus infinity in
            a fully masked row.

        Raises:
            TypeError: `source` is not a floating array.
            ValueError: `source` has another shape.
        """
        calls, parts = _calls(self.parts)
        if source is not None:
            first = self.parts[0]
            arguments.check_source(source, first.query, first.key, first.value)
        total = _sum_of_sources(self.source, source)
        if total is None:
            return both_computed(*state_at(calls, None, parts))[1]
        return energy_at(calls, total, parts)

    @overload
    def attention(self, *, return_energy: Literal[False] = False) -> Float[Array, "*B T N Hv"]: ...
    @overload
    def attention(
        self, *, return_energy: Literal[True]
    ) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]: ...
    def attention(
        self, *, return_energy: bool = False
    ) -> Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]:
        r"""Attention, $\nabla F(0)$: the mean of the values under the measure.

        Args:
            return_energy: whether to return `(out, energy)`.

        Returns:
            `[B, T, N, Hv]` in value's dtype; with `return_energy`, also the energies `[B, T, N]`. Zero
            in a fully masked row.
        """
        checks.check_flag("return_energy", return_energy)
        calls, parts = _calls(self.parts)
        out, energy = both_computed(*attention_and_energy(calls, parts, self.source))
        out = out.astype(self.parts[0].value.dtype)
        return (out, energy) if return_energy else out

    def tilt(self, source: Float[Array, "*B T N Hv"]) -> "Gibbs":
        r"""The measure at another source.

        $$P_{\zeta, a} = e^{s_a + \zeta \cdot v_a - F(\zeta)}, \qquad F_\zeta(\eta) = F(\zeta + \eta)$$

        Its attention is $\nabla F(\zeta)$, its entropy that of $P_\zeta$. Sources add:
        `F.tilt(a).tilt(b)` is `F.tilt(a + b)`.

        Args:
            source: $\zeta$, `[B, T, N, Hv]` or `[T, N, Hv]`.

        Raises:
            TypeError: `source` is not a floating array.
            ValueError: `source` has another shape.

        Source: Tree Attention (arXiv 2408.04093), equation 15; exponential tilting, Dembo and
        Zeitouni, Large Deviations Techniques and Applications, section 2.2.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> q, k, v, z = jax.random.normal(jax.random.key(0), (4, 5, 2, 4))
            >>> F = ea.FreeEnergy().at(q, k, v)
            >>> gradient = jax.grad(lambda source: F(source).sum())(z)
            >>> bool(jnp.allclose(F.tilt(z).attention(), gradient, atol=1e-6))
            True
        """
        first = self.parts[0]
        arguments.check_source(source, first.query, first.key, first.value)
        return dataclasses.replace(self, source=_sum_of_sources(self.source, jnp.asarray(source)))

    def merge(self, other: "Gibbs") -> "Gibbs":
        r"""The measure over the union of two disjoint sets of keys, as `self | other`.

        $$F_{A \cup B} = \mathrm{logaddexp}(F_A, F_B), \qquad
          P_{A \cup B} = e^{F_A - F} P_A + e^{F_B - F} P_B$$

        Both have the same rows; masks, scale, implementation and mesh may differ. Examples: a cache and the tokens
        not in it yet, or a prompt visible to all and a causal suffix.

        Args:
            other: a measure with queries, values and key heads of the same shapes and dtypes; the number of keys
                may differ.

        Raises:
            TypeError: `other` is not a `Gibbs`, or has other dtypes.
            ValueError: its rows, heads or the width of its values differ.

        Source: Tree Attention (arXiv 2408.04093), the associative operation of section 5.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 6, 2, 4))
            >>> energy = ea.FreeEnergy()
            >>> halves = energy.at(q, k[:3], v[:3]) | energy.at(q, k[3:], v[3:])
            >>> bool(jnp.allclose(halves.entropy(), energy.at(q, k, v).entropy(), atol=1e-5))
            True
        """
        if not isinstance(other, Gibbs):
            raise TypeError(f"other: wanted a Gibbs, got {checks.received(other)}")
        first, second = self.parts[0], other.parts[0]
        for name, x, y, axes in (
            ("query", first.query, second.query, slice(-1)),
            ("value", first.value, second.value, slice(-2, None)),
        ):
            if x.shape[axes] != y.shape[axes] or x.ndim != y.ndim:
                sizes = "the rows" if name == "query" else "the heads and width"
                raise ValueError(
                    f"other: wanted {sizes} of {name} {x.shape}, got {checks.received(y)}"
                )
            if x.dtype != y.dtype:
                raise TypeError(
                    f"other: wanted {name} of dtype {x.dtype}, got {checks.received(y)}"
                )
        return Gibbs((*_tilted(self), *_tilted(other)))

    def __or__(self, other: "Gibbs") -> "Gibbs":
        return self.merge(other) if isinstance(other, Gibbs) else NotImplemented

    def _prepared(self) -> tuple[Calls, Parts]:
        """The prepared calls, in the precision of energies, with the source in their scores, and sinks as keys."""
        return sinks_as_keys(*self._prepared_keys())

    def _prepared_keys(self, *, promote: bool = True) -> tuple[Calls, Parts]:
        """The prepared calls, tilted and promoted, with sinks still separate from the keys."""
        calls, parts = _calls(_tilted(self))
        if any(call.policy.attention_only for call in calls):
            raise NotImplementedError(
                "reproducible: wanted False for observables other than the energy and attention, got True"
            )
        return calls, promoted(parts) if promote else parts


def _calls(parts: tuple[Keys, ...]) -> tuple[Calls, Parts]:
    calls, arrays = zip(*map(prepare_keys, parts), strict=True)
    # so that `score_max` and attention are one pass
    return tuple(x._replace(settings=x.settings.needing(maximum=True)) for x in calls), arrays


def _tilted(measure: Gibbs) -> tuple[Keys, ...]:
    if measure.source is None:
        return measure.parts
    return tuple(
        dataclasses.replace(x, source=_sum_of_sources(x.source, measure.source))
        for x in measure.parts
    )
