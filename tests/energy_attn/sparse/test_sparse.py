"""Sparse attention by Tsallis' entropy against sorting, on one device and on meshes; what it does not take."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel, collectives, shard_sequence
from tests.support.compare import close
from tests.support.complaints import complains
from tests.support.meshes import make_mesh
from tests.support.selection import few, few_rows


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


def sorted_weights(alpha, s, xp=jnp):
    """The weights by sorting: for each size of the support, its threshold; the right size is the largest that fits.

    Of 1.5 and 2 the threshold is in closed form; derivatives are JAX's, of the sorting and the root.
    """
    # Relative to the largest score, which the weights do not depend on, and without keys far below: squares cancel.
    top = jax.lax.stop_gradient(s).max(-1, keepdims=True)
    s = s - xp.where(xp.isneginf(top), 0.0, top)
    s = xp.where(s < -1e3, -xp.inf, s)
    x = xp.sort((alpha - 1) * s, -1)[..., ::-1]
    safe = xp.where(xp.isneginf(x), 0.0, x)
    size = xp.arange(1.0, s.shape[-1] + 1, dtype=s.dtype)
    mean, square = (xp.cumsum(safe**n, -1) / size for n in (1, 2))
    if alpha == 2:
        threshold = mean - 1 / size
    else:
        inside = mean**2 - square + 1 / size
        threshold = mean - xp.sqrt(xp.where(inside > 0, inside, 1.0))
        threshold = xp.where(inside > 0, threshold, xp.inf)
    fits = (threshold <= x) & ~xp.isneginf(x)
    index = xp.maximum(fits.sum(-1, keepdims=True) - 1, 0)
    threshold = xp.take_along_axis(threshold, index, -1)
    above = (alpha - 1) * xp.where(xp.isneginf(s), -1e9, s) - threshold
    inside = (above > 0) & ~xp.isneginf(s)
    return xp.where(inside, xp.where(inside, above, 1.0) ** round(1 / (alpha - 1)), 0.0)


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
    """Attention, by `jax.grad`, and the energies."""
    energy = ea.FreeEnergy(regulariser=ea.Tsallis(alpha), sink=sink, **more)
    given = {name: jnp.asarray(x) for name, x in arrays.items() if name != "source"}

    def total(source):
        found = energy(**given, mask=jnp.asarray(SEEN), source=source)
        return jnp.where(jnp.isneginf(found), 0.0, found).sum(), found

    return jax.grad(total, has_aux=True)(arrays["source"])


def number(state):
    return jnp.sin(state[0]).sum() + jnp.where(jnp.isneginf(state[1]), 0, jnp.cos(state[1])).sum()


def derivatives(f, x):
    """A state and the gradients of its number: one program."""

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def run(x):
        state = f(x)
        return number(state), state

    return run(x)


def cosines(x):
    return jax.tree.map(lambda a: np.cos(np.arange(a.size) + 1.0).reshape(a.shape), x)


@functools.cache
def by_sorting(alpha, sink):
    """The arrays, and what is right of them."""
    x = {"arrays": ARRAYS, "sink": SINK} if sink else {"arrays": ARRAYS}
    return x, jax.device_get(derivatives(lambda x: dense(alpha, **x), x))


@pytest.mark.parametrize(
    ("alpha", "sink"), few_rows([(2.0, False), (2.0, True), (1.5, False), (1.5, True)])
)
def test_by_sorting(alpha, sink):
    """Another threshold, a support of its own in the derivative, a source that the weights do not see."""
    x, wanted = by_sorting(alpha, sink)
    close(derivatives(lambda x: ours(alpha, **x), x), wanted, tolerance=1e-9)
    weights = sorted_weights(alpha, np.asarray(scores_of(**ARRAYS)[0]), np)
    assert 0.1 < float((weights > 0).mean()) < 0.7  # it is sparse, and no argmax


@pytest.mark.smoke
@pytest.mark.parametrize("order", few([2, 3], 2))
def test_higher_order(order):
    """A derivative that is right but once, by either mode: the threshold held constant, or one step of Newton."""
    x = {name: ARRAYS[name] for name in ("query", "value")} | {"sink": SINK}
    fixed = {name: jnp.asarray(ARRAYS[name]) for name in ("key", "bias")}

    def attend(sink, **given):
        energy = ea.FreeEnergy(regulariser=ea.Tsallis(1.5), sink=sink)
        return energy.attention(**fixed, **given, mask=jnp.asarray(SEEN), return_energy=True)

    def sort(sink, **given):
        return dense(1.5, {**fixed, **given, "source": 0 * ARRAYS["source"]}, sink)

    def along(f):
        """The derivatives along a direction, of the gradient and of it again."""

        def g(x):
            return number(f(**x))

        def once(x):
            return jax.jvp(jax.grad(g), (x,), (cosines(x),))

        return once if order == 2 else lambda x: jax.jvp(once, (x,), (cosines(x),))

    close(*(jax.jit(along(f))(x) for f in (attend, sort)), tolerance=1e-7)


@functools.cache
def with_weights(alpha):
    """A program for `(out, energy)` and the weights, which are the gradient of the energy in the scores."""

    def total(bias, arrays):
        out, energy = ours(alpha, arrays | {"bias": bias})
        return jnp.where(jnp.isneginf(energy), 0.0, energy).sum(), (out, energy)

    def run(arrays):
        bias = jnp.broadcast_to(arrays["bias"], (B, N, T, S))
        return jax.grad(total, has_aux=True)(bias, arrays)

    return jax.jit(run)


@pytest.mark.parametrize("alpha", few([1.05, 1.3, 1.8], 1.3))
def test_fenchel_young(alpha):
    """Weights that maximise something else: F is the maximum, reached by them, and softmax's limit at 1."""
    p, (out, energy) = jax.device_get(with_weights(alpha)(ARRAYS))
    rows = np.isfinite(energy.transpose(0, 2, 1))
    found = energy.transpose(0, 2, 1)[rows]
    draws = np.random.default_rng(0).dirichlet(np.ones(S), (30, B, N, T)) ** 2

    @jax.jit
    def objectives(p):
        """Those of the weights and of others, and the mean of the values under the weights."""
        s, value = scores_of(**ARRAYS)
        safe, others = (jnp.where(jnp.isneginf(s), 0.0, x) for x in (s, draws + 1e-30))
        others = others / jnp.maximum(others.sum(-1, keepdims=True), 1e-300)
        values = ((x * safe).sum(-1) + entropy(alpha, x) for x in (p, others))
        return *values, jnp.einsum("bnts,bsnv->btnv", p, value)

    reached, below, mean = jax.device_get(objectives(p))
    assert (below[:, rows] <= found + 1e-9).all()
    close(reached[rows], found, tolerance=1e-9)
    close(p.sum(-1)[rows], np.ones(rows.sum()), tolerance=1e-9)
    close(out, mean, tolerance=1e-9)


def test_not_finite():
    """A NaN that the support leaves out: the row is NaN, and its neighbours are not."""
    query = ARRAYS["query"].copy()
    query[0, 0, 0, 0] = np.nan
    _, (out, energy) = jax.device_get(with_weights(1.3)(ARRAYS | {"query": query}))
    assert np.isnan(energy[0, 0, 0]) and np.isnan(out[0, 0, 0]).all()
    assert np.isfinite(np.delete(energy[0, 0], 0)).all()


def _by_sorting(q, k, v):
    s = np.einsum("btnh,bsnh->bnts", q, k)
    return np.einsum("bnts,bsnv->btnv", sorted_weights(1.5, s, np).astype(v.dtype), v)


def test_float32():
    """A threshold that stops short in float32, or goes round for ever; scores that are large, equal, or one."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 600, 1, 8)).astype(np.float32)
    energy = ea.FreeEnergy(regulariser=ea.Tsallis(1.5), scale=1.0)

    @jax.jit
    def run(q, number):
        return energy.attention(q, jnp.asarray(k), jnp.asarray(v), key_value_seq_lengths=number)

    for factor in (0.0, 1.0, 30.0):
        scaled = np.float32(factor) * q
        out = run(scaled, np.array([600], np.int32))
        wide = (x.astype(np.float64) for x in (scaled, k, v))
        exact, naive = _by_sorting(*wide), _by_sorting(scaled, k, v)
        error, usual = (np.abs(np.asarray(x, np.float64) - exact).max() for x in (out, naive))
        assert error <= 4 * usual + 1e-6
    one = run(q, np.array([1], np.int32))
    np.testing.assert_allclose(one, np.broadcast_to(v[:, :1], one.shape), rtol=1e-6)


@pytest.mark.parametrize(
    ("alpha", "size"), few_rows([(1.5, 2.0**100), (1.5, 2.0**24), (2.0, 2.0**100), (2.0, 2.0**24)])
)
def test_large_scores(alpha, size):
    """A threshold whose rounding is larger than the weights: the largest keys have them all, in equal parts."""
    # Small integers times a power of two: their products are exact in float32, and many are equal.
    query, key = np.random.default_rng(0).integers(-2, 3, (2, 1, 40, 1, 3)).astype(np.float64)
    value = np.random.default_rng(1).standard_normal((1, 40, 1, 2))
    energy = ea.FreeEnergy(regulariser=ea.Tsallis(alpha), scale=1.0)

    def sort(query, key, value):
        s = jnp.einsum("btnh,bsnh->bnts", query, key)
        p = sorted_weights(alpha, s)
        # at a maximum: their derivative would be rounding times a large score
        best = jax.lax.stop_gradient(p)
        found = (best * s).sum(-1) + entropy(alpha, best)
        return jnp.einsum("bnts,bsnv->btnv", p, value), found.transpose(0, 2, 1)

    def run(f, dtype):
        def total(*arrays):
            out, energy = f(*arrays)
            return (jnp.sin(out).sum() + energy.sum()), (out, energy / size)

        given = (jnp.asarray(x, dtype) for x in (size * query, key, value))
        slopes, state = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*given)
        return jax.device_get((slopes[0], slopes[1] / size, slopes[2], state))

    found = run(lambda *x: energy.attention(*x, return_energy=True), jnp.float32)
    close(found, run(sort, jnp.float64), tolerance=1e-5)


@pytest.mark.parametrize("method", few(["tree", "ring"], "ring"))
def test_mesh(method):
    """Thresholds of each device's own keys; gradients of part of them; keys that are moved."""
    parallel = SequenceParallel("s", method=method)
    x, wanted = by_sorting(2.0, False)

    def spread(path, a):
        a = jnp.asarray(a)
        return a if path[-1].key == "bias" else shard_sequence(a, parallel)

    with jax.set_mesh(make_mesh((4,), ("s",), devices=jax.devices()[:4])):
        given = jax.tree.map_with_path(spread, x)
        found = derivatives(lambda x: ours(2.0, **x, parallel=parallel), given)
    close(jax.device_get(found), wanted, tolerance=1e-9)


def test_cache_sends_two_numbers_a_row():
    """A step of decoding whose traffic grows with the context."""
    energy = ea.FreeEnergy(regulariser=ea.Tsallis(1.5), parallel=SequenceParallel("s"))

    def sent(length):
        q, k = (jax.ShapeDtypeStruct((1, n, 2, 4), jnp.float64) for n in (1, length))
        with jax.set_mesh(make_mesh((4,), ("s",), devices=jax.devices()[:4])):
            program = jax.jit(energy.attention).lower(q, k, k).compile()
        return [(x.kind, x.bytes) for x in collectives(program)]

    short, long = sent(64), sent(512)
    assert short == long and {op for op, _ in short} == {"all-reduce"}


def test_layers_and_wrong_ones():
    """A layer that forgets the regulariser; what has no measure of Gibbs; wrong numbers."""
    energy = ea.FreeEnergy(regulariser=ea.Tsallis())
    layer = ea.nn.MultiheadAttention(2, 4, energy=energy, key=jax.random.key(0))
    x = jnp.asarray(RNG.standard_normal((5, 4)), layer.query_proj.weight.dtype)
    plain = ea.nn.MultiheadAttention(num_heads=2, query_size=4, key=jax.random.key(0))
    found, other = eqx.filter_jit(lambda *layers: [f(x, x, x) for f in layers])(layer, plain)
    assert not np.allclose(found, other)
    q = jnp.ones((1, 3, 2, 4))
    cache = KVCache.empty(1, 8, 2, 4, dtype=q.dtype)
    asked = [
        lambda: energy.at(q, q, q),
        lambda: cache.at(q[:, :1], energy=energy),
        lambda: ea.record(functools.partial(energy.attention, q, q))(q),
    ]
    for call in asked:
        complains(call, NotImplementedError, "regulariser", "Tsallis", "None")
    named = ea.FreeEnergy(regulariser=ea.Tsallis(), implementation="reference")
    told = NotImplementedError, "implementation", "reference", "blockwise"
    complains(lambda: named.attention(q, q, q), *told)
    complains(lambda: ea.Tsallis(1.0), ValueError, "alpha", "1.0", "above 1")
    complains(lambda: ea.Tsallis(2.5), ValueError, "alpha", "2.5", "up to 2")
