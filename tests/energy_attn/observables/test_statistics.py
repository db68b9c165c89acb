"""What training reads of the forward pass: attention with its statistics in one pass, and the largest scores."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.observables import exactly, measure, slopes
from tests.support.problems import PROBLEMS, Problem, cast, tangents
from tests.support.programs import instructions
from tests.support.reference import dense, rows
from tests.support.scores import sink_of, with_key
from tests.support.selection import few, few_rows


def exact_statistics(problem: Problem, keys: Problem | None = None) -> dict[str, np.ndarray]:
    """Statistics of a problem, and the largest scores of its keys without those of sinks."""
    found, (out, energy) = exactly(problem), dense(problem)
    return {
        "out": out,
        "energy": energy,
        "entropy": found["entropy"],
        "mean_score": found["mean score"],
        "score_max": largest(keys or problem),
    }


def largest(problem: Problem, precision=np.float64) -> np.ndarray:
    return rows(problem, precision).scores.max(-1, initial=-np.inf).transpose(0, 2, 1)


KINDS = "dot", "while"
NAMES = "everything grouped value_narrower mask_nothing no_keys scale_negative_source".split()


@pytest.mark.parametrize("size", few([1e4, 1e10, 1e17], 1e10))
def test_a_large_sink(size):
    """Scores of a sink that cancel in an entropy's gradient: 6, where it is 0."""
    q, k, v = np.float32(np.random.default_rng(0).standard_normal((3, 2, 6, 2, 4)))

    def total(query, sink):
        return ea.FreeEnergy(sink=sink).at(query, jnp.asarray(k), jnp.asarray(v)).entropy().sum()

    for x in jax.grad(total, (0, 1))(jnp.asarray(q), jnp.full(2, size, jnp.float32)):
        assert not x.any()


@pytest.mark.parametrize(
    ("name", "sunk"),
    few_rows(
        [("decode_few", True), ("value_narrower", False), *itertools.product(NAMES, (False, True))],
        2,
    ),
)
def test_values(name, sunk):
    """Statistics of the keys alone beside a sink, of the values' other half, or a NaN in a fully masked row."""
    problem = PROBLEMS[name]
    arrays, _ = cast(problem, jnp.float64)
    sink = sink_of(problem) if sunk else None
    given = None if sink is None else jnp.asarray(sink)

    @jax.jit
    def run(arrays):
        F = measure(**arrays, **problem.options, sink=given)
        blocks = measure(**arrays, **problem.options, sink=given, implementation="blockwise")
        more = {"largest": F.score_max(), "of blocks": blocks.statistics().score_max}
        return F.statistics()._asdict() | more

    found = run(arrays)
    whole = problem if sink is None else with_key(problem, sink)
    # a sink is no score
    top = largest(problem)
    close(found, exact_statistics(whole, problem) | {"largest": top, "of blocks": top})


@pytest.mark.parametrize("parallel", few([("8", "tree"), ("2x4", "ring")], ("8", "tree")))
def test_over_devices(parallel):
    """A maximum or a mean of one device's keys; a subgradient that every device adds."""
    mesh, method = parallel
    axes = ("device",) if mesh == "8" else ("node", "device")
    problem = replace(PROBLEMS["everything"], source=None)
    arrays, _ = cast(problem, jnp.float64)

    def run(arrays, **options):
        F = measure(**arrays, **problem.options, **options)
        top = F.score_max()
        return (jnp.where(jnp.isfinite(top), top, 0.0) ** 2).sum(), (F.statistics()._asdict(), top)

    with jax.set_mesh(mesh_of(mesh)):
        of_mesh = SequenceParallel(axes, method)
        program = jax.jit(jax.grad(lambda x: run(x, parallel=of_mesh), has_aux=True))
        gradients, (statistics, top) = jax.device_get(program(arrays))
    close(statistics, exact_statistics(problem))
    close(top, largest(problem), "largest", 1e-12)

    def loss(moved):
        top = largest(moved, np.longdouble)
        return (np.where(np.isfinite(top), top, 0) ** 2).sum()

    along = tangents(problem)
    rate = sum(np.vdot(gradients[name], along[name]) for name in gradients)
    np.testing.assert_allclose(rate, slopes(loss, problem, along), rtol=1e-9)


def test_unions_and_scores():
    """A maximum, or an entropy, of one part of a union; those of the products in the place of those of the scores."""
    problem = PROBLEMS["grouped"]
    tilt = np.ones((*problem.query.shape[:-1], problem.value.shape[-1]))

    def ask(F):
        return {"largest": F.score_max(), "Rényi 2": F.renyi(2), **F.statistics()._asdict()}

    @jax.jit
    def run(query, key, value, tilt):
        energy = ea.FreeEnergy()
        F = energy.at(query, key[:, :3], value[:, :3]) | energy.at(query, key[:, 3:], value[:, 3:])
        capped = ea.FreeEnergy(score=ea.scores.SoftCap(0.5)).at(query, key, value)
        return ask(F.tilt(tilt)), ask(capped)

    capped = replace(problem, scale=0.0, bias=0.5 * np.tanh(rows(problem).scores / 0.5))
    found = run(**problem.arrays, tilt=tilt)
    for x, whole in zip(found, (replace(problem, source=tilt), capped), strict=True):
        wanted = exact_statistics(whole) | {"largest": largest(whole)}
        close(x, wanted | {"Rényi 2": exactly(whole)["Rényi 2"]}, tolerance=1e-12)


@pytest.mark.parametrize("implementation", few(["blockwise", "reference"], "blockwise"))
def test_subgradient(implementation):
    """A gradient of the largest score that is zero, NaN, or another key's; one that ties double."""
    problem = PROBLEMS["window_diagonal"]  # rows 5 to 8 see nothing
    arrays, _ = cast(problem, jnp.float64)

    def top(query, key):
        value = arrays["value"]
        F = measure(query, key, value, **problem.options, implementation=implementation)
        return F.score_max()

    query, key = arrays["query"], arrays["key"]
    scores = rows(problem).scores
    seen = np.isfinite(scores).any(-1)
    chosen = np.where(seen, np.nan_to_num(scores, neginf=-1e9).argmax(-1), 0)  # [B, N, T]
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(query.shape[:-1])

    def loss(query, key):
        found = top(query, key)
        return (jnp.where(found == -jnp.inf, 0.0, found) * weight).sum()

    along = rng.standard_normal(query.shape)
    # equal scores share it
    ones = jnp.ones((1, 4, 1, 3), jnp.float64)

    @jax.jit
    def run(query, key):
        change = jax.jvp(lambda q: loss(q, key), (query,), (along,))[1]
        equal = ea.FreeEnergy(1.0, implementation=implementation)
        tied = jax.grad(lambda k: equal.at(ones[:, :1], k, ones).score_max().sum())(ones)
        return jax.grad(loss, (0, 1))(query, key), change, tied

    gradients, change, tied = jax.device_get(run(query, key))
    scale, weights = query.shape[-1] ** -0.5, np.where(seen, weight.transpose(0, 2, 1), 0)
    exact_query, exact_key = np.zeros(query.shape), np.zeros(key.shape)
    for b, n, t in np.ndindex(chosen.shape):
        s = chosen[b, n, t]
        exact_query[b, t, n] = scale * weights[b, n, t] * key[b, s, n]
        exact_key[b, s, n] += scale * weights[b, n, t] * query[b, t, n]
    close(gradients, (exact_query, exact_key), tolerance=1e-12)
    np.testing.assert_allclose(change, np.vdot(exact_query, along), rtol=1e-12)
    np.testing.assert_allclose(tied.sum(1), ones[:, 0], rtol=1e-12)
    assert (tied >= 0).all()


def test_sixteen_bits():
    """Statistics in 16 bits: they are those of float32, whatever the arrays."""
    problem = PROBLEMS["grouped"]
    arrays, rounded = cast(problem, jnp.bfloat16)

    @jax.jit
    def run(arrays):
        F = measure(**arrays)
        return F.statistics()._asdict(), F.score_max()

    found, top = run(arrays)
    assert {x.dtype for x in found.values()} == {jnp.dtype("float32")}
    close(found, exact_statistics(rounded), tolerance=1e-5)
    close(top, largest(rounded), "largest", 1e-6)


def test_absent_queries_have_no_scores():
    """0 · NaN in the mean or variance of the scores of a query that is not there, whose slot may hold anything."""
    query, *arrays = map(jnp.asarray, np.random.default_rng(0).standard_normal((3, 1, 4, 2, 3)))
    positions = jnp.array([[0, -1, 2, 3]])

    @jax.jit
    def found(query):
        F = ea.FreeEnergy().at(query, *arrays, query_positions=positions)
        return F.statistics(), F.score_moments()

    wanted, broken = (found(query.at[:, 1].set(x)) for x in (0, np.nan))
    for x, y in zip(jax.tree.leaves(broken), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(x, y)


def test_recorded_in_the_pass():
    """A second pass over the keys for the recorded largest scores, beside the attention of a training step."""
    x = jax.ShapeDtypeStruct((1, 300, 2, 8), jnp.float32)

    def model(x):
        return (ea.attention(x, x, x, is_causal=True) ** 2).sum()

    def loops(f):
        found = instructions(jax.jit(jax.grad(f, has_aux=True)).lower(x).compile())
        return {k: sum(n for (_, name), n in found.items() if name == k) for k in KINDS}

    alone = loops(lambda x: (model(x), None))
    assert alone["while"] > 0
    assert loops(ea.record(model, "score_max")) == alone
    assert loops(ea.record(model, "energy", largest=lambda F: F.score_max().max((0, 1)))) == alone


def test_curvature_of_the_largest_score():
    """A second derivative of the largest score that is zero, or that of another key: of a soft cap, both ways."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 1, 3))
    energy = ea.FreeEnergy(1.0, score=ea.scores.SoftCap(2.0), implementation="blockwise")

    def total(query):
        return energy.at(query, jnp.asarray(k), jnp.asarray(v)).score_max().sum()

    along = np.random.default_rng(1).standard_normal(q.shape)

    @jax.jit
    def run(q):
        forward = jax.jvp(jax.grad(total), (q,), (along,))[1]
        return forward, jax.grad(lambda q: (jax.grad(total)(q) * along).sum())(q)

    # s = 2 tanh(x / 2): s'' = -tanh(x / 2) (1 - tanh²)
    raw = np.einsum("btnh,bsnh->bnts", q, k)
    at = raw.argmax(-1)[0, 0]
    slope = np.tanh(raw.max(-1)[0, 0] / 2)
    bend = -slope * (1 - slope**2)
    change = np.einsum("th,th->t", k[0, at, 0], along[0, :, 0])
    wanted = (bend * change)[:, None] * k[0, at, 0]
    for found in run(jnp.asarray(q)):
        np.testing.assert_allclose(found[0, :, 0], wanted, rtol=1e-10)


def test_one_pass():
    """A second pass over the keys for a statistic, or for energies beside attention; more than one backward."""
    shapes = [jax.ShapeDtypeStruct((1, 70, 2, 8), jnp.float32)] * 3

    def cost(f):
        """Products of matrices and loops, and floating-point operations."""
        program = jax.jit(f).lower(*shapes).compile()
        found = instructions(program)
        counts = {x: sum(n for (_, name), n in found.items() if name == x) for x in KINDS}
        return counts, program.cost_analysis()["flops"]

    def kernel(q, k, v):
        return ea.attention(q, k, jnp.concatenate([v, k], -1), return_energy=True)

    def ours(q, k, v):
        # the derivative of the largest score is a walk of its own
        return ea.FreeEnergy().at(q, k, v).statistics()[:4]

    def gradient(f):
        return jax.grad(lambda *x: sum(y.sum() for y in f(*x)), (0, 1, 2))

    def twice(*arrays):
        out, _, entropy, _ = ours(*arrays)
        F = ea.FreeEnergy().at(*arrays)
        return out, entropy, F.statistics().score_max

    alone = cost(kernel)
    assert alone[0] == {"dot": 2, "while": 1}
    for least, g in ((alone, twice), (cost(gradient(kernel)), gradient(ours))):
        counts, flops = cost(g)
        assert counts == least[0]
        assert flops < 1.08 * least[1]  # rows are short: what is merged is also selected

    def moments(q, k, v):
        F, along = ea.FreeEnergy(is_causal=True).at(q, k, v), jnp.ones_like(q)
        return F(), F.attention(), F.cumulant([along]), F.moment([along])

    assert cost(moments)[1] < 1.1 * cost(functools.partial(ea.attention, is_causal=True))[1]
