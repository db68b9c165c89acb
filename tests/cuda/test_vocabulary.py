"""Losses over a vocabulary, compiled for GPUs that are not there."""

import jax
import pytest
from jax.sharding import SingleDeviceSharding

import energy_attn as ea
from tests.support.cuda import nodes
from tests.support.programs import check_vocabulary_traffic

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("user_settings")]


def test_memory():
    """More than a gigabyte besides the gradients, where an array of logits in float32 has eight."""
    place = SingleDeviceSharding(nodes(1, 1).devices.item())
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        for shape, dtype in (
            ((16_384, 2048), "bfloat16"),
            ((131_072, 2048), "bfloat16"),
            ((16_384,), "int32"),
        )
    ]
    step = jax.jit(jax.value_and_grad(ea.softmax_cross_entropy, (0, 1)))
    program = step.lower(*arrays).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1 << 30


def test_over_a_mesh():
    """Logits or hidden states that are sent forward; gradients that are summed in float32 or twice."""
    check_vocabulary_traffic(nodes(2, 8), "node", "device", 16_384, 131_072, 2048)
