"""A device's own keys in the backward of a ring: one half first, and one last, while other gradients come home."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn import attention
from energy_attn.distributed import (
    SequenceParallel,
    make_mesh,
    methods,
    shard_sequence,
    unshard_sequence,
)
from tests.support.compare import close
from tests.support.meshes import on_host
from tests.support.problems import _make
from tests.support.reference import dense, dense_vjp

B, N, K, H, V, DEVICES = 2, 4, 2, 8, 6, 4


@pytest.mark.parametrize(
    ("size", "bias"),
    [
        pytest.param(3, (B, N, 3 * DEVICES, 3 * DEVICES), id="a bias of all"),
        pytest.param(3, (1, N, 1, 3 * DEVICES), id="a bias of keys"),
        pytest.param(3, (B, 1, 3 * DEVICES, 1), id="a bias of queries", marks=pytest.mark.full),
        pytest.param(1, (1, N, DEVICES, DEVICES), id="one key"),
    ],
)
def test_halves_of_odd_sizes(size, bias):
    """A key that is in neither half, or in both; the bias, mask, positions or segments of the other half.

    Gradients of keys and of a bias that are added to those of other keys.
    """
    tokens = size * DEVICES
    rng = np.random.default_rng(0)
    segments = (np.arange(tokens, dtype=np.int32) // 5)[None] * np.array([[0], [1]], np.int32)
    problem = _make(
        "own keys",
        *(B, tokens, tokens, N, K, H, V),
        bias=bias,
        mask=rng.random((1, 1, tokens, tokens)) < 0.8,
        is_causal=True,
        query_segment_ids=segments,
        key_segment_ids=segments,
    )
    parallel = SequenceParallel("device", methods.Ring("keys"))

    @jax.jit
    def run(arrays, cotangent):
        def attend(arrays):
            return attention(**arrays, **problem.options, parallel=parallel, return_energy=True)

        found, back = jax.vjp(attend, arrays)
        return found, back(cotangent)[0]

    arrays, given = on_host(problem)
    with jax.set_mesh(make_mesh((DEVICES,), ("device",), devices=jax.devices()[:DEVICES])):
        found, gradients = run(arrays, given)
    close(found, dense(problem), "state", 1e-13)
    close(gradients, dense_vjp(problem, *given), "gradient", 1e-13)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_halves_of_a_gather(layout):
    """Pieces of both halves whose keys, biases, or gradients are put back in the order of pieces."""
    tokens = 32 * 2
    problem = _make(
        "pieces", *(B, tokens, tokens, N, K, H, V), bias=(1, N, tokens, tokens), is_causal=True
    )
    arrays, given = on_host(problem)
    bias = arrays.pop("bias")
    parallel = SequenceParallel("device", "gather", layout=layout)

    @jax.jit
    def run(arrays, bias, cotangent):
        def attend(arrays, bias):
            return attention(
                **arrays, bias=bias, is_causal=True, parallel=parallel, return_energy=True
            )

        found, back = jax.vjp(attend, arrays, bias)
        return found, back(cotangent)

    with jax.set_mesh(make_mesh((2,), ("device",), devices=jax.devices()[:2])):
        shard = functools.partial(shard_sequence, parallel=parallel)
        order = np.asarray(shard(jnp.arange(tokens)[None]))[0]
        placed = jax.tree.map(lambda x: shard(jnp.asarray(x)), (arrays, given))
        found, (gradients, d_bias) = run(placed[0], bias[:, :, order][..., order], placed[1])
        back = functools.partial(unshard_sequence, parallel=parallel)
        found, gradients = jax.tree.map(lambda x: np.asarray(back(x)), (found, gradients))
    wanted = dense_vjp(problem, *given)
    close(found, dense(problem), "state", 1e-13)
    close(gradients, {name: wanted[name] for name in gradients}, "gradient", 1e-13)
    close(d_bias, wanted["bias"][:, :, order][..., order], "bias", 1e-13)
