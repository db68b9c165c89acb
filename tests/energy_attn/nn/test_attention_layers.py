"""Attention layers of transformers, Gemma 2's and gpt-oss's, with random weights: outputs and gradients are equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import scores
from tests.support.compare import close

pytestmark = pytest.mark.full

LENGTH, WINDOW = 24, 5
SHAPES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "sliding_window": WINDOW,
    "attn_implementation": "eager",
}


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformers():
    """Here, as it takes seconds to import."""
    return pytest.importorskip("transformers")


def gemma2(transformers, layer):
    config = transformers.Gemma2Config(
        **SHAPES, query_pre_attn_scalar=11, attn_logit_softcapping=3.0
    )
    return transformers.models.gemma2.modeling_gemma2.Gemma2Attention(config, layer)


def gpt_oss(transformers, layer):
    config = transformers.GptOssConfig(**SHAPES)
    return transformers.models.gpt_oss.modeling_gpt_oss.GptOssAttention(config, layer)


LAYERS = {"gemma2": gemma2, "gpt_oss": gpt_oss}


def energy_of(name, layer, sinks):
    """What the layers compute, as the documentation of this library says it."""
    given = {"is_causal": True, "local_window_size": (WINDOW - 1, 0) if layer == 0 else None}
    if name == "gemma2":
        return ea.FreeEnergy(scale=11**-0.5, score=scores.SoftCap(3.0), **given)
    return ea.FreeEnergy(scale=8**-0.5, sink=sinks, **given)


def rotated(x, cos, sin):
    first, second = jnp.split(x, 2, -1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    if cos.shape[-1] == first.shape[-1]:  # gpt-oss's are of half the width
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def ours(name, layer, weights, x, cos, sin):
    """The layer with its projections and rotations."""

    def project(part, x):
        y = x @ weights[f"{part}_proj.weight"].T
        bias = weights.get(f"{part}_proj.bias")
        return y if bias is None else y + bias

    query, key, value = (project(part, x).reshape(*x.shape[:2], -1, 8) for part in "qkv")
    energy = energy_of(name, layer, weights.get("sinks"))
    out = energy.attention(rotated(query, cos, sin), rotated(key, cos, sin), value)
    return project("o", out.reshape(*x.shape[:2], -1))


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, layer, torch, transformers):
    """A cap, a window that is one token wider, or a sink, that is not theirs; weights without a gradient."""
    torch.manual_seed(0)
    theirs = LAYERS[name](transformers, layer).double()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_(std=0.4)
    draw = np.random.default_rng(layer)
    x = torch.tensor(draw.standard_normal((2, LENGTH, 32)), requires_grad=True)
    angles = draw.standard_normal((1, LENGTH, 4)) * np.ones((2, 1, 1))
    if name == "gemma2":
        angles = np.concatenate([angles, angles], -1)
    cos, sin = np.cos(angles), np.sin(angles)
    i, j = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    seen = (j <= i) & ((i - j < WINDOW) | (layer == 1))
    mask = torch.tensor(np.where(seen, 0, -np.inf))[None, None]
    places = torch.tensor(cos), torch.tensor(sin)
    out = theirs(hidden_states=x, position_embeddings=places, attention_mask=mask)[0]
    out.sin().sum().backward()
    weights = {key: jnp.asarray(w.detach().numpy()) for key, w in theirs.named_parameters()}
    assert ("sinks" in weights) == (name == "gpt_oss")

    def total(weights, x):
        with jax.numpy_rank_promotion("allow"):
            found = ours(name, layer, weights, x, jnp.asarray(cos), jnp.asarray(sin))
        return jnp.sin(found).sum(), found

    run = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    (_, found), (slopes, slope) = run(weights, jnp.asarray(x.detach().numpy()))
    exact = {key: w.grad.numpy() for key, w in theirs.named_parameters()}
    pairs = [(found, out.detach().numpy()), (slope, x.grad.numpy())]
    pairs += [(slopes[key], exact[key]) for key in exact]
    # Gemma 2's softmax is in float32 whatever the rest is in
    tolerance = 2e-6 if name == "gemma2" else 1e-11
    for got, wanted in pairs:
        close(got, wanted, tolerance=tolerance)
