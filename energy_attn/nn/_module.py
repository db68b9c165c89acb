"""The free energy as an Equinox module."""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Bool, Float

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import candidates, check_flag, check_scale, check_window, received

from ..core._attention import attention
from ..core._free_energy import free_energy


class FreeEnergy(eqx.Module):
    r"""The free energy as a module: options are fields, a call returns energies.

    $$F(\zeta) = \log \sum_a \exp(\mathrm{scale}\; q \cdot k_a + b_a + \zeta \cdot v_a)$$

    Attributes:
        scale: the factor of $q \cdot k$; None is $1/\sqrt{H}$. An array is a trainable parameter, the
            inverse temperature.
        is_causal: whether to hide keys whose position is after the query's.
        local_window_size: `(left, right)` or one int: how far from a query its keys may lie.
        implementation: a name of [`implementations`][energy_attn.kernels.implementations].
        parallel: how keys are sharded over the current mesh.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a scale that is not finite, a negative window, an unknown implementation.

    Source: Tree Attention (arXiv 2408.04093), equation 15.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> import energy_attn as ea
        >>> energy = ea.FreeEnergy(is_causal=True)
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> energy(q, k, v).shape
        (5, 2)
        >>> gradient = jax.grad(lambda source: energy(q, k, v, source=source).sum())
        >>> zero = np.zeros(q.shape, q.dtype)
        >>> bool(jnp.all(energy.attention(q, k, v) == gradient(zero)))
        True
    """

    scale: float | Float[Array, ""] | None = None
    is_causal: bool = eqx.field(static=True, default=False)
    local_window_size: int | tuple[int, int] | None = eqx.field(static=True, default=None)
    implementation: str | tuple[str, ...] | None = eqx.field(static=True, default=None)
    parallel: SequenceParallel | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        check_scale(self.scale)
        check_window(self.local_window_size)
        candidates(self.implementation)
        if isinstance(self.implementation, list):  # static fields must be hashable
            raise TypeError(
                f"implementation: wanted a tuple of names, got {received(self.implementation)}"
            )
        check_flag("is_causal", self.is_causal)
        if self.parallel is not None and not isinstance(self.parallel, SequenceParallel):
            raise TypeError(
                f"parallel: wanted a SequenceParallel or None, got {received(self.parallel)}"
            )

    def options(self) -> dict[str, Any]:
        """The fields as options of [`free_energy`][energy_attn.free_energy] and of the functions that
        take the same: `ea.entropy(query, key, value, **energy.options())`.
        """
        return {
            "scale": self.scale,
            "is_causal": self.is_causal,
            "local_window_size": self.local_window_size,
            "implementation": self.implementation,
            "parallel": self.parallel,
        }

    def __call__(
        self,
        query: Float[Array, "*B T N H"],
        key: Float[Array, "*B S K H"],
        value: Float[Array, "*B S K Hv"],
        *,
        source: Any = None,
        bias: Float[Array, "..."] | None = None,
        mask: Bool[Array, "..."] | None = None,
        **arrays: Any,
    ) -> Float[Array, "*B T N"]:
        """Energies `[B, T, N]` in nats; arguments and errors as in
        [`free_energy`][energy_attn.free_energy]. `**arrays` are its lengths and positions.
        """
        options = self.options()
        return free_energy(
            query, key, value, source=source, bias=bias, mask=mask, **options, **arrays
        )

    def attention(
        self,
        query: Float[Array, "*B T N H"],
        key: Float[Array, "*B S K H"],
        value: Float[Array, "*B S K Hv"],
        *,
        bias: Float[Array, "..."] | None = None,
        mask: Bool[Array, "..."] | None = None,
        return_energy: bool = False,
        **arrays: Any,
    ) -> Any:
        """`jax.grad` of the energy in the source at zero: `out` `[B, T, N, Hv]`, or
        `(out, energy)`. Arguments and errors as in [`attention`][energy_attn.attention].
        """
        options = self.options()
        return attention(
            query, key, value, bias, mask, return_energy=return_energy, **options, **arrays
        )
