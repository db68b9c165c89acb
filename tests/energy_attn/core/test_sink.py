"""A sink is one more outcome, of a score of its own and of value zero: all that follows from F has it, once.

The judge is `support/reference.py` for the problem with one more key: of zeros, with value zero and the sink as bias.
"""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import energy_attn as ea
from tests.support.compare import close
from tests.support.observables import answers, directions, exact, few_answers, measure, statistic
from tests.support.problems import PROBLEMS, Problem, cast, cotangents
from tests.support.programs import instructions
from tests.support.reference import dense, dense_vjp, rows
from tests.support.scores import gradient_of, sink_of, with_key
from tests.support.selection import few_rows


def state(problem: Problem, implementation=None):
    """`(out, energy)` at the problem's source, a function of its arrays and the sink."""
    options: Any = problem.options | {"implementation": implementation}

    def pair(arrays: Any):
        arrays = dict(arrays)
        source = arrays.pop("source", None)
        if source is None:
            return ea.attention(**arrays, **options, return_energy=True)

        def total(source):
            energy = ea.free_energy(**arrays, source=source, **options)
            return energy.sum(), energy

        return jax.grad(total, has_aux=True)(source)

    return pair


@pytest.mark.parametrize(
    ("implementation", "name", "batched"),
    few_rows(
        [
            ("blockwise", "everything", False),
            ("decode", "decode_cache", False),
            ("blockwise", "bias_infinite", True),
            ("reference", "mask_nothing", True),
            ("blockwise", "no_keys", False),
            (None, "grouped", False),
            ("reference", "ragged", False),
            ("blockwise", "positions_causal", True),
            ("blockwise", "shift_down", False),
            ("blockwise", "shift_up", False),
            ("reference", "rule_nested", True),
        ],
    ),
)
def test_values_and_derivatives(implementation, name, batched):
    """A share or a derivative that forgets the sink, in either mode; a sink that an absent query sees."""
    problem = PROBLEMS[name]
    sink = sink_of(problem, batched)
    whole = with_key(problem, sink)
    arrays = problem.arrays | {"sink": sink}
    pair = state(problem, implementation)
    given = cotangents(problem, jnp.float64)
    rng = np.random.default_rng(0)
    along = {n: rng.standard_normal(x.shape) for n, x in arrays.items()}

    @jax.jit
    def run(arrays, given, along):
        found, back = jax.vjp(pair, arrays)
        return found, back(given)[0], jax.jvp(pair, (arrays,), (along,))[1]

    (out, energy), gradients, change = jax.device_get(run(arrays, given, along))
    close(out, dense(whole)[0], "out")
    close(energy, dense(whole)[1], "energy")
    wanted = gradient_of(problem, sink, dense_vjp(whole, *map(np.asarray, given)))
    forward = sum(np.vdot(x, y) for x, y in zip(given, change, strict=True))
    backward = sum(np.vdot(gradients[n], along[n]) for n in wanted)
    np.testing.assert_allclose(forward, backward, rtol=1e-9, atol=1e-9)
    close(gradients, wanted)


def test_infinities():
    """A NaN, or a derivative that is not the limit's, for a sink that is infinite or of fully masked rows."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, 4, 2, 3), jnp.float64)
    mask = jnp.asarray([True, True, False, False])[None, :, None]  # the last rows see nothing

    def both(query, sink):
        return ea.attention(query, key, value, mask=mask, sink=sink, return_energy=True)

    @jax.jit
    def run(query, sink):
        slopes = jax.grad(lambda *x: sum(y.sum() for y in both(*x)), (0, 1))(query, sink)
        of_energy = jax.grad(lambda b: ea.free_energy(query, key, value, sink=b).sum())(sink)
        return both(query, sink), slopes, of_energy

    plain = ea.attention(query, key, value, mask=mask, return_energy=True)
    for sink in (np.array([-np.inf, 0.3]), np.array([np.inf, -np.inf])):
        (out, energy), (of_query, of_sink), of_energy = jax.device_get(run(query, sink))
        for head in range(2):
            if sink[head] == -jnp.inf:
                np.testing.assert_array_equal(out[:, head], plain[0][:, head])
                np.testing.assert_array_equal(energy[:, head], plain[1][:, head])
            elif sink[head] == jnp.inf:
                assert not out[:, head].any() and (energy[:, head] == jnp.inf).all()
            else:
                assert not out[2:, head].any() and (energy[2:, head] == sink[head]).all()
        assert np.isfinite(of_query).all() and not of_query[2:].any()
        assert np.isfinite(of_sink).all()
    assert of_energy.tolist() == [4.0, 0.0]  # four rows
    # what is broken elsewhere is not hidden by it
    broken = np.array(query)
    broken[0, 0, 0] = np.nan
    (out, energy), *_ = run(broken, sink)
    assert np.isnan(out[0, 0]).all() and np.isnan(energy[0, 0])


def with_sink(problem: Problem, sink: np.ndarray) -> Problem:
    """Under the same name, by which its directions are drawn."""
    return replace(with_key(problem, sink), name=problem.name)


@pytest.mark.parametrize(
    ("name", "ask"), few_rows([("decode_few", few_answers), ("everything", answers)])
)
def test_observables(name, ask):
    """An observable of the keys alone, or one that gives the sink another value than zero, or absent queries a sink."""
    problem = PROBLEMS[name]
    sink = sink_of(problem)

    @jax.jit
    def run(arrays, sink):
        F = measure(**arrays, **problem.options, sink=sink)
        return ask(F, directions(problem))

    wanted, plain = with_sink(problem, sink), problem
    exact_of = {"sink": (sink, wanted), "minus infinity": (np.full_like(sink, -np.inf), plain)}
    for what, (scores, whole) in exact_of.items():
        found = run(problem.arrays, scores)
        close(found, exact(whole, found), what, tolerance=1e-10)


@pytest.mark.full
def test_observables_of_large_sinks():
    """A NaN for a sink that has all the weight: everything, with its gradients, is as with one that is large enough."""
    query, key, value, along = jax.random.normal(jax.random.key(0), (4, 3, 2, 3), jnp.float64)

    def ask(query, key, value, sink):
        F = ea.FreeEnergy(sink=sink).at(query, key, value)
        moments, found = F.score_moments(), F.statistics()
        means = jnp.stack([found.energy, found.mean_score, moments.mean])
        rest = {
            "attention": found.out,
            "covariance": F.covariance(along),
            "entropy": found.entropy,
            "heat capacity": moments.variance,
        }
        return sum((jnp.cos(x) * x).sum() for x in jax.tree.leaves(rest)), (rest, means)

    run = jax.jit(jax.value_and_grad(ask, (0, 1, 2, 3), has_aux=True))
    (_, (wanted, _)), wanted_slopes = run(query, key, value, jnp.array([1e4, 0.3]))
    for size in (1e200, np.inf):
        (_, (found, means)), slopes = run(query, key, value, jnp.array([size, 0.3]))
        close(found, wanted, tolerance=1e-10)
        close(slopes, wanted_slopes, tolerance=1e-10)
        assert (means[..., 0] == min(size, jnp.finfo(means.dtype).max)).all()


@jax.jit
def _parts(query, key, value, sinks, along):
    def at(keys, sink, **options):
        energy = ea.FreeEnergy(sink=sink, **options)
        return energy.at(query, key[:, keys], value[:, keys])

    first, second = sinks
    A, rest = at(slice(3), first), slice(3, None)
    both = A | at(rest, second)
    one = at(slice(None), jnp.logaddexp(first, second))
    return (
        linear(both, along),
        linear(one, along),
        linear(both.tilt(along[0]), along),
        linear(one.tilt(along[0]), along),
        linear(A | at(rest, None), along),
        linear(at(slice(None), first), along),
        (A(), jnp.logaddexp(at(slice(3), None)(), first[None, None])),
    )


def linear(F, along):
    """What is linear in the weights of a sink, so that two sinks are one of the sum of their weights."""
    return F(), F.attention(), F.covariance(), F.cumulant(list(along))


@pytest.mark.full
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    hidden=st.sampled_from(["none", "first", "second", "both"]),
    size=st.sampled_from([1.0, 50.0]),
)
def test_laws(seed, hidden, size):
    """A sink counted twice or not at all in a union: sinks of a union add as partition functions do."""
    rng = np.random.default_rng(seed)
    query, along = rng.standard_normal((1, 4, 2, 3)), rng.standard_normal((3, 1, 4, 2, 3))
    key, value = rng.standard_normal((2, 1, 7, 2, 3))
    sinks = size * rng.standard_normal((2, 2))
    for i, name in enumerate(("first", "second")):
        if hidden in (name, "both"):
            sinks[i, 0] = -np.inf
    given_ = (jnp.asarray(x) for x in (query, key, value, sinks, along))
    *pairs, (energy, wanted) = _parts(*given_)
    for i in range(0, len(pairs), 2):
        for x, y in zip(*pairs[i : i + 2], strict=True):
            close(x, y, str(i), 1e-11)
    np.testing.assert_allclose(energy, wanted, rtol=1e-13)


def explicit(query, key, value, sink):
    """The measure with the sink as a key, and that with the option."""
    longer = [jnp.concatenate([x, jnp.zeros_like(x[:, :1])], 1) for x in (key, value)]
    heads = query.shape[2]
    bias = jnp.concatenate([jnp.zeros((1, heads, 1, key.shape[1])), sink[None, :, None, None]], -1)
    F = ea.FreeEnergy(sink=sink).at(query, key, value)
    return ea.FreeEnergy().at(query, *longer, bias=bias), F


@pytest.mark.full
def test_duals():
    """A conjugate, rate or mode over the hull of the keys' values alone: zero is one of the values."""
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((1, 2, 2, 3)))
    key, value = jnp.asarray(rng.standard_normal((2, 1, 5, 2, 3)))
    value = value + 2.0  # zero is outside of the hull of the values
    sink = jnp.asarray([0.5, -0.2])
    wanted, F = explicit(query, key, value, sink)
    point = 0.5 * F.attention()  # nearer to zero than the values
    for ask in (
        lambda F: F.conjugate(point).value,
        lambda F: F.rate(point).value,
        lambda F: F.map(regulariser=0.5).point,
        lambda F: F.conjugate(jnp.zeros_like(point)).value,
    ):
        close(ask(F), ask(wanted), tolerance=1e-8)
    assert not ea.FreeEnergy().at(query, key, value).conjugate(point, throw=False).converged.all()
    gradient = jax.grad(lambda b: explicit(query, key, value, b)[1].rate(point).value.sum())
    exact = jax.grad(lambda b: explicit(query, key, value, b)[0].rate(point).value.sum())
    close(gradient(sink), exact(sink), "gradient of the rate", 1e-7)


def test_draws():
    """A sink that is never drawn, or drawn as a key; in a union, an index that is another's."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 3, 2, 3))
    key, value = rng.standard_normal((2, 2, 4, 2, 3))

    @jax.jit
    def draw(sinks, shown, rng):
        """From two measures of equal keys, with sinks of their own, of which the second may see none."""
        A, C = (
            ea.FreeEnergy(sink=sink).at(*map(jnp.asarray, (query, key, value)), mask=mask)
            for sink, mask in zip(sinks, shown, strict=True)
        )
        return (A | C).sample(key=rng, count=2000)

    def drawn(sinks, shown):
        mask = np.reshape(shown, (2, 1, 1, 1, 1)).repeat(4, -1)
        return np.asarray(draw(np.asarray(sinks), mask, jax.random.key(1)))

    # after the keys of all measures, the sinks of each
    sink, none = np.array([1.0, -0.5]), np.full(2, -np.inf)
    problem = with_key(Problem("draws", query, key, value), sink)
    found = drawn((sink, none), (True, False))
    assert set(np.unique(found)) == {0, 1, 2, 3, 8}
    assert abs(statistic(np.where(found == 8, 4, found), rows(problem).weights)) < 4
    assert drawn((none, none), (True, False)).max() == 3
    assert (drawn((np.full(2, np.inf), sink), (True, True)) == 8).all()
    for i, sinks in enumerate([(9.0, -9.0), (-9.0, 9.0)]):
        assert (drawn([np.full(2, 41 * b) for b in sinks], (False, False)) == 8 + i).all()


def test_sixteen_bits():
    """`out` rounded twice, by the kernel and after the merge; energies rounded to the sink's dtype."""
    problem = PROBLEMS["plain"]
    sink = sink_of(problem)
    arrays, rounded = cast(problem, jnp.bfloat16)
    run = jax.jit(lambda x, sink: ea.attention(**x, sink=sink, return_energy=True))
    out, energy = run(arrays, sink.astype(np.float32))
    wanted = dense(with_key(rounded, sink.astype(np.float32).astype(np.float64)))
    assert out.dtype == jnp.bfloat16 and energy.dtype == jnp.float32
    half = jnp.finfo(jnp.bfloat16).eps / 2
    # the weights are rounded to bfloat16 for the product with the values; twice would be a half more
    assert np.abs(np.asarray(out, np.float64) - wanted[0]).max() < 2.5 * half
    np.testing.assert_allclose(energy, wanted[1], rtol=2e-6)


def layer_with_sink(**options):
    sink = jnp.asarray(sink_of(PROBLEMS["plain"])[:2])
    layer = ea.nn.MultiheadAttention(2, 6, sink=sink, key=jax.random.key(0), **options)
    return layer, jax.random.normal(jax.random.key(1), (5, 6))


def test_module():
    """A sink that is no leaf, gets no gradient, or does not reach attention or the measures of a layer."""
    layer, x = layer_with_sink()

    @eqx.filter_jit
    def run(layer):
        gradient = eqx.filter_grad(lambda layer: (layer(x, x, x) ** 2).sum())(layer)
        heads = layer.project(x, x, x)
        out = ea.attention(*heads, sink=layer.energy.sink)
        return gradient.energy.sink, out, layer.energy.at(*heads).attention()

    gradient, out, of_measure = run(layer)
    assert gradient.shape == (2,) and (gradient != 0).all()
    np.testing.assert_allclose(out, of_measure, rtol=1e-6)


@pytest.mark.full
def test_dropout():
    """A sink that dropout takes away."""
    layer, x = layer_with_sink()
    # dropout takes away keys and leaves the sink: in the mean, attention with the sink
    noisy, _ = layer_with_sink(dropout_p=0.5)
    draws = jax.jit(jax.vmap(lambda key: noisy(x, x, x, key=key)))(
        jax.random.split(jax.random.key(2), 4000)
    )
    np.testing.assert_allclose(draws.mean(0), layer(x, x, x), atol=0.05)


def gradient_of_all(f):
    return jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2))


# The derivative of the share is one more product of rows.
@pytest.mark.parametrize(
    ("change", "most"), few_rows([(lambda f: f, 0), (gradient_of_all, 2)]), ids=["out", "gradient"]
)
def test_one_kernel_pass(change, most):
    """A second pass over the keys, or a copy of them with one key more."""
    shapes = [jax.ShapeDtypeStruct((1, 70, 2, 8), jnp.float32)] * 3
    sink = jax.ShapeDtypeStruct((2,), jnp.float32)

    def products(f, *arrays):
        program = jax.jit(f).lower(*arrays).compile()
        found = instructions(program)
        return sum(n for (_, name), n in found.items() if name in ("dot", "while"))

    def plain(*x):
        return ea.attention(*x)

    def sunk(q, k, v, b):
        return ea.attention(q, k, v, sink=b)

    extra = products(change(sunk), *shapes, sink) - products(change(plain), *shapes)
    assert 0 <= extra <= most
