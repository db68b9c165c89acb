"""The merge strategy of states that go around a ring."""

import jax.numpy as jnp
from jax import lax

from energy_attn.kernels import AttentionState, merge_all
from energy_attn.kernels.internal import vary_together

from ._abstract import AbstractMerge, Axes
from ._packing import as_invariant, permuted


class Ring(AbstractMerge):
    """Every state to every device, one step at a time: $p - 1$ steps of one state.

    [`Ring`][energy_attn.distributed.methods.Ring] folds so where all devices have the
    same queries.
    """

    name = "ring"
    least_axes = 1
    automatic = False  # a gather sends the same bytes in one collective

    def fold(self, state: AttentionState, axes: Axes) -> AttentionState:
        devices = lax.axis_size(axes)
        pairs = [(i, (i + 1) % devices) for i in range(devices)]
        state = vary_together(state, axes)

        def step(here: AttentionState, _: None) -> tuple[AttentionState, AttentionState]:
            following = permuted(here, axes, pairs)
            return following, following

        # a loop, so that the program is as long for any number of devices
        _, arrived = lax.scan(step, state, None, length=devices - 1)
        # from device i come those of i - 1, i - 2, ..., i + 1
        found = (
            jnp.concatenate([x[::-1], own[None]]) for x, own in zip(arrived, state, strict=True)
        )
        first = lax.axis_index(axes) + 1
        ranked = AttentionState(*(jnp.roll(x, first, axis=0) for x in found))
        return as_invariant(merge_all(ranked, axis=0), axes)
