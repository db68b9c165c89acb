"""Weights of documents: added to the scores of their keys wherever attention runs, and differentiated there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import KVCache
from energy_attn.models import Llama
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.llama import CONFIG
from tests.support.meshes import mesh_of, parallel_of

RNG = np.random.default_rng(0)
Q, K, V = (array(RNG.standard_normal((2, 6, 2, 4))) for _ in range(3))
SEGMENTS = array(np.asarray([[0, 0, 2, -1, 1, 1], [1, 1, 1, 1, -3, 0]]))
WEIGHTS = array(RNG.standard_normal((2, 3)))
BIAS = array(RNG.standard_normal((1, 2, 6, 6)))


def written_out(weights):
    """The same numbers as a bias of the user's own."""
    rows = jnp.take_along_axis(weights, jnp.maximum(SEGMENTS, 0), 1)
    return BIAS + jnp.where(SEGMENTS < 0, 0.0, rows)[:, None, None]


def several(bias):
    """What attends inside a function, each in its way."""
    energy = ea.FreeEnergy(is_causal=True)
    F = energy.at(Q, K, V, bias=bias)
    return (
        ea.attention(Q, K, V, bias),
        ea.free_energy(Q, K, V, bias=bias, source=V),
        energy.attention(Q, K, V, bias=bias),
        F.tilt(V).entropy(),
        ea.FreeEnergy(regulariser=ea.Tsallis(1.5)).attention(Q, K, V, bias=bias),
    )


def inside(bias):
    """The same inside transformations."""
    step = lambda total, _: (total + jax.jit(jax.checkpoint(several))(bias)[0], None)  # noqa: E731
    looped, _ = jax.lax.scan(step, jnp.zeros_like(V), None, length=2)
    one = lambda q, k, v: jax.grad(lambda v: (ea.attention(q, k, v) ** 2).sum())(v)  # noqa: E731
    taken = jax.lax.cond(jnp.asarray(True), several, several, bias)[2]
    return looped, jax.vmap(one, 1, 1)(*(x.reshape(2, 1, 6, 2, 4) for x in (Q, K, V))), taken


def total(function):
    return lambda w: sum((x**2).sum() for x in jax.tree.leaves(function(w)))


@pytest.mark.parametrize("function", [several, inside])
def test_scores(function):
    """A call that is not weighed, a document of another row, a key without one; a derivative that stops at a loop."""
    ours = lambda w: ea.weigh(lambda: function(BIAS))(w, segments)  # noqa: E731
    if function is inside:
        weights, segments = WEIGHTS[0], SEGMENTS[0]
        theirs = lambda w: _inside_written(w, segments)  # noqa: E731
    else:
        weights, segments = WEIGHTS, SEGMENTS
        theirs = lambda w: several(written_out(w))  # noqa: E731
    asked = (lambda f: f, lambda f: jax.grad(total(f)), lambda f: jax.jacfwd(jax.grad(total(f))))
    for ask in asked:
        close(jax.jit(ask(ours))(weights), jax.jit(ask(theirs))(weights))


def _inside_written(weights, segments):
    added = jnp.where(segments < 0, 0.0, weights[jnp.maximum(segments, 0)])[None, None, None]
    bias = BIAS + added
    first = ea.attention(Q, K, V, bias)
    one = lambda q, k, v: jax.grad(lambda v: (ea.attention(q, k, v, added) ** 2).sum())(v)  # noqa: E731
    mapped = jax.vmap(one, 1, 1)(*(x.reshape(2, 1, 6, 2, 4) for x in (Q, K, V)))
    return 2 * first, mapped, ea.FreeEnergy(is_causal=True).attention(Q, K, V, bias=bias)


TOKENS = array(RNG.integers(0, CONFIG.vocab_size, (2, 16)))
DOCUMENTS = array(np.where(np.arange(16) < 12, np.arange(16) // 4, -1))  # and a question


def answer(model, tokens, **options):
    return jax.nn.log_softmax(model(tokens, **options).logits[:, -1])[0, 3]


@pytest.fixture(scope="module")
def model():
    return Llama(CONFIG, jnp.float64, key=jax.random.key(0))


def test_model(model):
    """A layer that is left out; effects that do not sum up to what all documents do; on eight devices, too."""
    at = jax.jit(lambda w: ea.weigh(answer)(w, DOCUMENTS, model, TOKENS))
    zeros, along = jnp.zeros(3), jnp.asarray(RNG.standard_normal(3))
    gradient = jax.jit(jax.grad(at))(zeros)
    by_path = ea.attribute(answer, tolerance=1e-4)
    step = 1e-4
    difference = (at(step * along) - at(-step * along)) / (2 * step)
    np.testing.assert_allclose(jnp.vdot(gradient, along), difference, rtol=1e-6)
    effect = at(zeros) - at(jnp.full(3, -jnp.inf))
    found = by_path(zeros, DOCUMENTS, model, TOKENS)
    np.testing.assert_allclose(found.effects.sum(), effect, rtol=1e-4)
    np.testing.assert_allclose(found.change, effect, rtol=1e-12)
    close(at(zeros), answer(model, TOKENS))

    @jax.jit
    def over_devices(weights):
        options = {"parallel": parallel_of("8")}
        return jax.grad(ea.weigh(answer))(weights, DOCUMENTS, model, TOKENS, **options)

    with jax.set_mesh(mesh_of("8")):
        close(jax.device_get(over_devices(zeros)), np.asarray(gradient))


@pytest.mark.usefixtures("unchecked")
def test_refused():
    """Weights of keys that a call has not, or a derivative that a rule of the user's would lose: silently zero."""
    attend = lambda v: ea.attention(Q, K, v)  # noqa: E731
    weights, segments = jnp.zeros(3), jnp.arange(6) // 2
    bad = {
        "function: wanted a function": lambda: ea.weigh(3),
        "log_weights: wanted shape": lambda: ea.weigh(attend)(weights[0], segments, V),
        "segments: wanted shape": lambda: ea.weigh(attend)(WEIGHTS, SEGMENTS[:1], V),
        "segments: wanted documents below 3, got 5": lambda: ea.weigh(attend)(
            weights, jnp.arange(6), V
        ),
        "segments: wanted one for each key .* of 2 rows of 6 keys; got 1 of 5": (
            lambda: ea.weigh(attend)(weights, segments[:5], V)
        ),
        "function: wanted one that calls": lambda: ea.weigh(jnp.sin)(weights, segments, V),
    }
    for words, call in bad.items():
        with pytest.raises((TypeError, ValueError), match=words):
            call()

    @jax.custom_jvp
    def own(v):
        return ea.attention(Q, K, v)

    own.defjvp(lambda primals, tangents: (own(*primals), own(*tangents)))
    with pytest.raises(NotImplementedError, match="log_weights, got one inside a custom_jvp"):
        ea.weigh(lambda v: jax.jit(own)(v))(weights, segments, V)

    def cached(k):
        return KVCache.empty(2, 8, 2, 4, dtype=jnp.float64, block_size=8).append(k, V).attend(Q).out

    with pytest.raises(ValueError, match="of 2 rows of 8 keys; got 1 of 6"):
        ea.weigh(cached)(weights, segments, K)


def test_traced_segments():
    """A number that is no document, in a program that cannot raise: another document's weight."""
    found = jax.jit(lambda s: ea.weigh(lambda: ea.attention(Q, K, V))(jnp.zeros(3), s))
    assert bool(jnp.isnan(found(jnp.asarray([0, 1, 2, 3, 0, 0]))).all())


def test_jit_of_transformed():
    """A transformed function that `jax.jit` does not take, as it has no hash."""
    attend = lambda v: ea.attention(Q, K, v)  # noqa: E731
    out, seen = jax.jit(ea.record(attend, "energy"))(V)
    weighed = jax.jit(ea.weigh(attend))(jnp.zeros(1), jnp.zeros(6, jnp.int32), V)
    close((out, seen["attention"]["energy"]), (weighed, ea.free_energy(Q, K, V)))
