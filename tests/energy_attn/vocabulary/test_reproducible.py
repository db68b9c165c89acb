"""Losses over a vocabulary with `reproducible=True`: one set of bits in any batch and on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from tests.energy_attn.vocabulary import problems
from tests.support.compare import close, same
from tests.support.meshes import mesh_of

pytestmark = pytest.mark.usefixtures("user_settings")
TOKENS, WORDS, WIDTH = 20, 1000, 48


def drawn(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (TOKENS, WIDTH), (WORDS, WIDTH), (TOKENS, 16), (WORDS, 16), (WORDS,)
    return [jnp.asarray(rng.standard_normal(x), dtype) for x in shapes]


LABELS = np.random.default_rng(1).integers(0, WORDS, TOKENS, np.int32)


def each(hidden, weight, other, matrix, bias, labels):
    """All answers of each token."""
    options = {"reproducible": True, "soft_cap": 5.0, "temperature": 0.7}
    p = ea.Categorical(hidden, weight, bias, **options)
    q = ea.Categorical(other, matrix, reproducible=True)
    loss, found = ea.softmax_cross_entropy(
        *(hidden, weight, labels),
        **{"bias": bias, "label_smoothing": 0.1, "z_loss": 1e-2, "reproducible": True},
        **{"reduction": "none", "return_statistics": True},
    )
    divergences = p.kl_divergence(q), p.cross_entropy(q), p.js_divergence(q)
    return divergences, p.log_prob(labels), p.entropy(), p.mode(), p.top_k(3), loss, found


def step(hidden, weight, bias, labels, **options):
    def loss(hidden, weight, bias):
        return ea.softmax_cross_entropy(
            *(hidden, weight, labels), bias=bias, reproducible=True, z_loss=1e-2, **options
        )

    return jax.value_and_grad(loss, (0, 1, 2))(hidden, weight, bias)


@pytest.mark.parametrize("kind", problems.OPTIONS)
def test_values_and_gradients(kind, monkeypatch):
    """Another loss or gradient than without the option."""
    with jax.enable_x64():
        x = {name: jnp.asarray(y) for name, y in problems.arrays(kind).items()}
        wanted = jax.device_get(problems.dense(kind, x))
        slope = jax.device_get(jax.grad(problems.loss_of(problems.dense, kind))(x))
        for name in "Categorical", "softmax_cross_entropy":
            whole = functools.partial(getattr(ea, name), reproducible=True)
            monkeypatch.setattr(ea, name, whole)
        monkeypatch.setattr(ea.Categorical.func, "sample", lambda *_, **__: jnp.zeros(2, int))
        close(jax.jit(functools.partial(problems.answers, kind))(x)[0], wanted)
        found = jax.jit(jax.grad(problems.loss_of(problems.answers, kind)))(x)
        close(found, slope, tolerance=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_any_batch(dtype):
    """A token whose bits depend on the others, or on the shape that they have."""
    hidden, weight, other, matrix, bias = drawn(dtype)
    run = jax.jit(each)
    whole = run(hidden, weight, other, matrix, bias, jnp.asarray(LABELS))
    for rows in slice(3, 4), slice(5, 18):
        part = run(hidden[rows], weight, other[rows], matrix, bias, jnp.asarray(LABELS[rows]))
        same(part, jax.tree.map(lambda x, rows=rows: x[rows], whole))
    square = (x.reshape(4, 5, -1) for x in (hidden, other))
    h, o = square
    same(
        jax.tree.map(
            lambda x: x.reshape(TOKENS, *x.shape[2:]),
            run(h, weight, o, matrix, bias, jnp.asarray(LABELS.reshape(4, 5))),
        ),
        whole,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_on_any_mesh(reduction):
    """A loss or a gradient whose sums have the order of a mesh."""
    _, weight, _, _, bias = drawn()
    rng = np.random.default_rng(2)
    hidden = jnp.asarray(rng.standard_normal((4, 160, WIDTH)), jnp.float32)
    args = hidden, weight, bias, jnp.asarray(rng.integers(0, WORDS, (4, 160), np.int32))
    run = functools.partial(step, reduction=reduction)
    alone = jax.device_get(jax.jit(run)(*args))
    for words, tokens in ("device", "node"), ((), "node"), (("node", "device"), ()):
        with jax.set_mesh(mesh_of("2x4")):
            parallel = ea.VocabularyParallel(words, tokens)
            specs = jax.P(tokens or None), jax.P(words or None), jax.P(words or None), jax.P()
            given = map(jax.device_put, args, specs)
            found = jax.jit(functools.partial(run, parallel=parallel))(*given)
            same(jax.device_get(found), alone)


def test_hidden_words():
    """A finite divergence, or NaN, where the other model hides a word."""
    hidden, weight, *_ = drawn()
    options = {"reproducible": True}
    p = ea.Categorical(hidden, weight, **options)
    q = ea.Categorical(hidden, weight, mask=jnp.arange(WORDS) < 900, **options)
    assert np.isposinf(p.kl_divergence(q)).all() and np.isposinf(p.cross_entropy(q)).all()
    close(q.kl_divergence(p), np.asarray(p.log_partition() - q.log_partition()), tolerance=1e-5)


def test_not_supported():
    """A silent order of XLA where a mode or a draw is not there."""
    hidden, weight, *_ = drawn()
    p = ea.Categorical(hidden, weight, reproducible=True)
    with pytest.raises(NotImplementedError, match="sample: wanted reproducible=False"):
        p.sample(key=jax.random.key(0))
    with pytest.raises(ValueError, match="other: wanted reproducible=True, got False"):
        p.kl_divergence(ea.Categorical(hidden, weight))
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(
            lambda x: ea.Categorical(x, weight, reproducible=True).entropy(), (hidden,), (hidden,)
        )

    def of_shard(hidden, weight):
        parallel = ea.VocabularyParallel("device")
        return ea.Categorical(hidden, weight, parallel=parallel, reproducible=True).entropy()

    with jax.set_mesh(mesh_of("2x4")), pytest.raises(NotImplementedError, match="reproducible"):
        jax.shard_map(of_shard, in_specs=(jax.P(), jax.P("device")), out_specs=jax.P())(
            hidden, weight
        )
    with (
        jax.set_mesh(mesh_of("2x4 explicit")),
        pytest.raises(NotImplementedError, match="automatic axes"),
    ):
        p.entropy()
