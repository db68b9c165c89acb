"""The free energy as a function of the source alone, and the measure whose generating function it is."""

import dataclasses
from typing import Literal, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from energy_attn.kernels.internal import check_flag, check_source, received

from ..bayes._measure import AbstractConjugate
from ..functional._free_energy import (
    Calls,
    Parts,
    attention_and_energy,
    both_computed,
    energy_at,
    state_at,
)
from ..observables._at_source import promoted, sinks_as_keys
from ._keys import Keys, prepare_keys, sum_of_sources, tilt_keys


class Gibbs(AbstractConjugate):
    r"""The free energy of given queries and keys: a function of the source alone, and a measure.

    $$F(\zeta) = \log \sum_a e^{s_a + \zeta \cdot v_a}, \qquad P_a = e^{s_a - F(0)}, \qquad
      \nabla F(0) = \mathbb{E}_P[v] = \mathrm{attention}$$

    Made by [`FreeEnergy.at`][energy_attn.FreeEnergy]. $F - F(0)$ is the cumulant generating function
    of the values under $P$, so `jax.grad(lambda z: F(z).sum())(zeros)` is attention, at the cost of
    one kernel pass, on a mesh too. Its methods answer what else the measure knows. Under `jit`
    attention and the energies are one pass, and so is a question that is asked twice; other questions
    make passes of their own.

    A pytree whose leaves are the arrays: it passes `jax.jit`, `vmap` over the batch, `lax.scan`,
    donation and shardings, and is differentiated in its arrays.

    Attributes:
        parts: the disjoint sets of keys that the measure is over; one, unless measures were joined.
        source: the source at which a tilted measure stands; None is zero.

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

        The gradient in the source costs one kernel pass, and a NumPy array of zeros is never read
        beyond its shape, as for [`free_energy`][energy_attn.free_energy]. A tilted measure adds its
        own source.

        Args:
            source: $\zeta$, `[B, T, N, Hv]` or `[T, N, Hv]`, one for each query and head; None is
                zero.

        Returns:
            `[B, T, N]` or `[T, N]` in nats; float32, or float64 for float64 arrays. Minus infinity in
            a fully masked row.

        Raises:
            TypeError: `source` is not a floating array.
            ValueError: `source` has another shape.
        """
        calls, parts = _calls(self.parts)
        if source is not None:
            check_source(source, self.parts[0].query, self.parts[0].value)
        total = sum_of_sources(self.source, source)
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
        check_flag("return_energy", return_energy)
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
        check_source(source, first.query, first.value)
        return dataclasses.replace(self, source=sum_of_sources(self.source, jnp.asarray(source)))

    def merge(self, other: "Gibbs") -> "Gibbs":
        r"""The measure over the union of two disjoint sets of keys, as `self | other`.

        $$F_{A \cup B} = \mathrm{logaddexp}(F_A, F_B), \qquad
          P_{A \cup B} = e^{F_A - F} P_A + e^{F_B - F} P_B$$

        Both have the same rows, each its own masks, scale, implementation and mesh: a cache and the
        tokens that are not in it yet, or a prompt that all see and a suffix that is causal. Whether
        the keys are disjoint is for the caller to know.

        Args:
            other: a measure with queries, values and key heads of the same shapes (but for the number
                of keys) and dtypes.

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
            raise TypeError(f"other: wanted a Gibbs, got {received(other)}")
        mine, theirs = self.parts[0], other.parts[0]
        for name, x, y, axes in (
            ("query", mine.query, theirs.query, slice(-1)),
            ("value", mine.value, theirs.value, slice(-2, None)),
        ):
            if x.shape[axes] != y.shape[axes] or x.ndim != y.ndim:
                wanted = "the rows" if name == "query" else "the heads and width"
                raise ValueError(f"other: wanted {wanted} of {name} {x.shape}, got {received(y)}")
            if x.dtype != y.dtype:
                raise TypeError(f"other: wanted {name} of dtype {x.dtype}, got {received(y)}")
        return Gibbs((*_tilted(self), *_tilted(other)))

    def __or__(self, other: "Gibbs") -> "Gibbs":
        """`self.merge(other)`."""
        return self.merge(other) if isinstance(other, Gibbs) else NotImplemented

    def _prepared(self) -> tuple[Calls, Parts]:
        """The prepared calls, in the precision of energies, with the source in their scores, and sinks as keys."""
        return sinks_as_keys(*self._prepared_keys())

    def _prepared_keys(self) -> tuple[Calls, Parts]:
        """The same of the keys of each part, which has its sink beside them."""
        calls, parts = _calls(_tilted(self))
        if any(call.policy.attention_only for call in calls):
            raise NotImplementedError(
                "reproducible: wanted False for all of a measure but its energy and attention, got True"
            )
        return calls, promoted(parts)


def _calls(parts: tuple[Keys, ...]) -> tuple[Calls, Parts]:
    calls, arrays = zip(*map(prepare_keys, parts), strict=True)
    return calls, arrays


def _tilted(measure: Gibbs) -> tuple[Keys, ...]:
    source = measure.source
    return measure.parts if source is None else tuple(tilt_keys(x, source) for x in measure.parts)
