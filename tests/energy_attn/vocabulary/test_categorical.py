"""Losses over a vocabulary, beside dense softmaxes in float64: values, and derivatives of both orders and modes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from tests.energy_attn.vocabulary.problems import (
    OPTIONS,
    SHAPE,
    WORDS,
    answers,
    arrays,
    dense,
    layers,
    loss_of,
    static,
)
from tests.support.compare import close
from tests.support.programs import token_chunks, word_blocks


@pytest.fixture(autouse=True)
def _blocks_of_128_words(monkeypatch):
    word_blocks(monkeypatch, 1)


def given(kind, seed=None):
    if seed is None:
        return {name: jnp.asarray(x) for name, x in arrays(kind).items()}
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(x.shape)) for name, x in arrays(kind).items()}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", OPTIONS)
def test_values_and_gradients(kind):
    """A word of two blocks that counts twice; a hidden word's share; a mean of one model under the other."""
    found, integers = jax.jit(functools.partial(answers, kind))(given(kind))
    close(found, jax.device_get(dense(kind, given(kind))))
    slope = jax.jit(jax.grad(loss_of(answers, kind)))(given(kind))
    close(slope, jax.device_get(jax.grad(loss_of(dense, kind))(given(kind))), tolerance=1e-10)
    mode, words, draws, is_correct = integers
    np.testing.assert_array_equal(words[..., 0], mode)
    assert static(kind)[1][np.asarray(draws)].all() and static(kind)[1][np.asarray(words)].all()
    assert not is_correct[1, 1]


@pytest.mark.parametrize("kind", OPTIONS)
def test_second_order(kind):
    """A derivative that holds F or a mean constant; a mode in which one is missing."""
    along = given(kind, 3)

    def products(f):
        loss = loss_of(f, kind)
        slope = jax.grad(loss)
        forward = jax.jvp(loss, (given(kind),), (along,))[1]
        mixed = jax.jvp(slope, (given(kind),), (along,))[1]

        def rate(x):
            return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, slope(x), along)))

        return forward, mixed, jax.grad(rate)(given(kind))

    found = jax.jit(lambda: products(answers))()
    close(found, jax.device_get(products(dense)), tolerance=1e-9)


def test_fisher_products():
    """The Fisher matrix of the output layer that is not the covariance of rows of its matrix, as attention has it."""
    x, along = given("plain"), given("plain", 3)["hidden"]

    def energy(hidden):
        return ea.Categorical(hidden, x["weight"]).log_partition().sum()

    product = jax.jvp(jax.grad(energy), (x["hidden"],), (along,))[1]
    rows, query = x["weight"][None, :, None], x["hidden"][:, :, None]
    measure = ea.FreeEnergy(scale=1.0).at(
        query, jnp.tile(rows, (2, 1, 1, 1)), jnp.tile(rows, (2, 1, 1, 1))
    )
    covariance = measure.covariance()[:, :, 0]
    close(product, np.asarray(jnp.einsum("btij,btj->bti", covariance, along)), tolerance=1e-10)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_narrow_dtypes(dtypes):
    """Sums in 16 bits, or gradients of another dtype than their arrays."""
    hidden, weight = (
        jnp.asarray(arrays("plain")[name], dtype)
        for name, dtype in zip(("hidden", "weight"), dtypes, strict=True)
    )
    labels = jnp.asarray(static("plain")[2])
    value, slope = jax.value_and_grad(ea.softmax_cross_entropy, (0, 1))(hidden, weight, labels)
    wide = (jnp.asarray(x, jnp.float64) for x in (hidden, weight))
    exact, exact_slope = jax.value_and_grad(ea.softmax_cross_entropy, (0, 1))(*wide, labels)
    assert value.dtype == jnp.float32 and [x.dtype for x in slope] == [*dtypes]
    close(np.float64(value), np.float64(exact), tolerance=1e-6 if "float32" in dtypes else 1e-5)
    for x, y in zip(slope, exact_slope, strict=True):
        scale = np.abs(y).max()
        close(np.float64(x) / scale, np.float64(y) / scale, tolerance=2e-2)


@pytest.mark.parametrize("chunk", [None, 2])
def test_vmap_scan_and_checkpoint(chunk, monkeypatch):
    """A loop or a map over hidden states, or over output matrices too, whose gradients differ from those without."""
    if chunk:
        token_chunks(monkeypatch, chunk)
    x, labels = given("plain"), jnp.asarray(static("plain")[2])

    def whole(hidden, weight):
        return ea.softmax_cross_entropy(hidden, weight, labels, reduction="none").sum()

    def mapped(hidden, weight):
        one = jax.checkpoint(lambda h, y: ea.softmax_cross_entropy(h, weight, y, reduction="none"))
        return jax.vmap(one)(hidden, labels).sum()

    def scanned(hidden, weight):
        def one(total, row):
            h, y = row
            return total + ea.softmax_cross_entropy(h, weight, y, reduction="sum"), None

        return jax.lax.scan(one, jnp.zeros(()), (hidden, labels))[0]

    def each(hidden, weight):
        copies = jnp.broadcast_to(weight, (len(hidden), *weight.shape))
        one = functools.partial(ea.softmax_cross_entropy, reduction="sum")
        return jax.vmap(one)(hidden, copies, labels).sum()

    args = x["hidden"], x["weight"]
    wanted = jax.device_get(jax.value_and_grad(whole, (0, 1))(*args))
    for f in mapped, scanned, each:
        close(jax.jit(jax.value_and_grad(f, (0, 1)))(*args), wanted)


def test_draws_have_the_probabilities():
    """A draw that forgets the noise of a block, or has one noise for all tokens or words."""
    logits = np.random.default_rng(0).standard_normal((2, WORDS)) * 2
    # two tokens have one distribution, and other draws
    p = ea.Categorical(jnp.eye(2)[jnp.asarray([0, 1, 0])], jnp.asarray(logits.T))
    draws = np.asarray(jax.jit(lambda key: p.sample(key=key, shape=(400,)))(jax.random.key(0)))
    for row in range(2):
        expected = np.exp(logits[row] - np.logaddexp.reduce(logits[row]))
        top = np.argsort(-expected)[:20]
        share = (draws[:, row, None] == top).mean(0)
        assert np.abs(share - expected[top]).max() < 5 * np.sqrt(expected[top].max() / 400)
    assert (draws[:, 0] != draws[:, 2]).mean() > 0.5


def test_hidden_words():
    """NaN, or a finite divergence, where the other model hides a word; an infinite one where this model does."""
    x = given("plain")
    mask = jnp.arange(WORDS) < 200
    p = ea.Categorical(x["hidden"], x["weight"])
    q = ea.Categorical(x["hidden"], x["weight"], mask=mask)
    assert np.isposinf(p.kl_divergence(q)).all() and np.isposinf(p.cross_entropy(q)).all()
    close(q.kl_divergence(p), np.asarray(p.log_partition() - q.log_partition()))
    logits = jnp.where(mask, x["hidden"] @ x["weight"].T, -jnp.inf)
    a, b = jax.nn.softmax(x["hidden"] @ x["weight"].T), jax.nn.softmax(logits)
    m = (a + b) / 2
    exact = 0.5 * (a * jnp.log(a / m) + jnp.where(mask, b * jnp.log(jnp.where(mask, b, 1) / m), 0))
    close(p.js_divergence(q), np.asarray(exact.sum(-1)))
    assert np.isneginf(q.log_prob(jnp.full(SHAPE, 250))).all()
    for f in (
        lambda h: q.kl_divergence(ea.Categorical(h, x["weight"])).sum(),
        lambda h: ea.Categorical(h, x["weight"], mask=mask).js_divergence(p).sum(),
    ):
        assert np.isfinite(jax.grad(f)(x["hidden"] * 1.1)).all()


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_nothing(dtype, chunk, monkeypatch):
    """NaN, or an error, of no token, or where no word is allowed."""
    if chunk:
        token_chunks(monkeypatch, chunk)
    weight, labels = jnp.ones((WORDS, 6), dtype), jnp.zeros((2, 0), jnp.int32)
    step = jax.value_and_grad(ea.softmax_cross_entropy, (0, 1))
    value, slope = step(jnp.ones((2, 0, 6), dtype), weight, labels)
    assert value == 0 and not any(x.any() for x in slope)
    assert [x.shape for x in slope] == [(2, 0, 6), (WORDS, 6)]

    def entropy(hidden):
        return ea.Categorical(hidden, weight, mask=jnp.zeros(WORDS, bool)).entropy().sum()

    for x in jax.jvp(entropy, (jnp.ones((3, 6), dtype),), (jnp.ones((3, 6), dtype),)):
        assert x == 0
    assert not jax.grad(entropy)(jnp.ones((3, 6), dtype)).any()


@pytest.mark.parametrize("chunk", [None, 2])
def test_reductions_and_weights(chunk, monkeypatch):
    """Weights that do not divide the mean; a mean of no tokens; a NaN of an ignored token."""
    if chunk:
        token_chunks(monkeypatch, chunk)
    x, (_, _, labels, ignoring) = given("plain"), static("plain")
    run = functools.partial(ea.softmax_cross_entropy, x["hidden"], x["weight"])
    each = np.asarray(run(jnp.asarray(labels), reduction="none"))
    weights = np.random.default_rng(4).uniform(size=SHAPE)
    given_weights = {"weights": jnp.asarray(weights)}
    close(run(jnp.asarray(labels), reduction="sum"), each.sum())
    close(run(jnp.asarray(labels), **given_weights), (each * weights).sum() / weights.sum())
    kept = ignoring != -100
    close(run(jnp.asarray(ignoring), ignore_index=-100), each[kept].mean())
    nothing = jnp.full(SHAPE, -100)
    assert run(nothing, ignore_index=-100) == 0
    bad = x["hidden"].at[1, 1].set(jnp.nan)
    value, slope = jax.value_and_grad(
        lambda h: ea.softmax_cross_entropy(h, x["weight"], jnp.asarray(ignoring), ignore_index=-100)
    )(bad)
    assert np.isfinite(value) and np.isfinite(np.delete(slope.reshape(6, -1), 4, 0)).all()


def test_labels_of_no_word():
    """A wrong row, or the loss of another word, where a label is not known before it runs."""
    x, run = given("plain"), jax.jit(ea.softmax_cross_entropy, static_argnames="reduction")
    labels = jnp.asarray([[0, -1, WORDS], [WORDS - 1, 5, 6]])
    found = np.isnan(run(x["hidden"], x["weight"], labels, reduction="none"))
    assert found.tolist() == [[False, True, True], [False, False, False]]
    with pytest.raises(ValueError, match=f"labels: wanted numbers from 0 to {WORDS - 1}, got -1"):
        ea.softmax_cross_entropy(x["hidden"], x["weight"], labels)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"hidden": np.ones((2, 6), int)}, TypeError, "hidden: wanted a float16"),
        ({"weight": np.ones((9, 5))}, ValueError, r"weight: wanted shape \(V, 6\)"),
        ({"weight": np.ones((0, 6))}, ValueError, "weight: wanted at least one word"),
        ({"bias": np.ones(8)}, ValueError, r"bias: wanted shape \(9\)"),
        ({"mask": np.ones(9)}, TypeError, "mask: wanted a boolean"),
        ({"temperature": 0.0}, ValueError, "temperature: wanted a number above 0"),
        ({"temperature": np.ones(3)}, ValueError, "temperature: wanted a shape broadcastable"),
        ({"soft_cap": -1.0}, ValueError, "soft_cap: wanted a number above 0"),
        ({"soft_cap": np.ones(())}, TypeError, "soft_cap: wanted"),
        ({"parallel": "model"}, TypeError, "parallel: wanted a VocabularyParallel"),
        ({"parallel": ea.VocabularyParallel("model")}, ValueError, "use jax.set_mesh"),
    ],
)
def test_bad_layers(options, error, words):
    """Another message than one that names the argument."""
    arguments = {"hidden": np.ones((2, 6)), "weight": np.ones((9, 6))} | options
    with pytest.raises(error, match=words):
        ea.Categorical(arguments.pop("hidden"), arguments.pop("weight"), **arguments)


@pytest.mark.usefixtures("unchecked")
def test_bad_calls():
    """Another message than one that names the argument."""
    p, _ = layers("plain", given("plain"))
    narrow = ea.Categorical(p.hidden, p.weight[:-1])
    for f, error, words in [
        (
            lambda: p.kl_divergence(narrow),
            ValueError,
            "other: wanted a vocabulary of 300 words, got 299",
        ),
        (lambda: p.kl_divergence(3), TypeError, "other: wanted a Categorical"),
        (lambda: p.log_prob(jnp.zeros(SHAPE)), TypeError, "labels: wanted an integer"),
        (lambda: p.log_prob(jnp.zeros(3, int)), ValueError, r"labels: wanted shape \(2, 3\)"),
        (lambda: p.top_k(301), ValueError, "k: wanted at most the 300 words"),
        (lambda: p.sample(key=0), TypeError, "key"),
        (
            lambda: ea.softmax_cross_entropy(
                p.hidden, p.weight, jnp.zeros(SHAPE, int), label_smoothing=2
            ),
            ValueError,
            "label_smoothing: wanted a number from 0 to 1",
        ),
        (
            lambda: ea.softmax_cross_entropy(
                p.hidden, p.weight, jnp.zeros(SHAPE, int), reduction="avg"
            ),
            ValueError,
            "reduction",
        ),
    ]:
        with pytest.raises(error, match=words):
            f()
