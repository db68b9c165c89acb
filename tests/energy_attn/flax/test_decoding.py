"""Layers with a cache: what counts positions, judged by the full pass written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import energy_attn as ea
from tests.support.compare import close
from tests.support.masks import RULES
from tests.support.scores import BATCH, CASES, HEADS, Case, dense_energy

LENGTH, WIDTH = 7, 16
PRODUCT = Case(lambda p: None, lambda s, b, h, i, j, p: s, {})
OPTIONS = {
    "is_causal": ({"is_causal": True}, lambda b, q, k: k <= q),
    "window": ({"local_window_size": (2, 0)}, lambda b, q, k: k >= q - 2),
    "lengths": ({"mask": ea.masks.Lengths(5, queries=6)}, lambda b, q, k: (k < 5) & (q < 6)),
}
NAMES = [*OPTIONS, *RULES, *CASES]
USUAL = "is_causal", "window", "documents", "alibi"


@pytest.fixture(autouse=True)
def promotion():
    """As Flax needs it, in float64."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def inputs():
    return np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH))


def layer(attend, **given):
    options = {"decode": True, "param_dtype": jnp.float64, "rngs": nnx.Rngs(0)} | given
    made = nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=nnx.data(attend), **options)
    made.init_cache((BATCH, LENGTH, WIDTH), jnp.float64)
    return made


def decoded(model, x, **given):
    """The outputs of a layer that is given one token after another."""
    graph, state = nnx.split(model)

    def step(state, x):
        model = nnx.merge(graph, state)
        out = model(x[:, None], **given)
        return nnx.state(model), out[:, 0]

    return jax.lax.scan(step, state, x.swapaxes(0, 1))[1].swapaxes(0, 1)


def written_out(model, x, case=PRODUCT, sees=lambda b, q, k: k <= q, lengths=LENGTH):
    """The layer's outputs for all tokens at once, each of which sees those before it."""
    arrays = {name: getattr(model, name)(x) for name in ("query", "key", "value")}
    slots = np.arange(LENGTH)
    q, k, b = slots[:, None], slots[None], np.arange(BATCH)[:, None, None]
    shown = k < np.reshape(lengths, (-1, 1, 1))
    seen = (sees(b, q, k) & (k <= q) & shown)[..., None, :, :]
    scale = (WIDTH // HEADS) ** -0.5
    out, _ = dense_energy(case, arrays, case.parameters, scale=scale, seen=seen)
    return model.out(out)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in USUAL else pytest.mark.full) for x in NAMES]
)
def test_is_the_full_pass(name):
    """Steps whose query counts as position 0, or as the last slot of the cache."""
    case, sees = CASES.get(name, PRODUCT), lambda b, q, k: True
    options = {"score": case.make(jax.tree.map(jnp.asarray, case.parameters))}
    if name in RULES:
        options, sees = {"mask": RULES[name].of(BATCH)}, RULES[name].sees
    elif name in OPTIONS:
        options, sees = OPTIONS[name]
    model, x = layer(ea.flax.attention_fn(**options)), inputs()
    close(decoded(model, x), written_out(model, x, case, sees))


WINDOW = {"local_window_size": (2, 0)}


def near(b, q, k):
    return k >= q - 2


def test_causality_of_the_call():
    """A query that counts as position 0 where the call, not the energy, is causal."""
    model, x = layer(ea.flax.attention_fn()), inputs()
    close(decoded(model, x, is_causal=True), written_out(model, x))


def test_a_mask_of_the_users():
    """Rows that end before the query, whose last visible key is not where it stands; an energy without arrays."""
    model, x = layer(nnx.dot_product_attention), inputs()
    shown = (jnp.arange(LENGTH) < jnp.array([[3], [LENGTH]]))[:, None, None]
    found = decoded(ea.replace_attention(model, **WINDOW), x, mask=shown)
    close(found, written_out(model, x, PRODUCT, near, [3, LENGTH]))


def test_linen():
    """A layer of Linen, whose cache is made by a call with all tokens."""
    x = inputs()
    model = linen.MultiHeadDotProductAttention(
        HEADS, decode=True, param_dtype=jnp.float64, attention_fn=ea.flax.attention_fn(**WINDOW)
    )
    variables = model.init(jax.random.key(0), x)

    def step(cache, x):
        weights = {"params": variables["params"], "cache": cache}
        out, changed = model.apply(weights, x[:, None], mutable="cache")
        return changed["cache"], out[:, 0]

    found = jax.lax.scan(step, variables["cache"], x.swapaxes(0, 1))[1].swapaxes(0, 1)
    same = layer(nnx.dot_product_attention)
    for name in ("query", "key", "value", "out"):
        for x_name in ("kernel", "bias"):
            setattr(getattr(same, name), x_name, nnx.Param(variables["params"][name][x_name]))
    close(found, written_out(same, x, PRODUCT, near))


def test_dropout():
    """Weights of other keys that are dropped, or positions that dropout loses."""
    q, k, v = (jnp.asarray(x.reshape(BATCH, LENGTH, HEADS, -1)) for x in (inputs(),) * 3)
    slots = jnp.arange(LENGTH)
    given = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    attend = ea.flax.attention_fn(**WINDOW)
    found = attend(q[:, 4:5], k, v, mask=slots <= 4, **given)
    seen = jnp.broadcast_to((slots <= 4) & (slots >= 2), (BATCH, HEADS, 1, LENGTH))
    close(found, nnx.dot_product_attention(q[:, 4:5], k, v, mask=seen, **given))


@pytest.mark.parametrize("energy", [WINDOW, {"mask": ea.masks.Causal()}])
@pytest.mark.parametrize(("queries", "mask"), [(3, True), (1, False)])
def test_unknown_positions_are_refused(energy, queries, mask):
    """A query that stands where the library guesses."""
    q, k = (jnp.ones((n, HEADS, 2)) for n in (queries, LENGTH))
    given = {"mask": jnp.ones((1, queries, LENGTH))} if mask else {}
    with pytest.raises(ValueError, match=f"query: wanted as many .* got {queries} and {LENGTH}"):
        ea.flax.attention_fn(**energy)(q, k, k, **given)


@pytest.mark.parametrize(
    "energy",
    [
        {"mask": ea.masks.Lengths(np.array([3, 5], np.int32))},
        {"score": ea.scores.Function(lambda score, at: jnp.tanh(score) + at.key)},
    ],
)
def test_positions_that_are_not_read(energy):
    """Queries of a decoder over the keys of its encoder, refused though their positions do not matter."""
    q, k = (jnp.asarray(inputs().reshape(BATCH, LENGTH, HEADS, -1)[:, :n]) for n in (3, LENGTH))
    close(ea.flax.attention_fn(**energy)(q, k, k), ea.attention(q, k, k, **energy))
