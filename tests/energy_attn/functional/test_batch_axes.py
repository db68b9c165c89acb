"""Any number of batch axes, which broadcast among query, key and value, against dense float64 with the same axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn import masks
from energy_attn.distributed import SequenceParallel
from energy_attn.kernels import local_attention
from tests.support.compare import close
from tests.support.meshes import mesh_of

LEAD, T, S, N, K, H, V = (2, 3), 5, 7, 4, 2, 3, 6


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def ints(*shape, below, least=0):
    drawn = np.random.default_rng(shape).integers(least, below, shape)
    return np.asarray(drawn, np.int32)


LENGTHS, POSITIONS = ints(*LEAD, below=S + 1, least=1), ints(1, 3, T, below=S)
KEY_POSITIONS = ints(*LEAD, S, below=S) * np.asarray(
    np.arange(S) > 0, np.int32
)  # each query sees the first key
PREFIX = ints(2, 1, below=S)
# arrays that are differentiated; other options, and the keys that they show by definition, `[*B, N, T, S]`
CASES = {
    "whole": ({}, {}, True),
    "keys of one axis": ({"key": normal(2, 1, S, K, H), "value": normal(1, 3, S, K, V)}, {}, True),
    "one query": ({"query": normal(1, 1, T, N, H)}, {}, True),
    "bias": ({"bias": normal(2, 1, N, 1, S)}, {}, True),
    "mask": ({}, {"mask": normal(3, 1, T, S) > -1}, normal(3, 1, T, S) > -1),
    "sink": ({"sink": normal(1, 3, N)}, {"is_causal": True}, np.tri(T, S, dtype=bool)),
    "lengths": (
        {},
        {"key_value_seq_lengths": LENGTHS},
        (np.arange(S) < LENGTHS[..., None])[:, :, None, None],
    ),
    "positions": (
        {},
        {"is_causal": True, "query_positions": POSITIONS, "key_positions": KEY_POSITIONS},
        (POSITIONS[..., None] >= KEY_POSITIONS[:, :, None])[:, :, None],
    ),
    "rule": (
        {},
        {"mask": masks.Causal() | masks.Prefix(PREFIX)},
        np.tri(T, S, dtype=bool) | (np.arange(S) < PREFIX[..., None, None, None]),
    ),
}


def problem(case):
    changes, options, seen = CASES[case]
    arrays = {"query": normal(*LEAD, T, N, H), "key": normal(*LEAD, S, K, H, seed=1)}
    arrays = {**arrays, "value": normal(*LEAD, S, K, V, seed=2), **changes}
    options = {
        name: x if x is True else jax.tree.map(jnp.asarray, x) for name, x in options.items()
    }
    return jax.tree.map(jnp.asarray, arrays), options, seen


def dense(arrays, seen):
    """Attention and its energies by definition."""
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    key, value = (jnp.repeat(x, N // K, -2) for x in (key, value))
    scores = jnp.einsum("...tnh,...snh->...nts", query, key) * H**-0.5 + arrays.get("bias", 0.0)
    scores = jnp.where(jnp.broadcast_to(seen, scores.shape), scores, -jnp.inf)
    if "sink" in arrays:
        sink = jnp.broadcast_to(arrays["sink"][..., None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], -1)
    lse = jax.nn.logsumexp(scores, -1)
    weights = jnp.exp(scores - lse[..., None])[..., : key.shape[-3]]
    return jnp.einsum("...nts,...snv->...tnv", weights, value), jnp.moveaxis(lse, -2, -1)


def attend(arrays, options):
    rest = {name: x for name, x in arrays.items() if name not in ("query", "key", "value")}
    qkv = arrays["query"], arrays["key"], arrays["value"]
    return ea.attention(*qkv, **rest, **options, return_energy=True)


def derivatives(function, arrays):
    """The value, its gradient, its tangent, and the tangent of its gradient, along a fixed direction."""
    along = jax.tree.map(lambda x: normal(*x.shape, seed=3), arrays)

    def loss(arrays):
        out, lse = function(arrays)
        return (out * normal(*out.shape, seed=4)).sum() + (lse * jnp.cos(lse)).sum()

    tangent = jax.jvp(function, (arrays,), (along,))[1]
    return function(arrays), tangent, jax.jvp(jax.grad(loss), (arrays,), (along,))


@pytest.mark.parametrize("case", CASES)
def test_several_batch_axes(case):
    """An array that is paired with the rows of another batch entry, or a derivative that is not summed over an axis
    that it broadcasts along."""
    arrays, options, seen = problem(case)
    found = jax.jit(functools.partial(derivatives, lambda x: attend(x, options)))(arrays)
    wanted = jax.jit(functools.partial(derivatives, lambda x: dense(x, seen)))(arrays)
    close(jax.tree.leaves(found), jax.tree.leaves(wanted), case)


def test_the_source_and_observables_have_the_batch_axes():
    """A figure of a measure whose axes are those of the kernel, or of the query alone."""
    arrays, _, _ = problem("one query")
    qkv = arrays["query"], arrays["key"], arrays["value"]
    whole = tuple(jnp.broadcast_to(x, (*LEAD, *x.shape[2:])) for x in qkv)
    source, key = jnp.asarray(normal(*LEAD, T, N, V)), jax.random.key(0)

    def figures(F, source):
        return {
            "energy": F(source),
            "out": F.tilt(source).attention(),
            "entropy": F.entropy(),
            "covariance": F.covariance(source),
            "importance": F.importance(),
            "weights": F.weights(rows=1, keys=slice(2, 5)),
            "moments": F.score_moments(),
            "kl": F.kl(F.tilt(0.1 * source)),
            "union": (F | F).attention(),
        }

    F = ea.FreeEnergy(is_causal=True).at(*qkv)
    one = jax.vmap(jax.vmap(lambda *x: figures(ea.FreeEnergy(is_causal=True).at(*x[:3]), x[3])))
    close(jax.tree.leaves(figures(F, source)), jax.tree.leaves(one(*whole, source)))
    assert F.sample(key=key).shape == (*LEAD, T, N, 1)
    state, flat = local_attention(*qkv), (x.reshape(6, *x.shape[2:]) for x in whole)
    close(tuple(x.reshape(6, *x.shape[2:]) for x in state), local_attention(*flat))


@pytest.mark.parametrize("first", [True, False])
def test_batch_axes_over_a_mesh(first):
    """Batch axes that JAX partitions, joined in another order than their shards; keys sharded by `parallel=`."""
    arrays = {"query": normal(4, 4, 8, N, H), "key": normal(4, 4, 8, K, H)}
    arrays = jax.tree.map(jnp.asarray, arrays | {"value": normal(4, 4, 8, K, V)})
    spec = P("node", None, "device") if first else P(None, "node", "device")
    options = {"parallel": SequenceParallel("device", batch="node"), "is_causal": True}
    mesh = mesh_of("2x4")
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, NamedSharding(mesh, spec))
        found = jax.jit(functools.partial(derivatives, lambda x: attend(x, options)))(placed)
    wanted = derivatives(lambda x: dense(x, np.tri(8, dtype=bool)), arrays)
    close(jax.tree.leaves(found), jax.tree.leaves(wanted))


def test_batch_axes_split_by_types():
    """A result whose type is not that of the query, or an error of JAX's reshape, on explicit mesh axes."""
    arrays = {"query": normal(4, 3, T, N, H), "key": normal(1, 3, S, K, H)}
    arrays = jax.tree.map(jnp.asarray, arrays | {"value": normal(4, 1, S, K, V)})
    wanted = derivatives(lambda x: dense(x, True), arrays)
    mesh = mesh_of("2x4 explicit")
    with jax.set_mesh(mesh):
        placed = dict(arrays, query=jax.device_put(arrays["query"], NamedSharding(mesh, P("node"))))
        found = jax.jit(functools.partial(derivatives, lambda x: attend(x, {})))(placed)
        assert found[0][0].sharding.spec[0] == "node"
        second = jax.device_put(arrays["query"][:, :2], NamedSharding(mesh, P(None, "node")))
        with pytest.raises(ValueError, match="wanted only the first of several batch axes split"):
            ea.attention(second, second, second)
    close(jax.tree.leaves(found), jax.tree.leaves(wanted))
