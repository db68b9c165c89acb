"""Rules of importance: each against the formula of its paper, written with dense weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel
from tests.support.compare import close
from tests.support.complaints import complains
from tests.support.meshes import mesh_of
from tests.support.observables import measure, slopes
from tests.support.problems import BLOCKS, PROBLEMS, Problem, cast, tangents
from tests.support.reference import dense, rows
from tests.support.scores import sink_of, with_key
from tests.support.selection import few, few_rows

RULES = "attention", "snapkv", "dropkv", "entropy"
WINDOW, POOL = 3, 3


def squares(log_weights, distances):
    return jnp.exp(2 * log_weights) + 0 * distances


def of_pairs(problem: Problem, rule, precision=np.float64) -> np.ndarray:
    """The number of each row and key, `[B, T, N, S]`."""
    P = rows(problem, precision).weights.transpose(0, 2, 1, 3)
    if rule in ("attention", "snapkv"):
        return P
    if rule == "entropy":
        return -P * np.log(np.where(P > 0, P, 1))
    if rule is squares:
        return P**2
    out = dense(problem)[0] if precision is np.float64 else _attention(problem, P)
    value = np.repeat(problem.value, P.shape[2] // problem.value.shape[2], 2).astype(precision)
    residual = out[:, :, :, None] - value.transpose(0, 2, 1, 3)[:, None]
    return (P / np.maximum(1 - P, 1e-6)) ** 2 * (residual**2).sum(-1)


def _attention(problem: Problem, P: np.ndarray) -> np.ndarray:
    value = np.repeat(problem.value, P.shape[2] // problem.value.shape[2], 2)
    return np.einsum("btns,bsnv->btnv", P, value.astype(P.dtype))


def summed(problem: Problem, rule, window: int | None, precision=np.float64) -> np.ndarray:
    """`[B, S, N]`: over the last rows, all of which are there."""
    pairs = of_pairs(problem, rule, precision)
    return (pairs if window is None else pairs[:, -window:]).sum(1).swapaxes(1, 2)


def pooled(x: np.ndarray, size: int) -> np.ndarray:
    """Means of successive keys, with zeros past the ends."""
    half = size // 2
    padded = np.pad(x, ((0, 0), (half, half), (0, 0)))
    return sum(padded[:, i : i + x.shape[1]] for i in range(size)) / size


def wanted_of(problem: Problem, rule: str, keys: int) -> np.ndarray:
    """A rule by name with `WINDOW` rows and `POOL` keys where it has them."""
    if rule in ("attention", "entropy"):
        return summed(problem, rule, None)[:, :keys]
    old = summed(problem, rule, WINDOW)[:, : keys - WINDOW]
    old = pooled(old, POOL) if rule == "snapkv" else old
    newest = np.full((len(old), WINDOW, old.shape[2]), np.inf)
    return np.concatenate([old, newest], 1)


def asked(F: ea.Gibbs, rule: str, **more):
    options = {"snapkv": {"window": WINDOW, "pool": POOL}, "dropkv": {"window": WINDOW}}
    return F.importance(rule=rule, **options.get(rule, {}), **more)


@pytest.mark.parametrize(
    ("name", "sunk"),
    few_rows(
        [("everything", True), ("causal", False), ("grouped", False), ("blocks_rule", False)], 2
    ),
)
def test_rules(name, sunk):
    """A weight of a sink in none of the keys; a row of another window; neighbours of another batch entry."""
    problem = (PROBLEMS | BLOCKS)[name]
    sink = sink_of(problem) if sunk else None
    whole = problem if sink is None else with_key(problem, sink)
    keys = problem.key.shape[1]
    plain = not any("lengths" in x or "positions" in x for x in problem.options)

    @jax.jit
    def run(arrays):
        F = measure(**arrays, **problem.options, sink=None if sink is None else jnp.asarray(sink))
        named = {x: asked(F, x) for x in RULES if plain or x in ("attention", "entropy")}
        return named | {"custom": F.importance(rule=squares)}

    found = run(cast(problem, jnp.float64)[0])
    wanted = {x: wanted_of(whole, x, keys) for x in found if x != "custom"}
    wanted["custom"] = summed(whole, squares, None)[:, :keys]
    close(found, wanted, tolerance=1e-10)


def test_order_of_keys():
    """Neighbours by slot in the place of neighbours by position; the newest slots; absent rows in the window."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 8, 2, 4))
    shuffled = np.asarray([5, 0, -1, 3, 6, 2, 7, 1, -1, 4])
    slots = np.where(shuffled < 0, 0, shuffled)
    key, value = (jnp.asarray(x[:, slots]) for x in (k, v))
    padded = jnp.concatenate([jnp.asarray(q), jnp.ones((1, 2, 2, 4))], 1)
    query_positions = jnp.asarray([[*range(8), -1, -1]])
    energy = ea.FreeEnergy(is_causal=True)
    positions = jnp.asarray(shuffled[None])
    F = energy.at(padded, key, value, query_positions=query_positions, key_positions=positions)
    G = energy.at(*map(jnp.asarray, (q, k, v)))
    for rule in RULES:
        found, wanted = asked(F, rule)[0], asked(G, rule)[0]
        there = shuffled >= 0
        np.testing.assert_allclose(found[there], wanted[slots[there]], rtol=1e-10)
        assert not jnp.isinf(found[~there]).any()


@pytest.mark.parametrize("rule", few(RULES, "dropkv", "snapkv"))
def test_over_devices(rule):
    """A pool of one device's keys; weights by the sums of one device."""
    problem = dataclasses.replace(PROBLEMS["causal"], source=None)
    arrays, _ = cast(problem, jnp.float64)
    with jax.set_mesh(mesh_of("8")):
        F = measure(**arrays, **problem.options, parallel=SequenceParallel("device"))
        found = jax.device_get(asked(F, rule))
    close(found, wanted_of(problem, rule, problem.key.shape[1]), rule, 1e-10)


def test_union_and_groups():
    """Neighbours in two parts; a sum over the heads of another group."""
    problem = PROBLEMS["grouped"]
    arrays, _ = cast(problem, jnp.float64)
    q, k, v = (arrays[x] for x in ("query", "key", "value"))
    energy, size = ea.FreeEnergy(), 3
    places = [jnp.arange(x, y, dtype=jnp.int32)[None] for x, y in ((0, size), (size, k.shape[1]))]
    here = jnp.zeros((1, q.shape[1]), jnp.int32)
    parts = zip((k[:, :size], k[:, size:]), (v[:, :size], v[:, size:]), places, strict=True)
    first, second = (energy.at(q, x, y, query_positions=here, key_positions=z) for x, y, z in parts)
    bare = dataclasses.replace(problem, source=None)
    for rule in RULES:
        wanted = wanted_of(bare, rule, k.shape[1])
        groups = wanted.reshape(*problem.key.shape[:3], -1).sum(-1)
        close(asked(first | second, rule, grouped=True), groups, rule, 1e-10)


@pytest.mark.parametrize("rule", few(["dropkv", "entropy"], "dropkv"))
def test_derivatives(rule):
    """A gradient of an importance that is zero, NaN where a key is hidden, or that of constant weights."""
    problem = dataclasses.replace(PROBLEMS["causal"], source=None)
    arrays, _ = cast(problem, jnp.float64)

    def finite(x, xp):
        return (xp.where(xp.isfinite(x), x, 0.0) ** 2).sum()

    def loss(arrays):
        F = measure(**arrays, **problem.options)
        return finite(F.importance(rule=rule, window=problem.query.shape[1] - 1), jnp)

    def exact(moved):
        found = summed(moved, rule, problem.query.shape[1] - 1, np.longdouble)
        keep = 0 if rule == "entropy" else problem.query.shape[1] - 1
        return finite(found[:, : found.shape[1] - keep], np)

    along = tangents(problem)
    moved = {name: jnp.asarray(along[name]) for name in arrays}
    gradients, change = jax.device_get(
        jax.jit(lambda x: (jax.grad(loss)(x), jax.jvp(loss, (x,), (moved,))[1]))(arrays)
    )
    rate = sum(np.vdot(gradients[name], along[name]) for name in gradients)
    wanted = slopes(exact, problem, along)
    np.testing.assert_allclose([rate, change], wanted, rtol=1e-7)


def test_a_cache_that_keeps_what_a_rule_says():
    """Tokens of the window that are evicted, or a rule that takes slots for positions."""
    rng = np.random.default_rng(0)
    key, value = map(jnp.asarray, rng.standard_normal((2, 1, 20, 2, 4)))
    query = jnp.asarray(rng.standard_normal((1, 20, 4, 4)))
    cache = KVCache.empty(1, 32, 2, 4, dtype=jnp.float64, block_size=32).append(key, value)
    F = cache.at(query, energy=ea.FreeEnergy(is_causal=True))
    numbers = asked(F, "snapkv", grouped=True)
    small = cache.evict(12, importance=numbers)
    G = ea.FreeEnergy(is_causal=True).at(query, key, value)
    wanted = np.asarray(asked(G, "snapkv", grouped=True))[0]
    found = {head: set(np.flatnonzero(small.positions[0] >= 0)) for head in range(2)}
    assert all(len(x) == 8 for x in found.values())
    for head in range(2):
        best = np.sort(np.argsort(-wanted[:, head], kind="stable")[:8])
        kept = small.key[0, small.positions[0] >= 0, head]
        np.testing.assert_array_equal(np.sort(kept[:, 0]), np.sort(key[0, best, head, 0]))


def test_memory():
    """A matrix of weights: memory that grows as the square of the length."""

    def peak(size, rule):
        x = jax.ShapeDtypeStruct((1, size, 1, 8), jnp.float32)

        def run(x):
            return ea.FreeEnergy(is_causal=True).at(x, x, x).importance(rule=rule)

        return jax.jit(run).lower(x).compile().memory_analysis().temp_size_in_bytes

    for rule in ("dropkv", "snapkv"):
        assert peak(8192, rule) < 2.5 * peak(4096, rule) + 2**20


X = np.ones((4, 2, 3), np.float32)


@pytest.mark.parametrize(
    ("options", "error", "name", "received", "wanted"),
    [
        ({"rule": "h2o"}, ValueError, "rule", "'h2o'", "'attention', 'snapkv'"),
        ({"rule": 3}, TypeError, "rule", "int 3", "(log_weights, distances)"),
        ({"rule": lambda x: x}, TypeError, "rule", "(x)", "(log_weights, distances)"),
        ({"window": 0}, ValueError, "window", "0", "at least 1"),
        ({"window": 1.0}, TypeError, "window", "float 1.0", "integer"),
        ({"pool": 4}, ValueError, "pool", "4", "odd"),
        ({"pool": 0}, ValueError, "pool", "0", "at least 1"),
    ],
)
def test_wrong_calls(unchecked, options, error, name, received, wanted):
    """A rule that is ignored, or an error that names another argument."""
    x = jnp.asarray(X)
    F = ea.FreeEnergy().at(x, x, x)
    complains(lambda: F.importance(**options), error, name, received, wanted)
