"""Keys that go around a ring both ways, half of the heads each, against plain attention on one device in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn import attention, masks, scores
from energy_attn.distributed import SequenceParallel, collectives, make_mesh, shard_sequence

B, T, N, K, H, V = 2, 16, 4, 2, 8, 6


def arrays(bias) -> Any:
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, V), (B, T, N, V)
    rng = np.random.default_rng(0)
    found = [jnp.asarray(rng.normal(size=shape)) for shape in shapes]
    return *found, None if bias is None else jnp.asarray(rng.normal(size=bias))


def segments():
    return masks.Segments(jnp.array([[0] * 7 + [1] * 9, [0] * 3 + [1] * 13]))


CASES = {
    "causal": (None, lambda: {"is_causal": True}),
    "a bias of every head": ((B, N, T, T), dict),
    "a bias of all heads": ((1, 1, T, T), lambda: {"local_window_size": (5, 2)}),
    "a bias of keys": ((1, N, 1, T), lambda: {"key_value_seq_lengths": jnp.array([9, 16])}),
    "a bias of queries": ((B, 1, T, 1), lambda: {"mask": segments()}),
}


def both_modes(parallel, options):
    """Attention, its gradients, and its change in a direction."""

    def run(query, key, value, cotangent, bias):
        def out(*x):
            return attention(*x, parallel=parallel, **options)

        given = query, key, value, bias
        found, backward = jax.vjp(out, *given)
        return found, backward(cotangent), jax.jvp(out, given, jax.tree.map(jnp.cos, given))[1]

    return jax.jit(run)


@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives(name):
    """Half of the heads with the other half's keys, positions, bias or gradients; sums over too few rows."""
    shape, options = CASES[name]
    given, options = arrays(shape), options()
    wanted = both_modes(None, options)(*given)
    with jax.set_mesh(make_mesh((4,), ("device",), devices=jax.devices()[:4])):
        parallel = SequenceParallel("device", "ring", bidirectional=True)
        found = both_modes(parallel, options)(*given)
    for got, exact in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-13)


@pytest.mark.full
@pytest.mark.parametrize("method", ["ring", "hybrid"])
def test_layouts_and_second_order(method):
    """Positions of another order; a product with the Hessian; a ring over the slow axis alone."""
    *given, cotangent, _ = arrays(None)
    given[1:] = (
        jnp.repeat(x, 2, 2) for x in given[1:]
    )  # two heads of keys on each device of a node

    def curved(parallel):
        def loss(x):
            out = attention(*x, is_causal=True, parallel=parallel)
            weights = cotangent if parallel is None else shard_sequence(cotangent, parallel)
            return (weights * out**2).sum()

        def run(x):
            return jax.jvp(jax.grad(loss), (x,), (jax.tree.map(jnp.sin, x),))

        return jax.jit(run)

    wanted = curved(None)(given)
    with jax.set_mesh(make_mesh((4, 2), ("node", "device"))):
        parallel = SequenceParallel(("node", "device"), method, layout="zigzag", bidirectional=True)
        ordered = [shard_sequence(x, parallel) for x in given]
        found = curved(parallel)(ordered)
        wanted = jax.tree.map(lambda x: shard_sequence(x, parallel), wanted)
    for got, exact in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-12)


def test_what_is_sent():
    """All keys in both directions, or keys and values one by one: each hop is half of both, each way."""
    query, key, value = (x.astype(jnp.float32) for x in arrays(None)[:3])
    with jax.set_mesh(make_mesh((4,), ("device",), devices=jax.devices()[:4])):
        parallel = SequenceParallel("device", "ring", bidirectional=True)
        run = jax.jit(lambda *x: attention(*x, parallel=parallel))
        sent = collectives(run.lower(query, key, value).compile())
    half = B * (T // 4) * (K // 2) * (H + V) * 4
    assert [(c.kind, c.bytes, c.count) for c in sent] == [("collective-permute", half, 3)] * 2


@pytest.mark.parametrize(
    ("heads", "options", "words"),
    [
        (1, {}, "even number of heads of keys on a device for True, got 1"),
        (2, {"score": scores.SoftCap(5.0)}, "no score= for True"),
    ],
)
def test_heads_that_cannot(heads, options, words, unchecked):
    query, key, value, *_ = arrays(None)
    with jax.set_mesh(make_mesh((4,), ("device",), devices=jax.devices()[:4])):
        parallel = SequenceParallel("device", "ring", bidirectional=True)
        with pytest.raises(ValueError, match=f"^bidirectional: wanted .*{words}"):
            attention(query, key[:, :, :heads], value[:, :, :heads], parallel=parallel, **options)
