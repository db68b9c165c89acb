"""Covariances, cumulants, moments, entropies: against their definitions, written out over the whole distribution.

The judge is `support/reference.py`: every row's weights and scores in NumPy, here in long floats for the gradients,
which are differences of the definitions along random tangents (two Richardson extrapolations).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, collectives, make_mesh
from tests.support.compare import close
from tests.support.complaints import complaining
from tests.support.meshes import mesh_of, parallel_of
from tests.support.observables import answers, directions, exact, exactly, measure, slopes
from tests.support.problems import BLOCKS, PROBLEMS, Problem, cast, lse_dtype, tangents
from tests.support.reference import rows
from tests.support.selection import few, few_rows


def each_way(F: ea.Gibbs, along) -> dict[str, jax.Array]:
    """One observable for each way in which they are computed."""
    along = list(map(jnp.asarray, along))
    return {
        "covariance": F.covariance(),
        "cumulant 3": F.cumulant(along[:3]),
        "entropy": F.entropy(),
        "heat capacity": F.score_moments().variance,
        "Rényi 2": F.renyi(2),
    }


def covariance_and_entropy(F: ea.Gibbs, along) -> dict[str, jax.Array]:
    """What is merged as a covariance, as a mean, and as a sum of powers."""
    return {"covariance": F.covariance(), "entropy": F.entropy(), "Rényi 2": F.renyi(2)}


def observed(
    arrays, problem: Problem, implementation=None, parallel=None, ask=answers
) -> dict[str, jax.Array]:
    query = arrays["query"]
    along = [jnp.asarray(u, lse_dtype(query.dtype)) for u in directions(problem)]
    sharding = jax.typeof(query).sharding
    if any(sharding.spec):
        along = [jax.reshard(u, sharding) for u in along]
    F = measure(**arrays, **problem.options, implementation=implementation, parallel=parallel)
    return ask(F, along)


@pytest.mark.parametrize(
    ("implementation", "name", "ask"),
    few_rows(
        [
            pytest.param("blockwise", "positions_causal", each_way, marks=pytest.mark.smoke),
            ("blockwise", "positions_causal", answers),
            # a bias, a source, masks, windows, ragged rows, fully masked rows
            (None, "everything", answers),
            ("decode", "decode_cache", answers),
            ("reference", "bias_keys", answers),
        ]
    ),
)
def test_values_and_gradients(implementation, name, ask):
    """A wrong observable, or a wrong gradient of one in any argument; a NaN in a fully masked row."""
    problem = PROBLEMS[name]
    arrays, _ = cast(problem, jnp.float64)
    rng = problem.rng("weights")

    @jax.jit
    def run(arrays, weights):
        found, back = jax.vjp(lambda a: observed(a, problem, implementation, ask=ask), arrays)
        return found, back(weights)[0]

    along = tangents(problem)
    wanted = exact(problem)
    asked = jax.eval_shape(lambda a: observed(a, problem, implementation, ask=ask), arrays)
    weights = {what: rng.standard_normal(x.shape) for what, x in asked.items()}

    def weighed(moved):
        found = exactly(moved, np.longdouble)
        return {what: (weights[what] * found[what]).sum() for what in asked}

    rates = slopes(weighed, problem, along)
    for what in asked:
        only = {x: weights[x] * (x == what) for x in asked}
        found, gradients = jax.device_get(run(arrays, only))
        close(found[what], wanted[what], what)
        moved = sum(float((gradients[x] * along[x]).sum()) for x in gradients)
        slope = rates[what]
        assert abs(moved - slope) <= 1e-9 * max(1.0, abs(slope)), (what, moved, slope)


@pytest.mark.full
@pytest.mark.parametrize("implementation", few(["pallas_gpu", "pallas_tpu"], "pallas_gpu"))
def test_hand_written_kernels(implementation, user_settings, unchecked):
    """A kernel whose widths or backward pass do not support the calls of observables; in float32."""
    problem = PROBLEMS["window_causal_pair"]
    arrays, rounded = cast(problem, jnp.float32)
    found = jax.jit(lambda a: observed(a, problem, implementation))(arrays)
    close(found, exactly(rounded), implementation, 2e-5)


@pytest.mark.full
def test_sixteen_bits(user_settings, unchecked):
    """Observables rounded to 16 bits, or computed from rounded means: they are in float32."""
    problem = PROBLEMS["positions_causal"]
    arrays, rounded = cast(problem, jnp.bfloat16)
    found = jax.jit(lambda a: observed(a, problem))(arrays)
    assert {x.dtype for x in found.values()} == {jnp.dtype("float32")}
    close(found, exactly(rounded), tolerance=2e-5)


@pytest.mark.parametrize(
    ("kind", "name", "ask"),
    few_rows(
        [
            ("2x4", "everything", covariance_and_entropy),
            ("2x4", "everything", answers),
            ("8", "blocks_causal", answers),
            ("8 explicit", "grouped", answers),
            ("8", "no_keys", answers),
        ]
    ),
)
def test_over_a_mesh(kind, name, ask):
    """An observable of one device's keys, or one that counts keys twice; queries sharded (32 of each) and not."""
    problem = {**PROBLEMS, **BLOCKS}[name]
    arrays, _ = cast(problem, jnp.float64)
    with jax.set_mesh(mesh_of(kind)):
        run = jax.jit(lambda a: observed(a, problem, parallel=parallel_of(kind), ask=ask))
        found = jax.device_get(run(arrays))
    close(found, exact(problem, found), kind)


@pytest.mark.full
def test_split_rows_and_heads():
    """Arrays sharded by type along other axes than the keys, and constants beside them that are not sharded."""
    problem = PROBLEMS["grouped"]
    arrays, _ = cast(problem, jnp.float64)
    mesh = make_mesh((2, 2), ("row", "head"), explicit=True, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        split = jax.device_put(arrays, jax.NamedSharding(mesh, jax.P("row", None, "head")))
        run = jax.jit(lambda a: observed(a, problem))
        found = jax.device_get(run(split))
    close(found, exactly(problem))


@pytest.mark.full
def test_covariance_is_one_reduction():
    """A mean that is sent before the covariance: three exchanges between eight devices must suffice."""
    problem = PROBLEMS["plain"]
    arrays, _ = cast(problem, jnp.float64)
    with jax.set_mesh(mesh_of("8")):
        f = jax.jit(lambda a: measure(**a, parallel=SequenceParallel("device")).covariance())
        found = collectives(f.lower(arrays).compile())
    assert [x.kind for x in found] == ["collective-permute"] * 3


def test_sixth_cumulant():
    """The weights of partitions into three parts and more, which lower orders do not have."""
    problem = PROBLEMS["grouped"]
    arrays, _ = cast(problem, jnp.float64)
    u = directions(problem)[0]
    r = rows(problem)
    x = np.einsum("btnv,bsnv->bnts", u, r.value)
    x = x - np.einsum("bnts,bnts->bnt", r.weights, x)[..., None]
    m = {n: np.einsum("bnts,bnts->btn", r.weights, x**n) for n in (2, 3, 4, 6)}
    wanted = m[6] - 15 * m[4] * m[2] - 10 * m[3] ** 2 + 30 * m[2] ** 3
    run = jax.jit(lambda a, u: measure(**a).cumulant([u] * 6))
    close(run(arrays, u), wanted, "order 6")


@pytest.mark.full
def test_offset_values():
    """Covariances of values far from the origin, as differences of large squares: they do not depend on it."""
    q, k, v, u = jax.random.normal(jax.random.key(0), (4, 1, 5, 2, 4), jnp.float32)
    v = v + jnp.float32(1000)

    def run(dtype):
        F = measure(*(x.astype(dtype) for x in (q, k, v)))
        tangent = u.astype(dtype)
        return F.covariance(), F.covariance(tangent), F.cumulant([tangent] * 3)

    close(run(jnp.float32), jax.device_get(run(jnp.float64)), tolerance=5e-6)


@pytest.mark.full
def test_no_matrix_of_scores():
    """Memory that grows with queries times keys, in a derivative of an observable: what a scan stores of its blocks."""
    length = 8192
    given = [jax.ShapeDtypeStruct((1, length, 1, 32), jnp.float32)] * 4

    def penalty(q, k, v, u):
        F = measure(q, k, v, is_causal=True)
        return F.score_moments().variance.sum() + F.cumulant([u, u, u]).sum()

    compiled = jax.jit(jax.grad(penalty, (0, 1, 2))).lower(*given).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.7 * 4 * length**2


@pytest.mark.full
def test_penalties():
    """A penalty that a fully masked row makes infinite or NaN, or that is not its formula."""
    problem = PROBLEMS["mask"]
    arrays, _ = cast(problem, jnp.float64)
    r = rows(problem)
    seen = np.isfinite(r.lse)

    @jax.jit
    @jax.value_and_grad
    def penalty(query):
        F = measure(**arrays | {"query": query}, **problem.options)
        seen = jnp.isfinite(F())
        return ea.lse_penalty(F()) + ea.entropy_penalty(F.entropy(), where=seen, low=1.0, high=1.2)

    value, gradient = penalty(arrays["query"])
    energy, entropy = np.where(seen, r.lse, 0), exactly(problem)["entropy"]
    outside = np.maximum(1.0 - entropy, 0) + np.maximum(entropy - 1.2, 0)
    wanted = ((energy**2).sum() + (outside[seen] ** 2).sum()) / seen.sum()
    np.testing.assert_allclose(value, wanted, rtol=1e-12)
    assert np.isfinite(gradient).all() and gradient.any()
    assert float(ea.lse_penalty(jnp.full(3, -jnp.inf))) == 0.0


Q, K, V = (np.ones(shape, np.float32) for shape in ((2, 3, 4, 5), (2, 7, 2, 5), (2, 7, 2, 6)))
U = np.ones((2, 3, 4, 6), np.float32)
E = np.ones((2, 3), np.float32)


def sampled(count):
    return measure(Q, K, V).sample(key=jax.random.key(0), count=count)


BAD = {
    "tangent's shape": (lambda: measure(Q, K, V).covariance(Q), ValueError, "tangent", "5]", "6)"),
    "its dtype": (lambda: measure(Q, K, V).covariance(U > 0), TypeError, "tangent", "bool", "fl"),
    "no tangent": (lambda: measure(Q, K, V).cumulant([]), ValueError, "tangents", "0", "one to 8"),
    "nine": (lambda: measure(Q, K, V).moment([U] * 9), ValueError, "tangents", "9", "one to 8"),
    "array": (lambda: measure(Q, K, V).cumulant(U), TypeError, "tangents", "float32", "sequence"),
    "second": (lambda: measure(Q, K, V).cumulant([U, Q]), ValueError, "tangents[1]", "5]", "6)"),
    "energy": (lambda: ea.lse_penalty(3.0), TypeError, "energy", "float", "array"),
    "where": (lambda: ea.lse_penalty(E, where=E), TypeError, "where", "float32", "boolean"),
    "its shape": (lambda: ea.lse_penalty(E, where=E.T > 0), ValueError, "where", "[3,2]", "(2, 3)"),
    "bounds": (lambda: ea.entropy_penalty(E), ValueError, "low", "None", "bound"),
    "crossed": (lambda: ea.entropy_penalty(E, low=2, high=1), ValueError, "low", "2", "high = 1"),
    "key": (lambda: measure(Q, K, V).sample(key=3), TypeError, "key", "int 3", "jax.random.key"),
    "order": (lambda: measure(Q, K, V).renyi(-0.5), ValueError, "order", "-0.5", "at least 0"),
    "order's type": (lambda: measure(Q, K, V).renyi(Q), TypeError, "order", "float32", "number"),
    "count": (lambda: sampled(0), ValueError, "count", "0", "at least 1"),
}
# A mistake that surfaces as an error of XLA, of Python's unpacking, or not at all.
test_bad_input = complaining(BAD, "user_settings")


EMPTY = {
    "attention": lambda F, u: F.attention(),
    "entropy": lambda F, u: F.entropy(),
    "covariance": lambda F, u: F.covariance(),
    "score_moments": lambda F, u: F.score_moments(),
    "temperature_sensitivity": lambda F, u: F.temperature_sensitivity(),
    "product": lambda F, u: F.covariance(u),
    "cumulant": lambda F, u: F.cumulant([u] * 3),
}


@pytest.mark.full
def test_nothing_asked():
    """No rows in a batch, or no queries: an empty result wherever attention has one, on a mesh as well."""
    key = jnp.zeros((2, 8, 1, 3))
    for shape in ((0, 2, 2, 3), (2, 0, 2, 3)):
        given = jnp.zeros(shape), key[: shape[0]], key[: shape[0]]
        with jax.set_mesh(make_mesh((2, 4))):
            ways = ("tree", "hierarchical", None), ("tree", "auto", True), ("ring", "auto", None)
            for method, merge, split in ways:
                parallel = SequenceParallel(method=method, merge=merge, queries_sharded=split)
                F = measure(*given, parallel=parallel)
                for name in ("attention", "covariance", "product"):
                    for x in jax.tree.leaves(EMPTY[name](F, given[0])):
                        assert x.shape[:3] == shape[:3], (name, method)
        for name, ask in EMPTY.items():
            for x in jax.tree.leaves(ask(measure(*given), given[0])):
                assert x.shape[:3] == shape[:3], name
    layer = ea.nn.MultiheadAttention(2, 4, dtype=key.dtype, key=jax.random.key(0))
    assert layer(*[jnp.zeros((0, 4))] * 3).shape == (0, 4)
