"""Keys that go around a ring both ways, half of the heads each, against dense attention in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn import attention, scores
from energy_attn.distributed import (
    SequenceParallel,
    collectives,
    make_mesh,
    methods,
    shard_sequence,
)
from tests.support.compare import close
from tests.support.meshes import on_host
from tests.support.problems import Problem, _make, cast, tangents
from tests.support.reference import dense, dense_jvp, dense_vjp
from tests.support.selection import few

B, T, N, K, H, V = 2, 16, 4, 2, 8, 6


def problem_of(bias=None, **options) -> Problem:
    return _make("both ways", B, T, T, N, K, H, V, bias=bias, **options)


SEGMENTS = np.array([[0] * 7 + [1] * 9, [0] * 3 + [1] * 13], np.int32)
CASES = {
    "a bias of every head": problem_of(
        (1, N, T, T), is_causal=True, query_segment_ids=SEGMENTS, key_segment_ids=SEGMENTS
    ),
    "a bias of every row": problem_of((B, N, T, T), is_causal=True),
    "a bias of all heads": problem_of((1, 1, T, T), local_window_size=(5, 2)),
    "a bias of keys": problem_of((1, N, 1, T), key_value_seq_lengths=np.array([9, 16], np.int32)),
    "a bias of queries": problem_of((B, 1, T, 1)),
}


@pytest.mark.parametrize("name", few(list(CASES), "a bias of every head"))
def test_values_and_derivatives(name):
    """Half of the heads with the other half's keys, positions, bias or gradients; sums over too few rows."""
    problem = CASES[name]
    parallel = SequenceParallel("device", methods.Ring(bidirectional=True))

    def attend(arrays):
        return attention(**arrays, **problem.options, parallel=parallel, return_energy=True)

    @jax.jit
    def run(arrays, cotangent, change):
        found, back = jax.vjp(attend, arrays)
        return found, back(cotangent)[0], jax.jvp(attend, (arrays,), (change,))[1]

    (arrays, given), change = on_host(problem), tangents(problem)
    with jax.set_mesh(make_mesh((4,), ("device",), devices=jax.devices()[:4])):
        found, gradients, moved = run(arrays, given, change)
    close(found, dense(problem), "state", 1e-13)
    close(gradients, dense_vjp(problem, *given), "gradient", 1e-13)
    close(moved, dense_jvp(problem, change), "change", 1e-13)


@pytest.mark.full
@pytest.mark.parametrize("method", [methods.Ring, methods.Hybrid])
def test_layouts_and_second_order(method):
    """Positions of another order; a product with the Hessian; a ring over the slow axis alone."""
    # two heads of keys on each device of a node
    problem = _make("both ways twice", B, T, T, N, 2 * K, H, V, source=True)
    *given, cotangent = cast(problem, jnp.float64)[0].values()

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
        parallel = SequenceParallel(("node", "device"), method(bidirectional=True), layout="zigzag")
        ordered = [shard_sequence(x, parallel) for x in given]
        found = curved(parallel)(ordered)
        wanted = jax.tree.map(lambda x: shard_sequence(x, parallel), wanted)
    close(found, wanted, tolerance=1e-12)


def test_what_is_sent():
    """All keys in both directions, or keys and values one by one: each hop is half of both, each way."""
    query, key, value = cast(problem_of(), jnp.float32)[0].values()
    with jax.set_mesh(make_mesh((4,), ("device",), devices=jax.devices()[:4])):
        parallel = SequenceParallel("device", methods.Ring(bidirectional=True))
        run = jax.jit(lambda *x: attention(*x, parallel=parallel))
        sent = collectives(run.lower(query, key, value).compile())
    half = B * (T // 4) * (K // 2) * (H + V) * 4
    assert [(c.kind, c.bytes, c.count) for c in sent] == [("collective-permute", half, 3)] * 2


@pytest.mark.parametrize(
    ("heads", "options", "words"),
    [
        (1, {}, "even number of heads of keys on a device for True, got 1"),
        (2, {"score": scores.SoftCap(5.0)}, "False for a score=, got True"),
    ],
)
def test_heads_that_cannot(heads, options, words, unchecked):
    query, key, value = cast(problem_of(), jnp.float64)[0].values()
    with jax.set_mesh(make_mesh((4,), ("device",), devices=jax.devices()[:4])):
        parallel = SequenceParallel("device", methods.Ring(bidirectional=True))
        with pytest.raises(ValueError, match=f"^bidirectional: wanted .*{words}"):
            attention(query, key[:, :, :heads], value[:, :, :heads], parallel=parallel, **options)
