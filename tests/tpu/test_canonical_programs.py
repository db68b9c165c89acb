"""The canonical kernels, compiled for TPUs: a tile is the same program in all calls; the schedule of the forward."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from energy_attn import attention
from tests.support.reproducible_programs import (
    gradients_over_a_mesh,
    sent_in_nodes,
    step_over_a_cache,
)
from tests.support.tpu import compiled, devices, every_chip
from tests.support.tpu_listings import CALLS, listed

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("user_settings")]
KERNELS = {"softmax", "to_queries", "to_keys", "tangent"}


def test_a_tile_is_one_program():
    """A constant of a tile that depends on the lengths of a call, by which its numbers would be computed otherwise."""
    found = listed("tiles", "v5e", "v5p")
    for chip, calls in found.items():
        assert len(calls) == len(CALLS)
        for kernels in calls:
            assert kernels.keys() == KERNELS, chip
            assert kernels == calls[0], chip
            # a product, an exponential and a sum of 128 rows and 256 keys
            assert {"vadd.f32", "vmul.f32", "vpop.erf"} <= kernels["softmax"].keys()


@every_chip
def test_widest(chip):
    """Tiles of the widest heads that the kernel takes and that do not fit on a chip; a call that goes to another."""
    run = functools.partial(attention, is_causal=True, reproducible=True)

    def with_gradients(*arrays):
        out, back = jax.vjp(run, *arrays)
        return out, back(out)

    shapes = [("float32", 1, n, heads, 256) for n, heads in ((600, 4), (900, 2), (900, 2))]
    compiled(chip, with_gradients, *shapes, kernels=3)


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
def test_over_a_mesh(chip):
    """Keys that a step over a cache sends, or nodes that grow with its blocks; a gradient that devices add up."""
    mesh = Mesh(np.array(devices(chip)[:4]), ("device",))
    for blocks in (1, 4):
        assert sent_in_nodes(step_over_a_cache(mesh, blocks)) == pytest.approx(blocks, rel=0.01)
    if chip == "v5p":  # JAX 0.10.2 cannot read the text of the other program (async-update)
        return
    # the sum of the outputs is one number
    assert gradients_over_a_mesh(mesh) == {("all-gather", True), ("all-reduce", False)}


def test_larger_blocks_take_fewer_bundles():
    """Blocks that are larger on a chip where XLA's schedule does not gain by it, or a step that takes longer."""
    found = listed("schedule", "v5e", "v6e")
    small, own = found["v5e"]
    assert small == own < 2600
    small, own = found["v6e"]
    assert own < 0.9 * small < 0.9 * 2150
