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
from tests.support.complaints import B, H, K, N, S, T, V, a, complains
from tests.support.measures import answers, measure
from tests.support.observables import directions, exactly
from tests.support.problems import PROBLEMS, Problem, cast, cotangents
from tests.support.programs import instructions
from tests.support.reference import dense, dense_vjp
from tests.support.selection import few_rows
from tests.support.sinks import gradient_of, sink_of, with_key


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
            ("reference", "mask_nothing", True),
            ("decode", "decode_cache", False),
            ("blockwise", "bias_infinite", True),
            ("blockwise", "no_keys", False),
            (None, "grouped", False),
            ("reference", "ragged", False),
            ("blockwise", "positions_causal", True),
            ("blockwise", "shift_down", False),
            ("blockwise", "shift_up", False),
            ("reference", "rule_nested", True),
        ],
        5,
    ),
)
def test_values_and_derivatives(implementation, name, batched):
    """A share or a derivative that forgets the sink, in either mode; a sink that an absent query sees."""
    problem = PROBLEMS[name]
    sink = sink_of(problem, batched)
    whole = with_key(problem, sink)
    arrays = cast(problem, jnp.float64)[0] | {"sink": jnp.asarray(sink)}
    pair = state(problem, implementation)
    given = cotangents(problem, jnp.float64)
    rng = np.random.default_rng(0)
    along = {n: jnp.asarray(rng.standard_normal(x.shape)) for n, x in arrays.items()}

    @jax.jit
    def run(arrays, given, along):
        found, back = jax.vjp(pair, arrays)
        return found, back(given)[0], jax.jvp(pair, (arrays,), (along,))[1]

    (out, energy), gradients, change = run(arrays, given, along)
    close(out, dense(whole)[0], "out")
    close(energy, dense(whole)[1], "energy")
    exact = gradient_of(problem, sink, dense_vjp(whole, *map(np.asarray, given)))
    forward = sum(np.vdot(x, y) for x, y in zip(given, change, strict=True))
    backward = sum(np.vdot(gradients[n], along[n]) for n in exact)
    np.testing.assert_allclose(forward, backward, rtol=1e-9, atol=1e-9)
    for n, x in exact.items():
        close(gradients[n], x, n, 1e-11)


def test_infinities():
    """A NaN, or a derivative that is not the limit's, for a sink that is infinite or of fully masked rows."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, 4, 2, 3), jnp.float64)
    mask = jnp.asarray([True, True, False, False])[None, :, None]  # the last rows see nothing

    def both(query, sink):
        return ea.attention(query, key, value, mask=mask, sink=sink, return_energy=True)

    plain = ea.attention(query, key, value, mask=mask, return_energy=True)
    total = jax.jit(jax.grad(lambda *x: sum(y.sum() for y in both(*x)), (0, 1)))
    sinks = jnp.asarray([-jnp.inf, 0.3]), jnp.asarray([jnp.inf, -jnp.inf])
    for sink in sinks:
        out, energy = both(query, sink)
        for head in range(2):
            if sink[head] == -jnp.inf:
                np.testing.assert_array_equal(out[:, head], plain[0][:, head])
                np.testing.assert_array_equal(energy[:, head], plain[1][:, head])
            elif sink[head] == jnp.inf:
                assert not out[:, head].any() and (energy[:, head] == jnp.inf).all()
            else:
                assert not out[2:, head].any() and (energy[2:, head] == sink[head]).all()
        of_query, of_sink = total(query, sink)
        assert np.isfinite(of_query).all() and not of_query[2:].any()
        assert np.isfinite(of_sink).all()
    of_infinite = jax.grad(lambda b: ea.free_energy(query, key, value, sink=b).sum())(sinks[1])
    assert of_infinite.tolist() == [4.0, 0.0]  # four rows
    # what is broken elsewhere is not hidden by it
    broken = both(query.at[0, 0, 0].set(jnp.nan), sinks[1])
    assert np.isnan(broken[0][0, 0]).all() and np.isnan(broken[1][0, 0])


def test_second_order():
    """A second derivative that misses the sink: of both kinds, by both modes one after the other."""
    shape = 3, 2, 2
    query, key, value = (
        jax.random.normal(k, shape) for k in jax.random.split(jax.random.key(0), 3)
    )
    sink = jnp.asarray([0.4, -0.8])
    arrays = tuple(x.astype(jnp.float64) for x in (query, key, value, sink))

    def ours(query, key, value, sink):
        out, energy = ea.attention(
            query, key, value, sink=sink, return_energy=True, implementation="blockwise"
        )
        return jnp.sin(out).sum() + (energy**2).sum()

    def naive(query, key, value, sink):
        scores = jnp.einsum("tnh,snh->tns", query, key) / 2**0.5
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink[None, :, None], (3, 2, 1))], -1)
        energy = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - energy[..., None])
        out = jnp.einsum("tns,snh->tnh", weights[..., :-1], value)
        return jnp.sin(out).sum() + (energy**2).sum()

    exact = jax.jit(jax.hessian(naive, (0, 1, 2, 3)))(*arrays)
    for outer, inner in ((jax.jacfwd, jax.grad), (jax.jacrev, jax.grad), (jax.jacfwd, jax.jacfwd)):
        found = jax.jit(outer(inner(ours, (0, 1, 2, 3)), (0, 1, 2, 3)))(*arrays)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
            close(x, y, f"{outer.__name__} of {inner.__name__}", 1e-11)


PROBLEM = PROBLEMS["everything"]
ARRAYS, _ = cast(PROBLEM, jnp.float64)
ALONG = [jnp.asarray(u) for u in directions(PROBLEM)]


def everything(F, along=ALONG):
    return {"energy": F(), "attention": F.attention(), **answers(F, along)}


def exact_of(whole: Problem, like: Problem = PROBLEM) -> dict:
    out, energy = dense(whole)
    return {"energy": energy, "attention": out, **exactly(replace(whole, name=like.name))}


def test_observables():
    """An observable of the keys alone, or one that gives the sink another value than zero."""
    sink = sink_of(PROBLEM)

    @jax.jit
    def run(arrays, sink):
        F = measure(**arrays, **PROBLEM.options, sink=sink)
        return everything(F)

    exact = exact_of(with_key(PROBLEM, sink))
    close(run(ARRAYS, jnp.asarray(sink)), exact, "sink", tolerance=1e-10)
    plain = exact_of(PROBLEM)
    close(run(ARRAYS, jnp.full(sink.shape, -jnp.inf)), plain, "minus infinity", tolerance=1e-10)
    assert np.abs(plain["entropy"] - exact["entropy"]).max() > 0.1


def test_gradients_of_observables():
    """A derivative of an observable in the sink that is zero or another one's: differences of the definitions."""
    problem, step = PROBLEMS["grouped"], 1e-3
    sink = sink_of(problem)
    arrays, _ = cast(problem, jnp.float64)
    along = [jnp.asarray(u) for u in directions(problem)]
    rng = np.random.default_rng(0)
    direction = rng.standard_normal(sink.shape)

    @jax.jit
    def run(sink):
        def f(sink):
            return answers(measure(**arrays, **problem.options, sink=sink), along)

        return jax.jvp(f, (sink,), (jnp.asarray(direction),))[1]

    def at(shift):
        whole = with_key(problem, sink + shift * step * direction)
        return exactly(replace(whole, name=problem.name), np.longdouble)

    values = {i: at(i) for i in (-2, -1, 1, 2)}
    for name, found in run(jnp.asarray(sink)).items():
        x = {i: v[name] for i, v in values.items()}
        exact = (8 * (x[1] - x[-1]) - (x[2] - x[-2])) / (12 * step)
        close(found, exact.astype(np.float64), name, 1e-10)


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
        few_answers(both, along),
        few_answers(one, along),
        few_answers(both.tilt(along[0]), along),
        few_answers(one.tilt(along[0]), along),
        few_answers(A | at(rest, None), along),
        few_answers(at(slice(None), first), along),
        (A(), jnp.logaddexp(at(slice(3), None)(), first[None, None])),
    )


def few_answers(F, along):
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
    return ea.FreeEnergy().at(query, *longer, bias=bias), ea.FreeEnergy(sink=sink).at(
        query, key, value
    )


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
    gradient = jax.grad(
        lambda b: ea.FreeEnergy(sink=b).at(query, key, value).rate(point).value.sum()
    )
    exact = jax.grad(lambda b: explicit(query, key, value, b)[0].rate(point).value.sum())
    close(gradient(sink), exact(sink), "gradient of the rate", 1e-7)


def test_draws():
    """A sink that is never drawn, or drawn as a key; in a union, an index that is another's."""
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((2, 3, 2, 3)))
    key, value = jnp.asarray(rng.standard_normal((2, 2, 4, 2, 3)))
    sink = jnp.asarray([1.0, -0.5])
    wanted, F = explicit(query, key, value, sink)
    count = 4000
    drawn = F.sample(key=jax.random.key(1), count=count)
    share = np.asarray((drawn == 4).mean(-1))
    exact = np.asarray(jnp.exp(sink[None, None] - F()))
    assert np.abs(share - exact).max() < 5 * (0.25 / count) ** 0.5
    # the mean of the drawn values, with zero for the sink, is attention
    values = jnp.concatenate([value, jnp.zeros_like(value[:, :1])], 1)
    heads = jnp.arange(2)[None, None, :, None]
    mean = values[jnp.arange(2)[:, None, None, None], drawn, heads].mean(-2)
    assert np.abs(mean - wanted.attention()).max() < 0.15
    assert set(np.unique(drawn)) == {0, 1, 2, 3, 4}
    none = ea.FreeEnergy(sink=jnp.full(2, -jnp.inf)).at(query, key, value)
    assert none.sample(key=jax.random.key(1), count=100).max() == 3
    # after the keys of all measures, the sinks of each
    mask = jnp.zeros((1, 1, 1, 4), bool)
    for i, sinks in enumerate([(9.0, -9.0), (-9.0, 9.0)]):
        A, C = (
            ea.FreeEnergy(sink=jnp.full(2, b) + 40 * b).at(query, key, value, mask=mask)
            for b in sinks
        )
        assert ((A | C).sample(key=jax.random.key(2)) == 8 + i).all()


def test_sixteen_bits():
    """`out` rounded twice, by the kernel and after the merge; energies rounded to the sink's dtype."""
    problem = PROBLEMS["plain"]
    sink = sink_of(problem)
    given, rounded = cast(problem, jnp.bfloat16)
    arrays: Any = given
    out, energy = ea.attention(**arrays, sink=jnp.asarray(sink, jnp.float32), return_energy=True)
    exact = dense(with_key(rounded, sink.astype(np.float32).astype(np.float64)))
    assert out.dtype == jnp.bfloat16 and energy.dtype == jnp.float32
    half = jnp.finfo(jnp.bfloat16).eps / 2
    # the weights are rounded to bfloat16 for the product with the values; twice would be a half more
    assert np.abs(np.asarray(out, np.float64) - exact[0]).max() < 2.5 * half
    np.testing.assert_allclose(energy, exact[1], rtol=2e-6)


def test_score():
    """A sink that the score is applied to, as to the keys' products, or that follows a path of its own without one."""
    problem = PROBLEMS["grouped"]
    arrays, _ = cast(problem, jnp.float64)
    query, key, value = (arrays[n] for n in ("query", "key", "value"))
    sink = jnp.asarray(sink_of(problem))
    F = ea.FreeEnergy(score=ea.scores.SoftCap(0.5), sink=sink).at(query, key, value)
    products = (
        np.einsum("btnh,bsnh->bnts", query, np.repeat(key, 3, 2)) / problem.query.shape[-1] ** 0.5
    )
    capped = replace(problem, scale=0.0, bias=0.5 * np.tanh(products / 0.5))
    whole = with_key(capped, np.asarray(sink))
    out, energy = dense(whole)
    close(F(), energy)
    close(F.attention(), out)
    close(F.entropy(), exactly(whole)["entropy"])


def test_module():
    """A sink that is no leaf, gets no gradient, or does not reach attention, measures or reports of a layer."""
    sink = jnp.asarray(sink_of(PROBLEMS["plain"])[:2])
    layer = ea.MultiheadAttention(2, 6, sink=sink, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (5, 6))
    gradient = eqx.filter_grad(lambda layer: (layer(x, x, x) ** 2).sum())(layer)
    assert gradient.energy.sink.shape == (2,) and (gradient.energy.sink != 0).all()
    heads = layer.project(x, x, x)
    F = layer.energy.at(*heads)
    np.testing.assert_allclose(ea.attention(*heads, sink=sink), F.attention(), rtol=1e-6)
    report = ea.energy_report(layer, x, x, x, per_query=True)
    np.testing.assert_allclose(report.entropy[0], F.entropy(), rtol=1e-5)
    # dropout takes away keys and leaves the sink: in the mean, attention with the sink
    noisy = ea.MultiheadAttention(2, 6, sink=sink, dropout_p=0.5, key=jax.random.key(0))
    draws = jax.jit(jax.vmap(lambda key: noisy(x, x, x, key=key)))(
        jax.random.split(jax.random.key(2), 4000)
    )
    np.testing.assert_allclose(draws.mean(0), layer(x, x, x), atol=0.05)


def test_one_kernel_pass():
    """A second pass over the keys, or a copy of them with one key more."""
    shapes = [jax.ShapeDtypeStruct((1, 70, 2, 8), jnp.float32)] * 3
    sink = jax.ShapeDtypeStruct((2,), jnp.float32)

    def products(f, *arrays):
        program = jax.jit(f).lower(*arrays).compile()
        found = instructions(program)
        return sum(n for (_, name), n in found.items() if name in ("dot", "while"))

    def gradient(f):
        return jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2))

    def plain(*x):
        return ea.attention(*x)

    def sunk(q, k, v, b):
        return ea.attention(q, k, v, sink=b)

    assert products(sunk, *shapes, sink) == products(plain, *shapes)
    # the derivative of the share is one more product of rows
    extra = products(gradient(sunk), *shapes, sink) - products(gradient(plain), *shapes)
    assert 0 <= extra <= 2


CALLS = [
    lambda b: ea.attention(a(B, T, N, H), a(B, S, K, H), a(B, S, K, V), sink=b),
    lambda b: ea.free_energy(a(B, T, N, H), a(B, S, K, H), a(B, S, K, V), sink=b),
]
MODULES = [
    lambda b: ea.FreeEnergy(sink=b).at(a(B, T, N, H), a(B, S, K, H), a(B, S, K, V)),
    lambda b: ea.FreeEnergy(sink=b)(a(B, T, N, H), a(B, S, K, H), a(B, S, K, V)),
]


@pytest.mark.parametrize("call", CALLS + MODULES)
def test_bad_shapes(call):
    """A sink of another shape, which broadcasts silently, or an error that names something else."""
    complains(lambda: call(a(K)), ValueError, "sink", "float32[2]", f"({N},) or ({B}, {N})")
    complains(lambda: call(a(T, N)), ValueError, "sink", "float32[3,4]", f"({B}, {N})")
    complains(lambda: call(a(1, 1, N)), ValueError, "sink", "float32[1,1,4]", "(")


@pytest.mark.parametrize("call", CALLS)
def test_bad_types(call):
    """A number, list or integers that are taken for scores."""
    complains(lambda: call([0.0] * N), TypeError, "sink", "list", "array")
    complains(lambda: call(a(N, dtype="int32")), TypeError, "sink", "int32[4]", "float32")
