"""Sums of losses whose gradients are computed in chunks of tokens, beside dense softmaxes in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.programs import token_chunks

TOKENS, WORDS, WIDTH = 14, 30, 4
rng = np.random.default_rng(0)
MASK, LABELS = np.arange(WORDS) % 5 > 0, rng.choice([1, 2, 13, 29], TOKENS)
LABELS[3] = -100
LOSS = {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": -100, "soft_cap": 3.0}


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"hidden": (TOKENS, WIDTH), "weight": (WORDS, WIDTH), "bias": (WORDS,)}
    made = {name: rng.standard_normal(x) for name, x in shapes.items()}
    made |= {name: rng.uniform(0.5, 2, TOKENS) for name in ("temperature", "scale", "weights")}
    return {name: jnp.asarray(x) for name, x in made.items()}


def loss(x, parallel=None):
    names = "bias", "temperature", "scale", "weights"
    return ea.softmax_cross_entropy(
        *(x["hidden"], x["weight"], jnp.asarray(LABELS)),
        **{name: x[name] for name in names},
        **{"mask": jnp.asarray(MASK), "parallel": parallel} | LOSS,
    )


def dense(x):
    s = x["scale"][:, None] * (x["hidden"] @ x["weight"].T) + x["bias"][None]
    s = (3 * jnp.tanh(s / 3) / x["temperature"][:, None])[:, MASK]
    lse, at = jax.nn.logsumexp(s, -1), np.cumsum(MASK)[np.maximum(LABELS, 1)] - 1
    each = 0.9 * (lse - s[np.arange(TOKENS), at]) + 0.1 * (lse - s.mean(-1)) + 1e-2 * lse**2
    factor = jnp.where(LABELS != -100, x["weights"], 0)
    return (factor * each).sum() / factor.sum()


def test_derivatives(monkeypatch):
    """A token of two chunks that counts twice; a gradient of one chunk, or one that is held constant."""
    token_chunks(monkeypatch, 6)  # three chunks of five tokens, of which the last two overlap
    x, along = arrays(), arrays(3)

    def products(f):
        slope = jax.grad(f)

        def rate(x):
            return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, slope(x), along)))

        forward = jax.jvp(f, (x,), (along,))
        return jax.value_and_grad(f)(x), forward, jax.jvp(slope, (x,), (along,)), jax.grad(rate)(x)

    close(jax.jit(lambda: products(loss))(), jax.device_get(products(dense)), tolerance=1e-10)


@pytest.mark.parametrize("names", ["hidden", "weight", "bias weights"])
def test_some_arguments(names, monkeypatch):
    """A gradient of another argument, where only some have one."""
    token_chunks(monkeypatch, 6)
    x = arrays()
    some = {name: x.pop(name) for name in names.split()}
    found = jax.grad(lambda some: loss(x | some))(some)
    close(found, jax.device_get(jax.grad(lambda some: dense(x | some))(some)), tolerance=1e-10)


@pytest.mark.parametrize("kind", ["2x4", "2x4 explicit"])
def test_on_a_mesh(kind, monkeypatch):
    """A sum over the tokens of one device; a gradient of words that devices do not sum."""
    token_chunks(monkeypatch, 4)
    x = arrays()
    wanted = jax.device_get(jax.value_and_grad(dense)(x))
    parallel = None if "explicit" in kind else ea.VocabularyParallel(tokens="node")
    with jax.set_mesh(mesh_of(kind)):
        tokens = {name: P("node") for name in ("hidden", "temperature", "scale", "weights")}
        x = {name: jax.device_put(y, tokens.get(name, P())) for name, y in x.items()}
        found = jax.jit(jax.value_and_grad(lambda x: loss(x, parallel)))(x)
    close(jax.device_get(found), wanted, tolerance=1e-10)


def policy_loss(x, sum_over=ea.sum_over_tokens):
    """A loss of two models with all statistics, of which one has other tokens' temperatures."""
    p = ea.Categorical(x["hidden"], x["weight"], x["bias"], temperature=x["temperature"])
    q = ea.Categorical(x["other_hidden"], x["other_weight"], soft_cap=2.0, mask=jnp.asarray(MASK))
    labels = jnp.asarray(np.maximum(LABELS, 0)).reshape(p.hidden.shape[:-1])

    def each(p, q, labels, factor):
        terms = p.log_prob(labels), p.entropy(), q.kl_divergence(p), p.js_divergence(q)
        return factor * sum(jnp.sin((i + 1) * x) for i, x in enumerate(terms))

    return sum_over(each, p, q, labels, x["weights"])


def test_losses_of_two_models(monkeypatch):
    """A statistic of another chunk or of another model; a temperature that is not a token's own."""
    rng = np.random.default_rng(1)
    x = arrays() | {
        "other_hidden": jnp.asarray(rng.standard_normal((TOKENS, 3))),
        "other_weight": jnp.asarray(rng.standard_normal((WORDS, 3))),
    }
    x = {name: y.reshape(2, 7, *y.shape[1:]) if len(y) == TOKENS else y for name, y in x.items()}
    whole = functools.partial(policy_loss, sum_over=lambda f, *args: f(*args).sum())
    wanted = jax.device_get(jax.value_and_grad(whole)(x))
    token_chunks(monkeypatch, 6)
    close(jax.jit(jax.value_and_grad(policy_loss))(x), wanted, tolerance=1e-10)
    # products of 16 bits are not summed in chunks
    narrow = [name for name in x if "hidden" in name or name.endswith("weight")]
    x = {n: y.astype(jnp.bfloat16 if n in narrow else jnp.float32) for n, y in x.items()}
    assert policy_loss(x) == whole(x)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("chunk", [None, 2])
def test_bad_arguments(chunk, monkeypatch):
    """A gradient that is zero without a word, or another message than one that names the argument."""
    if chunk:
        token_chunks(monkeypatch, chunk)
    p, q = (ea.Categorical(jnp.ones((n, 4)), jnp.ones((9, 4))) for n in (4, 5))
    entropy = ea.Categorical.entropy

    def hides(scale):
        return ea.sum_over_tokens(lambda p: scale * p.entropy(), p)

    for f, error, words in [
        (lambda: jax.grad(hides)(2.0), ValueError, "f: wanted a function that takes traced arrays"),
        (lambda: ea.sum_over_tokens(entropy, jnp.ones(4)), TypeError, "at least one Categorical"),
        (lambda: ea.sum_over_tokens(lambda p, x: p.entropy(), p, 2.0), TypeError, "args: wanted"),
        (lambda: ea.sum_over_tokens(lambda *x: x[0].entropy(), p, q), ValueError, r"axes \(4,\)"),
        (lambda: ea.sum_over_tokens(lambda p: p.hidden, p), ValueError, "f: wanted losses of"),
    ]:
        with pytest.raises(error, match=words):
            f()


def test_draws_in_a_chunk(monkeypatch):
    """The same noise in each chunk."""
    token_chunks(monkeypatch, 2)
    p = ea.Categorical(jnp.ones((4, 4)), jnp.ones((9, 4)))
    with pytest.raises(NotImplementedError, match="sample: wanted a call outside"):
        ea.sum_over_tokens(lambda p: p.sample(key=jax.random.key(0)), p)


def test_products(monkeypatch):
    """A second product of logits in a chunk; more than one chunk of logits in memory; a loop of matrix copies."""
    token_chunks(monkeypatch, 64)
    tokens, words, width = 512, 4096, 128
    step = jax.value_and_grad(ea.softmax_cross_entropy, (0, 1))
    arrays = ((tokens, width), jnp.float32), ((words, width), jnp.float32), ((tokens,), jnp.int32)
    program = jax.jit(step).lower(*(jax.ShapeDtypeStruct(*x) for x in arrays)).compile()
    assert program.as_text().count(" dot(") == 3
    chunk, matrix = 4 * 64 * words, 4 * words * width
    assert program.memory_analysis().temp_size_in_bytes < 2 * chunk + matrix + (1 << 18)


def test_products_of_two_models(monkeypatch):
    """Statistics of one model whose logits are computed for each of them; a gradient of the reference."""
    token_chunks(monkeypatch, 64)
    matrix, states = (jnp.float32, (4096, 128)), (jnp.float32, (512, 128))

    def loss(p, q):
        return p.kl_divergence(q) - 0.01 * p.entropy()

    def total(hidden, weight, *reference):
        layers = ea.Categorical(hidden, weight), ea.Categorical(*reference)
        return ea.sum_over_tokens(loss, *layers)

    step = jax.jit(jax.value_and_grad(total, (0, 1)))
    given = [jax.ShapeDtypeStruct(shape, kind) for kind, shape in (states, matrix) * 2]
    assert step.lower(*given).compile().as_text().count(" dot(") == 4
