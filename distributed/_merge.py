"""Folding states over mesh axes, inside `jax.shard_map`."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from energy_attn.kernels import AttentionState
from energy_attn.kernels._errors import check_floating, received
from energy_attn.kernels._state import check_state, fold, fold_energy

AxisName = str | tuple[str, ...]


def merge_across(state: AttentionState, axis_name: AxisName) -> AttentionState:
    r"""The state of all keys, from the state of each device's own: two all-reduces.

    $$m = \max_i F_i, \qquad
      \mathrm{out} = \frac{\sum_i \mathrm{out}_i\, e^{F_i - m}}{\sum_i e^{F_i - m}}, \qquad
      F = m + \log \sum_i e^{F_i - m}$$

    One `pmax` of `lse`, then one `psum` of numerator and denominator together: their bytes,
    $B T N (H + 2)$ numbers of `lse`'s dtype, do not depend on the number of keys. Every derivative
    of the fold is right; that of the keys' own state needs no communication.

    Args:
        state: this device's `out` `[..., H]` and `lse` `[...]`. A device that holds no keys
            passes the empty state.
        axis_name: the mesh axis, or several: they are folded at once.

    Returns:
        The folded state, equal on all devices of the axes: `out` in its own dtype (the sums are in
        `lse`'s), `lse` in float32 (float64).

    Raises:
        TypeError: `state` is no `AttentionState`, or `axis_name` no name.
        ValueError: an axis repeats or is not bound: called outside `jax.shard_map`.

    Source: Tree Attention (arXiv 2408.04093), Algorithm 3 with $m = \max_i F_i$.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import make_mesh, merge_across
        >>> from energy_attn.kernels import AttentionState
        >>> spec = jax.sharding.PartitionSpec("device")
        >>> def f(out, lse):
        ...     return merge_across(AttentionState(out[0], lse[0]), "device")
        >>> mesh = make_mesh((jax.device_count(),), ("device",))
        >>> parts = jnp.ones((jax.device_count(), 3, 4)), jnp.zeros((jax.device_count(), 3))
        >>> with jax.set_mesh(mesh):
        ...     jax.shard_map(f, in_specs=spec, out_specs=jax.P())(*parts).out.shape
        (3, 4)
    """
    check_state("state", state)
    axes = check_axes(axis_name)
    # The quotient is taken in lse's dtype and only then narrowed: XLA would otherwise be free to
    # narrow the sum that is sent.
    return fold(state, lambda x: lax.pmax(x, axes), lambda x: lax.psum(x, axes))


def logsumexp_across(lse: Float[Array, "..."], axis_name: AxisName) -> Float[Array, "..."]:
    r"""The free energy of all keys, from that of each device's own: two all-reduces.

    $$F = m + \log \sum_i e^{F_i - m}, \qquad m = \max_i F_i$$

    with $m$ held constant in every derivative, which changes none. `jax.grad` of this in a
    replicated source is Algorithm 2: a third all-reduce sums the devices' gradients.

    Args:
        lse: this device's energies, of any shape; minus infinity (or not finite) for no keys.
        axis_name: the mesh axis, or several: they are folded at once.

    Returns:
        The energies, equal on all devices of the axes.

    Raises:
        TypeError: `lse` is no float32 or float64 array, or `axis_name` no name.
        ValueError: an axis repeats or is not bound: called outside `jax.shard_map`.

    Source: Tree Attention (arXiv 2408.04093), Algorithm 1 with $m$ added back.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import logsumexp_across, make_mesh
        >>> n = jax.device_count()
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     f = jax.shard_map(
        ...         lambda x: logsumexp_across(x, "device"),
        ...         in_specs=jax.P("device"), out_specs=jax.P(),
        ...     )
        ...     bool(jnp.allclose(f(jnp.zeros(n)), jnp.log(n)))
        True
    """
    lse = check_floating("lse", lse)
    if lse.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(f"lse: wanted a float32 or float64 array, got {received(lse)}")
    axes = check_axes(axis_name)
    return fold_energy(lse, lambda x: lax.pmax(x, axes), lambda x: lax.psum(x, axes))


def check_axes(axis_name: AxisName | Sequence[str]) -> tuple[str, ...]:
    """Returns the axis names as a tuple, each bound in the surrounding `shard_map`.

    Raises `TypeError` for anything but names and `ValueError` for one that repeats or is not bound.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(axes, tuple) or not axes or not all(isinstance(x, str) for x in axes):
        raise TypeError(
            f"axis_name: wanted the name of a mesh axis, or a tuple of names, "
            f"got {received(axis_name)}"
        )
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis_name: wanted different mesh axes, got {axes}")
    for axis in axes:
        try:
            lax.axis_size(axis)
        except NameError:
            raise ValueError(
                f"axis_name: wanted mesh axes of the surrounding jax.shard_map, got {axis!r}, "
                f"which is not bound here"
            ) from None
    return axes
