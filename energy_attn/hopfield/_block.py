"""The attention block of Energy Transformers: the gradient of an attention energy in its input."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from energy_attn.distributed.internal import sequence_order
from energy_attn.kernels.internal import checks, holds_keys, lse_dtype, softmax
from energy_attn.kernels.masks import AbstractMask, Window

from ..core._module import FreeEnergy
from ..functional._citation import cite


class EnergyAttentionBlock(eqx.Module):
    r"""Attention as the descent of an energy of the tokens, as in Energy Transformers.

    $$E(g) = -\frac1\beta \sum_h \sum_C \log \sum_{B \ne C} \exp(\beta\, K_{hB} \cdot Q_{hC}),
      \qquad Q_{hC} = W^Q_h g_C, \quad K_{hB} = W^K_h g_B$$

    `energy(g)` is $E$ and `block(g)` the update $-\partial E / \partial g$, along which a small
    step lowers $E$:

    $$-\frac{\partial E}{\partial g_A} = \sum_h \sum_{B \ne A} {W^Q_h}^T K_{hB}\, \omega_{hBA}
      + \sum_h \sum_{C \ne A} {W^K_h}^T Q_{hC}\, \omega_{hAC},
      \qquad \omega_{hBC} = \mathrm{softmax}_{B \ne C}(\beta\, K_{hB} \cdot Q_{hC})$$

    The first term is attention whose values are the keys; the second pushes a token towards the
    queries that attend to it. This is the *other* sense of "energy attention": the energy is
    differentiated in the block's input, whereas [`free_energy`][energy_attn.free_energy] is
    differentiated in its source. $E$ costs one kernel pass, the update two more; no array is $T^2$ large.

    The block is the paper's attention alone, without its layer norm and Hopfield network, and has no biases.
    Tokens that see no other token add nothing to $E$.

    Args:
        width: of a token.
        num_heads: the number of heads.
        head_width: of queries and keys in a head; `width // num_heads` if None.
        exclude_self: whether to hide a token from itself, as in the paper.
        free_energy: the [`FreeEnergy`][energy_attn.FreeEnergy] of every head. Its `scale` is
            $\beta$, positive, by default $1/\sqrt{\mathtt{head\_width}}$; mask, `implementation` and
            `parallel` are the block's.
        dtype: of the parameters; JAX's default floating dtype if None.
        key: a `jax.random.key` for the initial parameters, normal of variance 1 / `width`.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes or an inverse temperature that are not positive.

    Source: Hoover et al., Energy Transformer (arXiv 2302.07253), the energy $E^{ATT}$ of the
    multi-head energy attention and its update.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> block = ea.hopfield.EnergyAttentionBlock(16, 4, key=jax.random.key(0))
        >>> x = jax.random.normal(jax.random.key(1), (9, 16))
        >>> update = block(x)
        >>> update.shape, bool(block.energy(x + 0.01 * update) < block.energy(x))
        ((9, 16), True)
    """

    query_weight: Float[Array, "heads head_width width"]
    key_weight: Float[Array, "heads head_width width"]
    free_energy: FreeEnergy
    exclude_self: bool = eqx.field(static=True)
    width: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    head_width: int = eqx.field(static=True)

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_width: int | None = None,
        *,
        exclude_self: bool = True,
        free_energy: FreeEnergy | None = None,
        dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
    ) -> None:
        self.num_heads = checks.check_integer("num_heads", num_heads, least=1)
        least = num_heads if head_width is None else 1
        self.width = checks.check_integer("width", width, least)
        head_width = width // num_heads if head_width is None else head_width
        self.head_width = checks.check_integer("head_width", head_width, least=1)
        self.exclude_self = checks.check_flag("exclude_self", exclude_self)
        self.free_energy = FreeEnergy() if free_energy is None else free_energy
        if not isinstance(self.free_energy, FreeEnergy):
            raise TypeError(f"free_energy: wanted a FreeEnergy, got {checks.received(free_energy)}")
        if self.free_energy.scale is not None:
            checks.check_positive("free_energy.scale", self.free_energy.scale)
        dtype = (
            jnp.zeros(()).dtype if dtype is None else checks.check_floating_dtype("dtype", dtype)
        )
        shape = (self.num_heads, self.head_width, self.width)
        self.query_weight, self.key_weight = (
            jax.random.normal(key, shape, dtype) * jnp.asarray(width**-0.5, dtype)
            for key in jax.random.split(checks.check_key("key", key))
        )

    def energy(
        self,
        x: Float[Array, "*B T width"],
        *,
        mask: Bool[Array, "..."] | AbstractMask | None = None,
        lengths: Int[Array, "..."] | None = None,
    ) -> Float[Array, "*B"]:
        """$E$ of the tokens, in nats over $β$.

        Args:
            x: tokens $g$, `[B, T, width]` or `[T, width]`; 16-bit tokens are promoted to float32.
            mask: the tokens that each token sees, as for [`free_energy`][energy_attn.free_energy].
            lengths: `[B]` integers; tokens from this index on are absent.

        Returns:
            `[B]`, or a scalar; float32, or float64 for float64 tokens.

        Raises:
            TypeError: an argument is not an array or has the wrong dtype.
            ValueError: shapes that do not match.
        """
        cite("hoover")
        x = self._promoted(x)
        query, key = (
            jnp.einsum("nyd,...td->...tny", weight.astype(x.dtype), x)
            for weight in (self.query_weight, self.key_weight)
        )
        # only the energies are used, and they do not depend on the values
        value = jax.lax.stop_gradient(key[..., :1])
        # the keys of the passes are disjoint: F = log Σ_passes e^{F_pass}
        parts = [
            energy(query, key, value, **arrays) for energy, arrays in self._passes(x, mask, lengths)
        ]
        whole = softmax(jnp.stack(parts, -1)).lse if parts else jnp.full((), -jnp.inf, x.dtype)
        seen = holds_keys(whole)
        whole = jnp.broadcast_to(jnp.where(seen, whole, 0.0), query.shape[:-1])
        scale = self.free_energy.scale
        beta = jnp.asarray(self.head_width**-0.5 if scale is None else scale, x.dtype)
        return -whole.sum((-2, -1)) / beta

    def __call__(
        self,
        x: Float[Array, "*B T width"],
        *,
        mask: Bool[Array, "..."] | AbstractMask | None = None,
        lengths: Int[Array, "..."] | None = None,
    ) -> Float[Array, "*B T width"]:
        """The update, $-∂E/∂g$; arguments and errors as in `energy`.

        Returns `[B, T, width]` or `[T, width]`, in float32 (float64).
        """
        x = self._promoted(x)
        return -jax.grad(lambda x: self.energy(x, mask=mask, lengths=lengths).sum())(x)

    def _promoted(self, x: Array) -> Array:
        x = checks.check_floating("x", x)
        if x.ndim not in (2, 3) or x.shape[-1] != self.width:
            raise ValueError(
                f"x: wanted shape (B, T, {self.width}) or (T, {self.width}), got {checks.received(x)}"
            )
        return jnp.asarray(x, lse_dtype(x.dtype))

    def _passes(
        self, x: Array, mask: Array | AbstractMask | None, lengths: Array | None
    ) -> list[tuple[FreeEnergy, dict[str, Any]]]:
        """The energies to evaluate, with masks, lengths and positions; together they see each key once."""
        whole = self.free_energy
        if self.exclude_self:
            if whole.mask is None and not isinstance(mask, AbstractMask):
                return self._two_passes(x, mask, lengths)
            # masks compare the positions that two passes would change
            others = ~Window(0, 0) if whole.mask is None else whole.mask & ~Window(0, 0)
            whole = dataclasses.replace(whole, mask=others)
        sizes = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
        return [(whole, {"mask": mask, **sizes})]

    def _two_passes(
        self, x: Array, mask: Array | None, lengths: Array | None
    ) -> list[tuple[FreeEnergy, dict[str, Any]]]:
        """The keys before each token, and those after it."""
        whole, length = self.free_energy, x.shape[-2]
        order = np.arange(length, dtype=np.int32)
        if whole.parallel is not None and whole.parallel.layout != "contiguous":
            order = sequence_order(length, whole.parallel, "x.shape[-2]")
        present: Any = np.ones((1, length), bool)
        if lengths is not None:
            checks.check_shape("lengths", checks.check_array("lengths", lengths), x.shape[:-2])
            present = order[None] < checks.as_int32(lengths).reshape(-1, 1)
        # Causality hides the keys after a query. With key positions that start at one it hides the
        # query's own key as well; with positions from the end it hides those before. So no T×T mask
        # is needed.
        window = whole.local_window_size
        sides = (window, window) if isinstance(window, int) else window
        passes = []
        for side, positions in enumerate((order, length - 1 - order)):
            far = None if sides is None else sides[side]
            if (side == 1 and whole.is_causal) or far == 0:
                continue
            reach = None if far is None else (far - 1, 0)
            causal = dataclasses.replace(whole, is_causal=True, local_window_size=reach)
            arrays = {
                name: jnp.where(present, (positions + first)[None], np.int32(-1))
                for name, first in (("query_positions", 0), ("key_positions", 1))
            }
            passes.append((causal, {"mask": mask, **arrays}))
        return passes
