"""Weights of given keys, their sums, and divergences: against the weights written out."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel
from tests.support.compare import close
from tests.support.complaints import complains
from tests.support.meshes import mesh_of, parallel_of
from tests.support.observables import measure
from tests.support.problems import BLOCKS, LARGE, PROBLEMS, Problem, cast
from tests.support.reference import rows
from tests.support.scores import sink_of, with_key
from tests.support.selection import few, few_rows

ROWS, KEYS = [-1, 0, 0], slice(1, None, 3)


def weights_of(problem, precision: Any = np.float64):
    """`[B, T, N, S]`."""
    return rows(problem, precision).weights.transpose(0, 2, 1, 3)


def factors(problem: Problem) -> np.ndarray:
    return problem.rng("factors").standard_normal(problem.query.shape[:3])


def importance_of(problem, factor, precision: Any = np.float64):
    return np.einsum("btns,btn->bsn", weights_of(problem, precision), factor)


def other_of(problem: Problem, width: int, heads: int | None = None, **changes) -> Problem:
    """The same rows and keys with other queries and keys, and no source, whose values would have their width."""
    rng = problem.rng("other")
    batch, query_len, number, _ = problem.query.shape
    key_len, kv_heads = problem.key.shape[1:3]
    kv_heads = heads or kv_heads
    own = {
        "query": rng.standard_normal((batch, query_len, number, width)),
        "key": rng.standard_normal((batch, key_len, kv_heads, width)),
        "value": rng.standard_normal((batch, key_len, kv_heads, 2)),
    }
    return dataclasses.replace(problem, **own, source=None, **changes)


def divergence(problem, other, precision: Any = np.float64):
    """By the weights, infinite where one of the first's is hidden in the second."""
    P, Q = rows(problem, precision), rows(other, precision)
    seen, there = np.isfinite(P.scores), np.isfinite(Q.scores)

    def logs(x, mask):
        lse = x.lse.transpose(0, 2, 1)[..., None]
        return np.where(mask, x.scores, 0) - np.where(mask, lse, 0)

    found = (P.weights * (logs(P, seen) - logs(Q, there & seen))).sum(-1)
    return np.where((seen & ~there).any(-1), np.inf, found).transpose(0, 2, 1)


def entropy(problem: Problem) -> np.ndarray:
    weights = weights_of(problem)
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


def made(problem: Problem, arrays=None, **more) -> ea.Gibbs:
    arrays = problem.arrays if arrays is None else arrays
    return measure(**jax.tree.map(jnp.asarray, arrays), **problem.options, **more)


EVERY = [
    *(("everything", True), ("positions_causal", False)),
    *(("rule_nested", False), ("no_keys", True)),
]


@pytest.mark.parametrize(("name", "sunk"), few_rows(EVERY, 2))
def test_weights_and_importance(name, sunk):
    """A key of another row or head; a sink's share that stays with the keys; a row without keys that is NaN."""
    problem = PROBLEMS[name]
    sink = sink_of(problem) if sunk else None
    whole = problem if sink is None else with_key(problem, sink)

    @jax.jit
    def run(arrays):
        F = made(problem, arrays, sink=None if sink is None else jnp.asarray(sink))
        some = F.weights(rows=ROWS, keys=KEYS)
        factor = jnp.asarray(factors(problem))
        return F.weights(), some, F.importance(factor), F.importance(grouped=True)

    size = problem.key.shape[1]
    wanted = weights_of(whole)[..., :size]
    sums = importance_of(whole, factors(problem))[:, :size]
    plain = wanted.sum(1).swapaxes(1, 2)
    grouped = plain.reshape(*problem.key.shape[:3], plain.shape[2] // problem.key.shape[2]).sum(-1)
    close(run(cast(problem, jnp.float64)[0]), (wanted, wanted[:, ROWS][..., KEYS], sums, grouped))


PAIRS = {
    "same mask": ("window_causal", {"width": 3}),
    "heads": ("grouped", {"width": 3, "heads": 3}),
    "lengths": ("ragged", {"width": 4}),
    "wider mask": ("window", {"width": 5, "local_window_size": None}),
    "narrower mask": ("window_pair", {"width": 5, "is_causal": True}),
    "all options": ("everything", {"width": 2, "is_causal": False, "bias": None}),
    "blocks": ("blocks_rule", {"width": 3, "rule": None, "is_causal": True}),
    # of which a causal mask cuts its keys into more blocks than another
    "several blocks": ("large", {"width": 2, "is_causal": False}),
    "no rows": ("no_queries", {"width": 3}),
}


@pytest.mark.parametrize("name", few(list(PAIRS), "same mask", "narrower mask"))
def test_divergence(name):
    """A mean of the other's scores that is of other keys; a hidden key that is finite; queries of the other's group."""
    name, options = PAIRS[name]
    problem = (PROBLEMS | BLOCKS | LARGE)[name]
    other = other_of(problem, **options)

    @jax.jit
    def run(arrays, others):
        P, Q = made(problem, arrays), made(other, others)
        return P.kl(Q), P.cross_entropy(Q)

    kl = divergence(problem, other)
    found = run(problem.arrays, other.arrays)
    close(found, (kl, kl + entropy(problem)))


def test_divergence_of_itself():
    """Zero, and its derivative too, where rounding makes the difference negative: and its second that of the scores."""
    q, k, v, u = jax.random.normal(jax.random.key(0), (4, 7, 2, 4), jnp.float64)
    at = lambda q: ea.FreeEnergy().at(q, k, v)  # noqa: E731
    kl = jax.jit(lambda t: at(q).kl(at(q + t * u)).sum())
    close((kl(0.0), jax.grad(kl)(0.0)), (0.0, 0.0))
    # half of the Fisher information: the variance of what the scores change by
    change = jnp.einsum("tnh,snh->tns", u, k) / 2
    weights = at(q).weights()
    mean = (weights * change).sum(-1, keepdims=True)
    close(jax.grad(jax.grad(kl))(0.0), np.asarray((weights * (change - mean) ** 2).sum()))


def test_union():
    """A key counted in the part that it is not in; parts whose means are not merged by their shares; sinks."""
    problem = dataclasses.replace(PROBLEMS["grouped"], scale=0.5)
    other = other_of(problem, 3)
    sink, apart = sink_of(problem), sink_of(other) + 0.4

    def halves(problem, arrays, sink):
        energy = ea.FreeEnergy(scale=problem.scale)
        with_sink = dataclasses.replace(energy, sink=None if sink is None else jnp.asarray(sink))
        q, k, v = (arrays[x] for x in ("query", "key", "value"))
        return energy.at(q, k[:, :3], v[:, :3]) | with_sink.at(q, k[:, 3:], v[:, 3:])

    @jax.jit
    def run(arrays, others):
        P, Q = halves(problem, arrays, sink), halves(other, others, apart)
        plain = halves(other, others, None)
        found = P.kl(Q), P.kl(plain), plain.kl(Q)
        return (*found, P.weights(keys=[-1, 2, 3]), P.importance(jnp.asarray(factors(problem))))

    both = with_key(problem, sink), with_key(other, apart)
    without = with_key(other, np.full(6, -np.inf))
    kl = [divergence(*x) for x in (both, (both[0], without), (without, both[1]))]
    wanted = weights_of(both[0])[..., :-1]
    last = wanted[..., [-1, 2, 3]], importance_of(both[0], factors(problem))[:, :-1]
    close(run(problem.arrays, other.arrays), (*kl, *last))


def asked(P, Q):
    factor = jnp.linspace(0.0, 1.0, P().size, dtype=jnp.float64).reshape(P().shape)
    return P.kl(Q), P.weights(rows=ROWS, keys=KEYS), P.weights(), P.importance(factor)


@pytest.mark.parametrize("kind", few(["8", "2x4 explicit"], "8"))
def test_over_devices(kind):
    """A device's own keys for all; the first device's indices on each; a hidden key on another device."""
    problem, causal = PROBLEMS["everything"], PROBLEMS["causal"]
    others = [other_of(problem, 5), other_of(problem, 2, is_causal=False, bias=None)]
    wide = other_of(causal, 3, is_causal=False, local_window_size=(3, 9))

    @jax.jit
    def run(arrays, *others_arrays):
        parallel = parallel_of(kind)
        P = made(problem, arrays, parallel=parallel)
        pairs = zip(others, others_arrays, strict=True)
        found = [asked(P, made(x, y, parallel=parallel)) for x, y in pairs]
        by_position = (made(x, parallel=parallel) for x in (causal, wide))
        return found[0], found[1][0], next(by_position).kl(next(by_position))

    with jax.set_mesh(mesh_of(kind)):
        found, *kl = jax.device_get(run(problem.arrays, *(x.arrays for x in others)))
    weights = weights_of(problem)
    factor = np.linspace(0, 1, weights[..., 0].size).reshape(weights.shape[:3])
    sums = np.einsum("btns,btn->bsn", weights, factor)
    wanted = divergence(problem, others[0]), weights[:, ROWS][..., KEYS], weights, sums
    close((found, kl), (wanted, [divergence(problem, others[1]), divergence(causal, wide)]))


def test_inside_shard_map():
    """Indices of a device's own keys, and rows of its own queries, where the mesh's axes are the user's."""
    problem = dataclasses.replace(PROBLEMS["causal"], is_causal=False)
    arrays = {name: np.repeat(x, 8, 1)[:, :16] for name, x in problem.arrays.items()}
    problem = dataclasses.replace(problem, **arrays)
    other = other_of(problem, 3)
    spec = jax.P(None, "device")

    def run(arrays, others):
        parallel = SequenceParallel("device")
        P, Q = (ea.FreeEnergy(parallel=parallel).at(**x) for x in (arrays, others))
        return P.kl(Q), P.weights(keys=[3, 14]), P.importance()

    with jax.set_mesh(mesh_of("8")):
        mapped = jax.jit(jax.shard_map(run, in_specs=(spec, spec), out_specs=spec))
        found = mapped(problem.arrays, other.arrays)
    weights = weights_of(problem)
    wanted = divergence(problem, other), weights[..., [3, 14]], weights.sum(1).swapaxes(1, 2)
    close(jax.device_get(found), wanted)


def test_sixteen_bits():
    """Weights and sums that are rounded to 16 bits."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 4), jnp.bfloat16)
    F = ea.FreeEnergy(is_causal=True).at(q, k, v)
    wide = ea.FreeEnergy(is_causal=True).at(*(x.astype(jnp.float32) for x in (q, k, v)))
    close((F.weights(), F.importance()), (wide.weights(), wide.importance()))


Q, K, V = np.zeros((3, 5, 2, 4), np.float32)
WIDE = np.zeros((3, 5, 2, 4))
BAD = {
    "row": (lambda F: F.weights(rows=5), ValueError, "rows", "below 5", "5"),
    "key": (lambda F: F.weights(keys=[0, -6]), ValueError, "keys", "below 5", "-6"),
    "kind": (lambda F: F.weights(keys=[0.5]), TypeError, "keys", "integers", "0.5"),
    "axes": (lambda F: F.weights(rows=[[0]]), TypeError, "rows", "one axis", "[[0]]"),
    "factor": (lambda F: F.importance(Q), ValueError, "rows", "(5, 2)", "[5,2,4]"),
    "integers": (lambda F: F.importance(np.ones((5, 2), int)), TypeError, "rows", "float", "int"),
    "grouped": (lambda F: F.importance(grouped=1), TypeError, "grouped", "True or False", "1"),
    "other": (lambda F: F.kl(V), TypeError, "other", "Gibbs", "float32"),
    "keys": (lambda F: F.kl(measure(Q, K[:3], V[:3])), ValueError, "other", "(5,) keys", "(3,)"),
    "parts": (lambda F: F.kl(F | F), ValueError, "other", "(5,) keys", "(5, 5)"),
    "rows": (lambda F: F.kl(measure(Q[:2], K, V)), ValueError, "other", "(5, 2)", "(2, 2)"),
    "precision": (lambda F: F.cross_entropy(measure(*WIDE)), TypeError, "other", "float32", "64"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("unchecked")
def test_bad_input(name):
    """An error that does not name the argument, what was wanted and what came."""
    ask, error, argument, wanted, received = BAD[name]
    complains(lambda: ask(measure(Q, K, V)), error, argument, received, wanted)


def test_too_many_weights():
    """A matrix that fills the memory, and no word on what does not."""
    x = jax.ShapeDtypeStruct((8000, 2, 4), jnp.float32)
    with pytest.raises(ValueError, match=r"rows: wanted at most 64000000 .*8000, 2, 8000.*imp"):
        jax.eval_shape(lambda x: ea.FreeEnergy().at(x, x, x).weights(), x)


def test_traced_indices():
    """An index out of range that is the last key instead, inside a program that cannot raise."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
    F = ea.FreeEnergy().at(q, k, v)
    found = jax.jit(lambda i: F.weights(rows=i, keys=i))(jnp.asarray([1, -1, 5]))
    last = jnp.asarray([1, 4])
    close(found[:2, :, :2], F.weights()[last][..., last], tolerance=1e-6)
    assert bool(jnp.isnan(found[2]).all()) and bool(jnp.isnan(found[..., 2]).all())
