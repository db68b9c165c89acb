"""Retrieval: Ramsauer's update, energy and bounds; the kinds of fixed points; derivatives; rows without a result."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn import Result, masks
from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.hopfield import retrieve
from energy_attn.solvers import FixedPoint
from tests.support.arrays import array
from tests.support.compare import close, same
from tests.support.complaints import a, complains
from tests.support.selection import few

B, T, N, K, S, H = 2, 3, 4, 2, 17, 5


def patterns(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def states(memories, seed=1):
    """Probes near memories of each head and far from all of them, `[B, T, N, H]`."""
    near = np.repeat(memories[:, :T], N // K, 2)
    return near + np.asarray([0.2, 0.7, 2.0])[:, None, None] * patterns(B, T, N, H, seed=seed)


MEMORIES = patterns(B, S, K, H)
STATE = states(MEMORIES)


# Ramsauer et al. as they write it, for one state and the patterns as columns of X, in float64.
def softmax(scores):
    terms = np.exp(scores - scores.max())
    return terms / terms.sum()


def update(X, xi, beta):
    return X @ softmax(beta * X.T @ xi)


def energy(X, xi, beta):
    largest = (beta * X.T @ xi).max()
    lse = (largest + np.log(np.exp(beta * X.T @ xi - largest).sum())) / beta
    M = np.linalg.norm(X, axis=0).max()
    return -lse + xi @ xi / 2 + np.log(X.shape[1]) / beta + M**2 / 2


def settle(X, xi, beta, steps=20_000):
    for _ in range(steps):
        new = update(X, xi, beta)
        if np.linalg.norm(new - xi) < 1e-15:
            break
        xi = new
    return xi


def each_row(memories, state, seen=None):
    """`((b, t, n), X, xi)`: every row as a separate problem, by the definitions of heads and masks."""
    for b, t, n in np.ndindex(*state.shape[:3]):
        X = memories[b, :, n // (N // K)].T
        yield (b, t, n), X if seen is None else X[:, seen[b]], state[b, t, n]


def find(state, memories, beta):
    """Retrieval that stops early, so that a row that goes on after it has come to rest shows: one program."""
    short = FixedPoint(tolerance=1e-2)
    return retrieve(jnp.asarray(state), jnp.asarray(memories), scale=beta, solver=short)


@pytest.fixture(scope="module")
def found():
    """At a temperature where some states average and others single out a memory."""
    return jax.device_get(find(STATE, MEMORIES, 1.5))


@pytest.mark.smoke
def test_steps_are_the_update(found):
    """A step that is not softmax(βxXᵀ)X, an energy without its constants or that rises, a path of other states'."""
    for row, X, xi in each_row(MEMORIES, STATE):
        steps = int(found.stats["steps"][row])
        path = [energy(X, xi, 1.5)]
        for _ in range(steps):
            xi = update(X, xi, 1.5)
            path.append(energy(X, xi, 1.5))
        path += [path[-1]] * (101 - len(path))
        np.testing.assert_allclose(found.stats["path"][(slice(None), *row)], path, rtol=1e-12)
        close(found.point[row], xi, tolerance=1e-12)
        np.testing.assert_allclose(found.value[row], path[-1], rtol=1e-12)
    assert (found.result == Result.converged).all() and (found.stats["residual"] <= 1e-2).all()
    # energies fall, and are within Ramsauer's bounds where the state is within the memories' radius
    path, M2 = found.stats["path"], np.repeat((MEMORIES**2).sum(-1).max(1), N // K, 1)[:, None]
    assert np.diff(path, axis=0).max() < 1e-13 and path[0].max() > path[-1].max()
    assert (path[1:] >= 0).all() and (path[1:] <= 2 * M2).all()


def test_kinds_of_fixed_points():
    """Statistics that cannot tell a single memory, a metastable state and the global average apart."""
    # clusters of four memories, and one of five: hot averages all, cool a cluster, cold finds one
    centres = 4 * np.eye(4, H)[[*np.repeat(range(4), 4), 3]]
    near = centres + 0.1 * patterns(S, H, seed=3)
    memories, state = np.zeros((B, S, K, H)), np.zeros((B, T, N, H))
    memories[:] = near[:, None]
    state[:] = near[5] + 0.01
    for beta, many in ((0.01, S), (0.5, 4), (40.0, 1)):
        solution = find(state, memories, beta)
        point = np.asarray(solution.point[0, 0, 0])
        weights = softmax(beta * memories[0, :, 0] @ point)
        wanted = np.exp(-(weights * np.log(weights + 1e-300)).sum())
        stats = {name: x[0, 0, 0] for name, x in solution.stats.items() if name != "path"}
        np.testing.assert_allclose(stats["effective"], wanted, rtol=1e-9)
        np.testing.assert_allclose(wanted, many, rtol=0.1)
        np.testing.assert_allclose(stats["weight"], weights.max(), rtol=1e-9)
        assert int(stats["nearest"]) == weights.argmax()
        best = memories[0, weights.argmax(), 0]
        cosine = best @ point / np.linalg.norm(best) / np.linalg.norm(point)
        np.testing.assert_allclose(stats["overlap"], cosine, rtol=1e-9)


def test_nearest_of_many_and_of_equals():
    """Positions that float32 cannot hold or that blocks and digits get wrong; a tie that is given as a memory."""
    memories = patterns(2500, 1, 4, seed=4).astype(np.float32)
    memories /= np.linalg.norm(memories, axis=-1, keepdims=True)
    memories[7] = memories[1311]  # the same memory twice
    wanted = [0, 7, 1023, 1024, 2047, 2499]
    state = jnp.asarray(memories[wanted])
    found = retrieve(state, jnp.asarray(memories), scale=1e4)
    assert found.stats["nearest"][:, 0].tolist() == [0, -1, 1023, 1024, 2047, 2499]
    assert found.point.dtype == found.value.dtype == jnp.float32
    np.testing.assert_allclose(found.stats["weight"][:, 0], [1, 0.5, 1, 1, 1, 1], rtol=5e-3)


def loss(memories, beta, state, weights):
    found = retrieve(state, memories, scale=beta, solver=FixedPoint(max_steps=1000))
    return (weights * found.point).sum() + found.value.sum() + found.stats["overlap"].sum()


def numpy_loss(memories, beta, state, weights):
    total = 0.0
    for row, X, xi in each_row(memories, state):
        xi = settle(X, xi, beta)
        best = X[:, (X.T @ xi).argmax()]
        overlap = best @ xi / np.linalg.norm(best) / np.linalg.norm(xi)
        total += weights[row] @ xi + energy(X, xi, beta) + overlap
    return total


DIRECTION = patterns(B, S, K, H, seed=6)
OUTER = patterns(B, T, N, H, seed=5)


def along(memories, beta, state):
    """The derivative of the loss along a direction of memories and β, and that in the state."""
    slopes = jax.grad(loss, argnums=(0, 1, 2))(memories, beta, state, OUTER)
    return (slopes[0] * DIRECTION).sum() + 0.3 * slopes[1], slopes[2]


def settled(steps):
    """Losses of settled states, along that direction."""
    points = ((MEMORIES + step * DIRECTION, 1.5 + 0.3 * step) for step in steps)
    return [numpy_loss(*point, STATE, OUTER) for point in points]


def test_derivatives():
    """Gradients of zero, or as if the steps had been a constant: by differences of settled states, in the memories and
    β. States do not matter in the small.
    """
    first, in_state = jax.jit(along)(MEMORIES, 1.5, STATE)
    assert not in_state.any()
    behind2, behind, ahead, ahead2 = settled([-2e-3, -1e-3, 1e-3, 2e-3])
    wanted = (8 * (ahead - behind) - (ahead2 - behind2)) / 12e-3
    np.testing.assert_allclose(first, wanted, rtol=1e-7)


def path_and_value(memories):
    found = retrieve(jnp.asarray(STATE), memories, scale=1.5)
    return found.stats["path"].sum(), found.value.sum(), found.stats["steps"]


def test_what_has_no_derivative_raises():
    """A derivative of zero of the energy's path."""
    missing = "stats: wanted no derivative, as those of retrieve have none, got one of path"
    with pytest.raises(RuntimeError, match=missing):
        jax.eval_shape(jax.grad(lambda memories: path_and_value(memories)[0]), MEMORIES)


@pytest.mark.full
def test_what_has_no_tangent_is_nan():
    """A tangent of zero of the energy's path; one that is lost since another's is unknown."""
    memories = jnp.asarray(MEMORIES)
    *_, (path, value, steps) = jax.jvp(path_and_value, (memories,), (memories,))
    assert jnp.isnan(path) and steps.dtype == jax.dtypes.float0
    slope = jax.grad(lambda memories: path_and_value(memories)[1])(memories)
    np.testing.assert_allclose(value, (slope * memories).sum(), rtol=1e-9)


# Memories that none may see: beyond the lengths, which leave the second batch row without any, and
# one that a mask hides. They are the longest by far.
LENGTHS, SEEN = np.asarray([S, 0], np.int32), np.arange(24) != 3
PADDED = np.full((B, 24, K, H), 50.0)
PADDED[0, :S] = MEMORIES[0]
PADDED[0, 3] = -50.0


def partly_hidden(memories, beta, parallel=None, mask=None):
    found = retrieve(
        jnp.asarray(STATE),
        memories,
        mask=jnp.asarray(SEEN).reshape(1, 1, 1, -1) if mask is None else mask,
        energy=ea.FreeEnergy(scale=beta, parallel=parallel),
        key_value_seq_lengths=jnp.asarray(LENGTHS),
        throw=False,
    )
    value = jnp.where(jnp.isfinite(found.value), found.value, 0.0)
    return (found.point * STATE).sum() + value.sum(), found


def check_hidden(found):
    """What is found, by each row with the memories that it sees; the second batch row sees none."""
    visible = [SEEN & (np.arange(24) < LENGTHS[0])]
    for row, X, xi in each_row(PADDED[:1], STATE[:1], visible):
        wanted = settle(X, xi, 1.5)
        np.testing.assert_allclose(found.point[row], wanted, atol=1e-8)
        np.testing.assert_allclose(found.value[row], energy(X, wanted, 1.5), rtol=1e-9)
        nearest = np.flatnonzero(visible[0])[(X.T @ wanted).argmax()]
        assert int(found.stats["nearest"][row]) == nearest
    assert (found.result[1] == Result.no_keys).all() and (found.result[0] == 0).all()
    assert np.isposinf(found.value[1]).all() and not found.point[1].any()
    for name in ("steps", "residual", "effective", "weight", "overlap"):
        assert not found.stats[name][1].any(), name
    assert (found.stats["nearest"][1] == -1).all()


@pytest.fixture(scope="module")
def on_one_device():
    find = jax.jit(jax.grad(partly_hidden, argnums=(0, 1), has_aux=True))
    return find(jnp.asarray(PADDED), jnp.asarray(1.5))


@pytest.mark.full
def test_hidden_memories(on_one_device):
    """Memories beyond the lengths, or masked, that take part: in the update, the number S or the radius M."""
    gradient, found = on_one_device
    check_hidden(found)
    hidden = ~(SEEN & (np.arange(24) < LENGTHS[0]))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradient))
    assert not gradient[0][1].any() and not gradient[0][0, hidden].any()


def over_devices(explicit, run, **options):
    """`run` of memories that lie on a mesh."""
    mesh = make_mesh((2, 4), explicit=explicit)
    parallel = None if explicit else SequenceParallel(("node", "device"))
    run = jax.jit(functools.partial(run, parallel=parallel, **options))
    with jax.set_mesh(mesh):
        spread = jax.device_put(PADDED, NamedSharding(mesh, P(None, ("node", "device"))))
        return jax.device_get(run(spread, jnp.asarray(1.5)))


@pytest.mark.parametrize("explicit", few([False, True], True))
def test_spread_over_devices(explicit):
    """Memories that a device does not see, in the update, the constants or the nearest; a mask that some lack."""
    rule = masks.Function(lambda query, key: key != 3)
    check_hidden(over_devices(explicit, partly_hidden, mask=rule)[1])


def test_no_memories():
    """No memories at all: a NaN, or a state that is kept. Unbatched, in bfloat16."""
    state = jnp.ones((T, N, H), jnp.bfloat16)
    found = retrieve(state, jnp.zeros((0, K, H), jnp.bfloat16))
    assert found.point.shape == (T, N, H) and found.point.dtype == jnp.float32
    assert not found.point.any() and (found.result == Result.no_keys).all()
    assert not any(jnp.isnan(x).any() for x in jax.tree.leaves(found))


def find_causal(state=STATE, scale=None, energy_scale=None, throw=False):
    """Three steps of states that see the memories before them: one program, too."""
    energy = ea.FreeEnergy(is_causal=True, scale=energy_scale)
    solver = FixedPoint(max_steps=3)
    options = {"energy": energy, "scale": scale, "solver": solver, "throw": throw}
    return retrieve(jnp.asarray(state), jnp.asarray(MEMORIES), **options)


def test_steps_run_out_and_numbers_end():
    """A state that has not converged reported as converged, and an infinite one; `throw=False` tells them apart."""
    with pytest.raises(RuntimeError, match="max_steps"):
        find_causal(scale=0.5, throw=True)
    state = STATE.copy()
    state[0, 1, 0, 0] = np.inf
    found = jax.device_get(find_causal(state, scale=0.5))
    assert found.result[0, 1, 0] == Result.not_finite
    assert (found.result[:, 1:].ravel()[1:] == Result.max_steps_reached).all()
    assert (found.result[:, 0] == Result.converged).all()  # which see one memory
    assert (found.stats["steps"][:, 1:].ravel()[1:] == 3).all()


def test_energy_says_what_the_scale_is():
    """A β that an energy has and retrieval does not use, or one for each; and a mask of the energy that is lost."""

    def find(**options):
        found = jax.device_get(find_causal(**options))
        close(found.point[:, 0], np.repeat(MEMORIES[:, 0], N // K, 1), tolerance=1e-12)
        return found.value

    wanted, default = find(energy_scale=1.5), find()
    same(find(scale=1.5), wanted)
    same(find(energy_scale=H**-0.5), default)
    assert (wanted[:, 1:] != default[:, 1:]).any()


@pytest.mark.usefixtures("unchecked")
def test_scale_of_the_energy_is_positive():
    """A β below zero in the energy, for which no step descends."""
    energy = ea.FreeEnergy(scale=-1.0)
    complains(lambda: retrieve(**VALID, energy=energy), ValueError, "energy.scale", "-1.0", "above")


VALID = {"state": a(B, T, N, H), "memories": a(B, S, K, H)}


@pytest.mark.usefixtures("unchecked", "user_settings")
@pytest.mark.parametrize(
    ("changes", "error", "got", "wanted"),
    [
        ({"state": a(5)}, ValueError, "float32[5]", "(B, T, N, H) or (T, N, H)"),
        ({"memories": [1.0]}, TypeError, "list", "array"),
        ({"memories": a(B, S, K, H + 1)}, ValueError, "float32[2,17,2,6]", "(2, S, K, 5)"),
        ({"mask": a(B, S)}, TypeError, "float32[2,17]", "boolean"),
        ({"scale": 0.0}, ValueError, "0.0", "above 0"),
        ({"scale": array(-1.0, "float32")}, ValueError, "-1.0", "above 0"),
        ({"scale": "hot"}, TypeError, "str 'hot'", "number"),
        ({"throw": 1}, TypeError, "int 1", "True or False"),
        ({"beta": 1.0}, TypeError, "'beta'", "FreeEnergy(scale=...)"),
        ({"scale": 1.0, "energy": ea.FreeEnergy(scale=2.0)}, ValueError, "1.0", "scale float 2.0"),
        ({"energy": 1.0}, TypeError, "float 1.0", "FreeEnergy"),
    ],
)
def test_bad_input(changes, error, got, wanted):
    """A mistake that surfaces as another function's, or names an argument that `retrieve` does not have."""
    name, *_ = changes
    complains(lambda: retrieve(**{**VALID, **changes}), error, name, got, wanted)


def test_energy_that_rises_is_told(monkeypatch):
    """A rising energy that goes unnoticed: with the sign of the energies reversed they rise."""
    from energy_attn.hopfield import _fixed_point, _retrieve

    right = _fixed_point.point_energy
    monkeypatch.setattr(_fixed_point, "point_energy", lambda *args: -right(*args))
    _retrieve._solve.clear_cache()
    state, memories = jnp.asarray(STATE[0]), jnp.asarray(MEMORIES[0])
    found = retrieve(state, memories, solver=FixedPoint(max_steps=51), throw=False)
    _retrieve._solve.clear_cache()
    assert (found.result == Result.energy_rose).all()


def test_derivative_near_a_critical_temperature():
    """A derivative at the point where the iteration stopped, off by tolerance / (1 - contraction): by 0.2%."""
    # Two memories ±m of length 1: the point is x m with x = tanh(β x), whose critical β is 1.
    memory = np.random.default_rng(0).normal(size=4)
    memory /= np.linalg.norm(memory)
    memories = np.stack([memory, -memory])[:, None]
    solver = FixedPoint(max_steps=2000)

    def along(beta, dtype):
        m = jnp.asarray(memories, dtype)
        found = retrieve(0.6 * m[:1], m, scale=beta, solver=solver)
        return (found.point[0] * m[0]).sum()

    beta = 1.02
    x = 0.5
    for _ in range(5000):
        x = np.tanh(beta * x)
    slope = 1 - x**2
    wanted = slope * x / (1 - beta * slope)
    for dtype in (jnp.float32, jnp.float64):
        found = jax.jit(jax.grad(along), static_argnums=1)(jnp.asarray(beta, dtype), dtype)
        bound = float(jnp.finfo(dtype).eps) / (1 - beta * slope) ** 2
        np.testing.assert_allclose(found, wanted, rtol=2 * bound)


@pytest.mark.usefixtures("unchecked")
def test_what_a_solution_says():
    """A code without a name, or an error that does not say what to change; under jit, too."""
    memories = jax.random.normal(jax.random.key(0), (8, 1, 4))
    state = jax.random.normal(jax.random.key(1), (3, 1, 4))

    def solve(state, **options):
        solver = FixedPoint(max_steps=2)
        return retrieve(state, memories, scale=0.3, solver=solver, **options)

    assert "(3 max_steps_reached)" in repr(solve(state, throw=False))
    assert "converged" not in repr(jax.eval_shape(functools.partial(solve, throw=False), state))
    for call in (solve, eqx.filter_jit(solve)):
        with pytest.raises(RuntimeError, match="raise max_steps of its solver, or throw=False"):
            jax.block_until_ready(call(state).point)
