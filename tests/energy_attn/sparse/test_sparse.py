"""Sparse attention by Tsallis' entropy against sorting, on one device and on meshes; what it does not take."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel, collectives, shard_sequence
from tests.support.complaints import complains
from tests.support.meshes import make_mesh
from tests.support.selection import few


@pytest.fixture(autouse=True)
def of_any_rank():
    """The arithmetic of this file, which is by hand, broadcasts."""
    with jax.numpy_rank_promotion("allow"):
        yield


B, T, S, N, K, H, V = 2, 8, 8, 4, 2, 3, 2
RNG = np.random.default_rng(3)
ARRAYS = {
    "query": 2 * RNG.standard_normal((B, T, N, H)),
    "key": 2 * RNG.standard_normal((B, S, K, H)),
    "value": RNG.standard_normal((B, S, K, V)),
    "source": RNG.standard_normal((B, T, N, V)),
    "bias": RNG.standard_normal((1, N, 1, S)),
}
SINK = RNG.standard_normal(N)
SEEN = np.tril(np.ones((T, S), bool), 1)
SEEN[3] = False  # a row without keys
SEEN[:, 5] = False


def scores_of(query, key, value, source, bias, sink=None):
    """`[B, N, T, S]`, minus infinity where hidden, and the values of each head; the sink is one more key."""
    key, value = (jnp.repeat(x, N // K, 2) for x in (key, value))
    s = H**-0.5 * jnp.einsum("btnh,bsnh->bnts", query, key) + bias
    s = s + jnp.einsum("btnv,bsnv->bnts", source, value)
    s = jnp.where(SEEN, s, -jnp.inf)
    if sink is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sink[:, None, None], (B, N, T, 1))], -1)
        value = jnp.concatenate([value, jnp.zeros((B, 1, N, V))], 1)
    return s, value


def sorted_weights(alpha, s):
    """The weights by sorting: for each size of the support, its threshold; the right size is the largest that fits.

    Of 1.5 and 2 the threshold is in closed form; derivatives are JAX's, of the sorting and the root.
    """
    x = jnp.sort((alpha - 1) * s, -1)[..., ::-1]
    safe = jnp.where(jnp.isneginf(x), 0.0, x)
    size = jnp.arange(1.0, s.shape[-1] + 1, dtype=s.dtype)
    mean, square = (jnp.cumsum(safe**n, -1) / size for n in (1, 2))
    if alpha == 2:
        threshold = mean - 1 / size
    else:
        inside = mean**2 - square + 1 / size
        threshold = mean - jnp.sqrt(jnp.where(inside > 0, inside, 1.0))
        threshold = jnp.where(inside > 0, threshold, jnp.inf)
    fits = (threshold <= x) & ~jnp.isneginf(x)
    index = jnp.maximum(fits.sum(-1, keepdims=True) - 1, 0)
    threshold = jnp.take_along_axis(threshold, index, -1)
    above = (alpha - 1) * jnp.where(jnp.isneginf(s), -1e9, s) - threshold
    inside = (above > 0) & ~jnp.isneginf(s)
    return jnp.where(inside, jnp.where(inside, above, 1.0) ** round(1 / (alpha - 1)), 0.0)


def entropy(alpha, p):
    power = jnp.where(p > 0, jnp.where(p > 0, p, 1.0) ** alpha, 0.0)
    return (p - power).sum(-1) / (alpha * (alpha - 1))


def dense(alpha, arrays, sink=None):
    s, value = scores_of(**arrays, sink=sink)
    p = sorted_weights(alpha, s)
    out = jnp.einsum("bnts,bsnv->btnv", p, value)
    energy = jnp.where(p > 0, p * jnp.where(p > 0, s, 0.0), 0.0).sum(-1) + entropy(alpha, p)
    energy = jnp.where(jnp.isneginf(s).all(-1), -jnp.inf, energy)
    return out, energy.transpose(0, 2, 1)


def ours(alpha, arrays, sink=None, **more):
    energy = ea.FreeEnergy(regulariser=ea.Tsallis(alpha), sink=sink, **more)
    source = arrays["source"]
    given = {name: x for name, x in arrays.items() if name != "source"}
    given |= {"mask": jnp.asarray(SEEN)}
    gradient = jax.grad(
        lambda z: jnp.where(jnp.isneginf(f := energy(**given, source=z)), 0.0, f).sum()
    )
    return gradient(source), energy(**given, source=source)


def number(state):
    return jnp.sin(state[0]).sum() + jnp.where(jnp.isneginf(state[1]), 0, jnp.cos(state[1])).sum()


def derivatives(f, x):
    u = jax.tree.map(lambda a: jnp.asarray(np.cos(np.arange(a.size) + 1.0)).reshape(a.shape), x)

    def g(x):
        return number(f(x))

    return jax.jit(lambda: (f(x), jax.grad(g)(x), jax.jvp(g, (x,), (u,))[1]))()


def close(found, wanted, tolerance=1e-9):
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.product
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("sink", [False, True])
def test_by_sorting(alpha, sink):
    """Another threshold, a support of its own in the derivative, a source that the weights do not see."""
    x = {"arrays": ARRAYS, "sink": SINK} if sink else {"arrays": ARRAYS}
    x = jax.tree.map(jnp.asarray, x)
    found = derivatives(lambda x: ours(alpha, **x), x)
    wanted = derivatives(lambda x: dense(alpha, **x), x)
    close(found, wanted)
    weights = sorted_weights(alpha, scores_of(**ARRAYS)[0])
    assert 0.1 < float((weights > 0).mean()) < 0.7  # it is sparse, and no argmax


def test_second_order():
    """A derivative that is right but once: the threshold held constant, or one step of Newton."""
    names = "query", "source", "value"
    arrays = jax.tree.map(jnp.asarray, ARRAYS)
    x = {name: arrays[name] for name in names}
    u = jax.tree.map(lambda a: jnp.asarray(np.cos(np.arange(a.size) + 1.0)).reshape(a.shape), x)

    def third(f):
        def g(x):
            return number(f(1.5, arrays | x))

        def along(x):
            return jax.jvp(jax.grad(g), (x,), (u,))[1]

        return jax.jit(lambda: jax.jvp(along, (x,), (u,)))()

    close(third(ours), third(dense), 1e-7)


@pytest.mark.parametrize("alpha", few([1.05, 1.3, 1.8], 1.3))
def test_fenchel_young(alpha):
    """Weights that maximise something else: F is the maximum, reached by them, and softmax's limit at 1."""
    arrays = jax.tree.map(jnp.asarray, ARRAYS)
    out, energy = ours(alpha, arrays)
    s, value = scores_of(**arrays)
    rows = np.isfinite(energy.transpose(0, 2, 1))
    safe = jnp.where(jnp.isneginf(s), 0.0, s)

    def objective(p):
        return (p * safe).sum(-1) + entropy(alpha, p)

    hidden = jnp.isneginf(s)
    draws = np.random.default_rng(0).dirichlet(np.ones(S), (30, *s.shape[:3]))
    draws = jnp.where(hidden, 0.0, draws**2 + 1e-30)
    draws = draws / jnp.maximum(draws.sum(-1, keepdims=True), 1e-300)
    found = energy.transpose(0, 2, 1)
    assert (objective(draws)[:, rows] <= found[rows] + 1e-9).all()
    # the gradient of F in the scores is the weights, at which the maximum is reached
    bias = jnp.broadcast_to(arrays["bias"], s.shape)

    def total(bias):
        f = ours(alpha, arrays | {"bias": bias})[1]
        return jnp.where(jnp.isneginf(f), 0.0, f).sum()

    p = jax.grad(total)(bias)
    close(objective(p)[rows], found[rows])
    close(p.sum(-1)[rows], jnp.ones(rows.sum()))
    close(out, jnp.einsum("bnts,bsnv->btnv", p, value))


def _by_sorting(q, k, v):
    s = jnp.einsum("btnh,bsnh->bnts", q, k)
    return jnp.einsum("bnts,bsnv->btnv", sorted_weights(1.5, s).astype(v.dtype), v)


def test_float32():
    """A threshold that stops short in float32, or goes round for ever; scores that are large, equal, or one."""
    key = jax.random.key(0)
    q, k, v = (x.astype(jnp.float32) for x in jax.random.normal(key, (3, 1, 600, 1, 8)))
    energy = ea.FreeEnergy(regulariser=ea.Tsallis(1.5), scale=1.0)
    for factor in (0.0, 1.0, 30.0):
        scaled = jnp.float32(factor) * q
        out = energy.attention(scaled, k, v)
        wide = (x.astype(jnp.float64) for x in (scaled, k, v))
        exact, naive = _by_sorting(*wide), _by_sorting(scaled, k, v)
        error, usual = (np.abs(np.asarray(x, np.float64) - exact).max() for x in (out, naive))
        assert error <= 4 * usual + 1e-6
    one = energy.attention(q, k[:, :1], v[:, :1])
    np.testing.assert_allclose(one, jnp.broadcast_to(v[:, :1], one.shape), rtol=1e-6)


def test_not_finite():
    """A NaN that the support leaves out: the row is NaN, and its neighbours are not."""
    arrays = jax.tree.map(jnp.asarray, ARRAYS)
    arrays["query"] = arrays["query"].at[0, 0, 0, 0].set(jnp.nan)
    out, energy = ours(1.5, arrays)
    assert np.isnan(energy[0, 0, 0]) and np.isnan(out[0, 0, 0]).all()
    assert np.isfinite(np.delete(energy[0, 0], 0)).all()


@pytest.mark.parametrize("method", few(["tree", "ring"], "ring"))
def test_mesh(method):
    """Thresholds of each device's own keys; gradients of part of them; keys that are moved."""
    parallel = SequenceParallel("s", method=method)
    x = jax.tree.map(jnp.asarray, ARRAYS)
    bias = x.pop("bias")

    def spread(x):
        return ours(1.5, x | {"bias": bias}, parallel=parallel)

    with jax.set_mesh(make_mesh((4,), ("s",), devices=jax.devices()[:4])):
        found = derivatives(spread, jax.tree.map(lambda a: shard_sequence(a, parallel), x))
    close(found, derivatives(lambda x: dense(1.5, x | {"bias": bias}), x))


def test_cache_sends_two_numbers_a_row():
    """A step of decoding whose traffic grows with the context."""
    energy = ea.FreeEnergy(regulariser=ea.Tsallis(1.5), parallel=SequenceParallel("s"))

    def sent(length):
        q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, length, 2, 4))
        with jax.set_mesh(make_mesh((4,), ("s",), devices=jax.devices()[:4])):
            program = jax.jit(energy.attention).lower(q, k, k).compile()
        return [(x.kind, x.bytes) for x in collectives(program)]

    assert sent(64) == sent(512)
    assert {op for op, _ in sent(64)} == {"all-reduce"}


def test_layers_and_wrong_ones():
    """A layer that forgets the regulariser; what has no measure of Gibbs; wrong numbers."""
    energy = ea.FreeEnergy(regulariser=ea.Tsallis())
    layer = ea.MultiheadAttention(num_heads=2, query_size=4, key=jax.random.key(0), energy=energy)
    x = jnp.asarray(RNG.standard_normal((5, 4)), layer.query_proj.weight.dtype)
    plain = ea.MultiheadAttention(num_heads=2, query_size=4, key=jax.random.key(0))
    assert not np.allclose(layer(x, x, x), plain(x, x, x))
    q = jnp.ones((1, 3, 2, 4))
    cache = KVCache.empty(1, 8, 2, 4, dtype=q.dtype).append(q, q)
    asked = [
        lambda: energy.at(q, q, q),
        lambda: cache.at(q[:, :1], energy=energy),
        lambda: ea.record(functools.partial(energy.attention, q, q))(q),
    ]
    for call in asked:
        complains(call, NotImplementedError, "regulariser", "Tsallis", "None")
    named = ea.FreeEnergy(regulariser=ea.Tsallis(), implementation="reference")
    complains(
        lambda: named.attention(q, q, q),
        NotImplementedError,
        "implementation",
        "reference",
        "blockwise",
    )
    complains(lambda: ea.Tsallis(1.0), ValueError, "alpha", "1.0", "above 1")
    complains(lambda: ea.Tsallis(2.5), ValueError, "alpha", "2.5", "up to 2")
