"""States as messages: what a collective is given so that as few as possible are sent."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels._registry import vary_together


def transfer(collective: Callable[[Any], Any], state: AttentionState) -> AttentionState:
    """Hands both arrays of a state to one collective, which maps over trees and keeps last axes.

    On CPUs they travel as one array, in `lse`'s dtype: gloo would send each by itself. Elsewhere as
    a pair: XLA joins the two without copying, and `lse` as one more lane of `out` would fill up the
    next 128 lanes of a TPU. Raises nothing.
    """

    def packed(out: Array, lse: Array) -> AttentionState:
        joined = jnp.concatenate([out.astype(lse.dtype), lse[..., None]], -1)
        joined = collective(joined)
        return AttentionState(joined[..., :-1].astype(out.dtype), joined[..., -1])

    def apart(out: Array, lse: Array) -> AttentionState:
        return AttentionState(*collective((out, lse)))

    return lax.platform_dependent(*vary_together(state), cpu=packed, default=apart)


def same(tree: Any, axes: tuple[str, ...]) -> Any:
    """Arrays that are equal on all devices of `axes`, with a type that says so; sends nothing.

    A maximum over groups of one device each is how JAX lets that be said. It has no derivative.
    Raises nothing.
    """
    alone = [[i] for i in range(lax.axis_size(axes))]
    return lax.pmax(tree, axes, axis_index_groups=alone)
