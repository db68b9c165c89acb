"""Softmax that is safe for fully masked rows, and shifted energies."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from energy_attn.kernels.internal import checks, safe_shift, softmax


class ShiftedEnergy(NamedTuple):
    """`F' = F - shift`, and the shift that must be added to report `F`."""

    energy: Float[Array, "..."]
    shift: Float[Array, "..."]


def safe_softmax(
    scores: Float[Array, "..."],
    *,
    where: Bool[Array, "..."] | None = None,
    axis: int = -1,
) -> Float[Array, "..."]:
    r"""The softmax, with zeros in fully masked rows.

    $$P_a = \frac{\partial F}{\partial s_a} = e^{s_a - F}, \qquad F = \log \sum_a e^{s_a}$$

    A fully masked row has $F = -\infty$; its probabilities and gradients are 0, where
    `jax.nn.softmax` returns NaN. Differentiable to any order, in both modes.

    Args:
        scores: of any shape and floating dtype; minus infinity hides a key. The arithmetic is in
            float32 or wider.
        where: boolean, broadcastable to `scores`; False hides a key.
        axis: the axis of the keys.

    Returns:
        Probabilities of the shape and dtype of `scores`.

    Raises:
        TypeError: `scores` is not a floating array, `where` not a boolean one or `axis` not an
            integer.
        ValueError: `axis` is out of range, or `where` does not broadcast.

    Source: Tree Attention (arXiv 2408.04093), Appendix 11.

    Examples:
        >>> import jax.numpy as jnp
        >>> import energy_attn as ea
        >>> ea.safe_softmax(jnp.array([[0.0, 0.0], [-jnp.inf, -jnp.inf]])).tolist()
        [[0.5, 0.5], [0.0, 0.0]]
    """
    rows = _rows(scores, where, axis)
    weights, total, _ = softmax(rows)
    return jnp.moveaxis(weights / total, -1, axis).astype(scores.dtype)


def shifted_energy(
    scores: Float[Array, "..."],
    shift: Float[Array, "..."] | None = None,
    *,
    where: Bool[Array, "..."] | None = None,
    axis: int = -1,
) -> ShiftedEnergy:
    r"""The energy of shifted scores, and the shift.

    $$F' = \log \sum_a e^{s_a - m}, \qquad F = F' + m$$

    Three facts that are easy to get wrong:

    1. For any **constant** $m$ the gradient is that of $F$.
    2. $F'$ is not the energy: $m$ must be added back.
    3. If $m$ depends on the differentiated argument, as $m = \max_a s_a$ does, $F'$ has another
       gradient: in the source it is attention minus the value of the largest score. The default
       shift of this function is therefore held constant.

    Args:
        scores: as in [`safe_softmax`][energy_attn.safe_softmax], with its errors; likewise `where` and `axis`.
        shift: $m$, floating, of the shape of `scores` less `axis`; None takes the maximum, held constant
            (0 in a fully masked row).

    Returns:
        `(energy, shift)`, both of the shape of `scores` less `axis`, in float32 (float64).

    Source: Tree Attention (arXiv 2408.04093), Appendix 11; its statement that the gradient is the
    same holds only for a constant $m$.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.functional import shifted_energy
        >>> scores = jnp.array([1.0, 3.0])
        >>> energy, shift = shifted_energy(scores)
        >>> bool(jnp.allclose(energy + shift, jax.nn.logsumexp(scores)))
        True
    """
    rows = _rows(scores, where, axis)
    if shift is None:
        constant = lax.stop_gradient(rows.max(-1, initial=-jnp.inf))
        applied = safe_shift(constant)
    else:
        applied = checks.check_floating("shift", shift).astype(rows.dtype)
        if applied.shape != rows.shape[:-1]:
            raise ValueError(
                f"shift: wanted the shape of scores less axis, {rows.shape[:-1]}, "
                f"got {checks.received(shift)}"
            )
    return ShiftedEnergy(softmax(rows - applied[..., None]).lse, applied)


def _rows(scores: Array, where: Array | None, axis: int) -> Array:
    scores = checks.check_floating("scores", scores)
    axis = checks.check_axis("axis", axis, scores.ndim, "scores")
    rows = scores.astype(jnp.float64 if scores.dtype == jnp.float64 else jnp.float32)
    if where is not None:
        rows = jnp.where(included(where, scores.shape), rows, -jnp.inf)
    return jnp.moveaxis(rows, axis, -1)


def included(where: Array | None, shape: tuple[int, ...]) -> Array:
    """The argument `where=`, checked and broadcast to a shape; None includes everything."""
    if where is None:
        return jnp.ones(shape, bool)
    checks.check_broadcastable("where", checks.check_boolean("where", where), shape, leading=False)
    return jnp.broadcast_to(where, shape)
