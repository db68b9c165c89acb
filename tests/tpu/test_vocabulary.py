"""Losses over a vocabulary, compiled for TPUs that are not there: memory, products and what chips send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from tests.support.programs import check_vocabulary_traffic
from tests.support.tpu import compiled, devices, temporary

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("user_settings")]
TOKENS, WORDS, WIDTH = 16_384, 131_072, 2048
step = jax.value_and_grad(ea.softmax_cross_entropy, (0, 1))


def test_memory():
    """More than a gigabyte besides the gradients, where an array of logits in float32 has eight."""
    arrays = ("bfloat16", TOKENS, WIDTH), ("bfloat16", WORDS, WIDTH), ("int32", TOKENS)
    assert temporary(compiled("v5p", step, *arrays, kernels=0)) < 1 << 30


def test_over_a_mesh():
    """Logits or hidden states that are sent forward; gradients that are summed in float32 or twice."""
    names = "data", "model"
    mesh = Mesh(np.array(devices("v5p")).reshape(2, -1), names, (AxisType.Auto,) * 2)
    check_vocabulary_traffic(mesh, *names, TOKENS, WORDS, WIDTH)


def test_chunks_of_tokens():
    """A second product of the logits of a chunk, or an array of logits, where data is sharded and numbers are wide."""
    mesh = Mesh(np.array(devices("v5p")), ("data",), (AxisType.Auto,))
    places = ((TOKENS, 512), P("data")), ((WORDS, 512), P()), ((TOKENS,), P("data"))
    kinds = jnp.float32, jnp.float32, jnp.int32
    arrays = [
        jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, spec))
        for (shape, spec), kind in zip(places, kinds, strict=True)
    ]
    loss = functools.partial(
        ea.softmax_cross_entropy, parallel=ea.VocabularyParallel(tokens="data")
    )
    with jax.set_mesh(mesh):
        program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
    chunk = 4 * 512 * WORDS
    assert program.memory_analysis().temp_size_in_bytes < 4 * WORDS * 512 + 3 * chunk
    # the body of the loop counts once
    assert program.cost_analysis()["flops"] < 1.2 * 3 * 2 * 512 * WORDS * 512
