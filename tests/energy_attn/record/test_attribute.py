"""Effects of documents: integrals along the path on which all grow from nothing, and what their sum misses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, make_mesh
from tests.support.complaints import complains
from tests.support.selection import few

WIDTH, NAMES, DOCUMENTS = 64, 30, 16
SEGMENTS = np.asarray([*np.arange(2 * DOCUMENTS) // 2, -1, -1])


def answer(embedding, tokens, target, sharpness):
    """The log-probability of a target by two heads that retrieve: one copies the token before, one finds its like."""
    x, places = embedding[tokens], jnp.eye(len(tokens), dtype=embedding.dtype)
    before = jnp.concatenate([places[:1], places[:-1]])
    options = {"scale": 1.0, "is_causal": True}
    copied = ea.attention(100 * before[:, None], places[:, None], x[:, None], **options)
    found = ea.attention(sharpness * x[:, None], copied, x[:, None], **options)
    return jax.nn.log_softmax(12 * found[-1, 0] @ embedding.T)[target]


def question(seed):
    """Documents of a name and a word; the name of one, behind a token that is in none; its word, and its number."""
    random = np.random.default_rng(seed)
    embedding = random.normal(size=(2 * NAMES + 2, WIDTH)) / np.sqrt(WIDTH)
    names, words = (1 + x * NAMES + random.permutation(NAMES)[:DOCUMENTS] for x in range(2))
    chosen = int(random.integers(DOCUMENTS))
    tokens = [*np.stack([names, words], 1).reshape(-1), 0, names[chosen]]
    return (embedding, np.asarray(tokens), int(words[chosen])), chosen


@pytest.mark.parametrize("sharpness", few([8.0, 200.0], 200.0))
def test_a_model_that_retrieves(sharpness):
    """Points that never see a head turn far below them: effects of 0.000 where the truth is 8 nats."""
    arguments, chosen = question(0)
    arguments = *(jnp.asarray(x) for x in arguments), sharpness
    given = jnp.asarray(SEGMENTS), *arguments
    found = ea.attribute(answer)(jnp.zeros(DOCUMENTS), *given)
    at = jax.jit(ea.weigh(answer))
    change = at(jnp.zeros(DOCUMENTS), *given) - at(jnp.full(DOCUMENTS, -jnp.inf), *given)
    assert change > 5
    np.testing.assert_allclose(found.change, change, rtol=1e-12)
    np.testing.assert_allclose(found.effects.sum(), change, rtol=0.01)
    np.testing.assert_allclose(found.gap, found.effects.sum() - change, atol=1e-9)
    assert np.argmax(found.effects) == chosen

    # another rule: the derivative at 6,001 log-weights
    grid = jnp.linspace(-300.0, 0.0, 6001)
    slope = jax.grad(at)
    each = jax.jit(lambda u: jax.lax.map(lambda u: slope(jnp.full(DOCUMENTS, u), *given), u))
    slopes = each(grid)
    wanted = np.trapezoid(slopes, grid, axis=0)
    np.testing.assert_allclose(found.effects, wanted, atol=0.01 * float(change))


def test_rows_of_weights():
    """Effects of another row of a batch; and a tolerance that is not met."""
    random = np.random.default_rng(0)
    q, k, v, u = random.normal(size=(4, 2, 6, 1, 3))
    segments, weights = np.asarray([0, 1, 1, 2, -1, -1]), random.normal(size=(2, 3))

    def f():
        return (ea.attention(*map(jnp.asarray, (q, k, v))) * u).sum()

    found = ea.attribute(f, tolerance=1e-4)(jnp.asarray(weights), jnp.asarray(segments))
    scores = np.einsum("btnh,bsnh->bts", q, k) / np.sqrt(3)
    along = np.einsum("btnh,bsnh->bts", u, v)
    grid = np.linspace(-40.0, 0.0, 8001)
    member = segments[:, None] == np.arange(3)

    def slope(shift):
        added = np.where(segments < 0, 0.0, weights[:, np.maximum(segments, 0)] + shift)
        P = np.exp(scores + added[:, None])
        P /= P.sum(-1, keepdims=True)
        return np.einsum("bts,sd->bd", P * (along - (P * along).sum(-1, keepdims=True)), member)

    wanted = np.trapezoid(np.stack([slope(x) for x in grid]), grid, axis=0)
    scale = max(np.abs(wanted.sum()), np.abs(wanted).max())
    np.testing.assert_allclose(found.effects, wanted, atol=2e-4 * scale)


def test_over_devices():
    """Log-weights that follow another order of keys, or effects that are those of one device's keys."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(x) for x in random.normal(size=(3, 1, 32, 2, 4)))
    segments = jnp.asarray([-1, -1, *np.arange(30) // 10])

    def of(parallel):
        def last():
            return ea.attention(3 * q, k, v, is_causal=True, parallel=parallel)[0, -1].sum()

        return jax.jit(ea.attribute(last))(jnp.zeros(3), segments)

    wanted = of(None)
    with jax.set_mesh(make_mesh((8,), ("device",))):
        found = of(SequenceParallel("device"))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


def test_a_gap_is_warned_of():
    """Effects that are believed: rows that see documents alone change when these are gone, and not on the way."""
    q, k, v = (jnp.asarray(x) for x in np.random.default_rng(0).normal(size=(3, 6, 2, 4)))

    def total():
        return ea.attention(q, k, v).sum()

    with pytest.warns(UserWarning, match=r"attribute: the effects add up to .* raise max_points"):
        found = ea.attribute(total)(jnp.zeros(2), jnp.arange(6) // 3)
    np.testing.assert_allclose(found.gap, -found.change, rtol=1e-6)
    inside = jax.jit(ea.attribute(total))(jnp.zeros(2), jnp.arange(6) // 3)
    np.testing.assert_allclose(inside.gap, found.gap)


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    """An error that does not name the argument, what was wanted and what came."""
    q = jnp.ones((6, 2, 4))
    given = jnp.zeros(2), jnp.arange(6) // 3
    rows = ea.attribute(lambda: ea.attention(q, q, q))
    count = ea.attribute(lambda: (ea.attention(q, q, q).sum(), 1)[1])
    complains(lambda: ea.attribute(3), TypeError, "function", "3", "a function")
    complains(lambda: rows(*given), TypeError, "function", "[6,2,4]", "floating scalar")
    complains(lambda: count(*given), TypeError, "function", "1", "floating scalar")
    for tolerance in (0, -0.1):
        bad = lambda tolerance=tolerance: ea.attribute(rows, tolerance=tolerance)  # noqa: E731
        complains(bad, ValueError, "tolerance", str(tolerance), "above 0")
    total = ea.attribute(lambda: ea.attention(q, q, q).sum())
    slope = jax.grad(lambda w: total(w, given[1]).effects.sum())
    with pytest.raises(ValueError, match="Reverse-mode"):
        slope(given[0])
    complains(lambda: ea.attribute(rows, max_points=4), ValueError, "max_points", "4", "at least 5")
