"""Losses and log-probabilities of decoders, which make no array of logits, beside those of logits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.models import shard
from tests.support.compare import close, same
from tests.support.llama import CONFIG, build

CONFIGS = {
    "tied": replace(CONFIG, tie_word_embeddings=True),
    "capped": replace(CONFIG, tie_word_embeddings=False, final_logit_softcapping=2.0),
}


def text(config, count=8):
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, count))
    return jnp.asarray(tokens, jnp.int32)


def dense(model, tokens):
    log_p = jax.nn.log_softmax(model(tokens).logits[:, :-1])
    return jnp.take_along_axis(log_p, tokens[:, 1:, None], 2)[:, :, 0]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_not_needed(name):
    """A gradient of tied embeddings without one of its two parts; a soft cap left out; an array of logits."""
    model, tokens = build(CONFIGS[name]), text(CONFIGS[name])
    close(model.log_probs(tokens), np.asarray(dense(model, tokens)))
    weights = jnp.asarray(np.random.default_rng(1).uniform(size=(2, 7)))

    def loss(model):
        return model.loss(tokens, weights=weights)

    found = jax.jit(jax.value_and_grad(loss))(model)
    wanted = jax.value_and_grad(lambda x: -(dense(x, tokens) * weights).sum() / weights.sum())(
        model
    )
    close(found, jax.device_get(wanted), tolerance=1e-10)
    program = str(jax.make_jaxpr(jax.grad(loss))(model))
    assert f"{CONFIG.hidden_size}]" in program
    assert f"[2,8,{CONFIG.vocab_size}]" not in program


@pytest.mark.parametrize("name", ["tied"])
def test_on_a_mesh(name):
    """Words or tokens of one device alone, or a text whose length devices do not divide."""
    model = build(CONFIGS[name])
    mesh = make_mesh((2, 2, 2), ("data", "sequence", "tensor"))
    for count in 8, 7:
        tokens = text(CONFIGS[name], count)
        wanted = jax.value_and_grad(lambda model, x=tokens: model.loss(x))(model)
        with jax.set_mesh(mesh):
            parallel = SequenceParallel("sequence", heads="tensor", batch="data")

            def loss(model, x, parallel=parallel):
                return model.loss(x, parallel=parallel)

            found = jax.jit(jax.value_and_grad(loss))(shard(model, mesh), tokens)
        close(jax.device_get(found), jax.device_get(wanted), tolerance=1e-10)


def test_reproducible_loss():
    """A loss that is not the mean of reproducible log-probabilities, or a gradient that depends on the mesh."""
    model, tokens = build(CONFIGS["capped"]), text(CONFIGS["capped"], 12)

    def loss(model, tokens, parallel=None):
        return model.loss(tokens, reproducible=True, parallel=parallel)

    run = jax.jit(jax.value_and_grad(loss), static_argnums=2)
    alone = jax.device_get(run(model, tokens, None))
    close(alone[0], -np.asarray(model.log_probs(tokens, reproducible=True)).mean())
    close(
        alone[1], jax.device_get(jax.grad(lambda model: model.loss(tokens))(model)), tolerance=1e-9
    )
    with jax.set_mesh(make_mesh((2, 2, 2), ("data", "sequence", "tensor"))):
        parallel = SequenceParallel("sequence", heads="tensor", batch="data")
        same(jax.device_get(run(model, tokens, parallel)), alone)
