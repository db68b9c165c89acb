"""A decoder of another family than Llama, wherever a decoder is taken; and the choice of a family by its checkpoint."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import make_mesh
from energy_attn.models import (
    AbstractDecoder,
    Llama,
    LlamaConfig,
    ModelDrafter,
    generate,
    score_continuations,
    shard,
)
from tests.support.llama import build

CONFIG = LlamaConfig(16, 16, 24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TOKENS = [[1, 2, 3, 4], [5, 6]]


class Other(AbstractDecoder):
    """Has the layers of a Llama, and an output projection of its own, which turns logits round."""

    config: LlamaConfig = eqx.field(static=True)
    embed_tokens: eqx.Module
    layers: tuple[eqx.Module, ...]
    norm: eqx.Module
    head: jax.Array
    inner: Llama

    def __init__(self, inner):
        self.config, self.inner = inner.config, inner
        self.embed_tokens, self.layers, self.norm = inner.embed_tokens, inner.layers, inner.norm
        self.head = -inner.lm_head.weight

    def rope(self, positions, length):
        return self.inner.rope(positions, length)

    def logits(self, x):
        return x.astype(self.head.dtype) @ self.head.T


@pytest.fixture(scope="module")
def llama():
    """Of large weights: no two tokens are nearly as likely."""
    return build(CONFIG, jnp.float32)


@pytest.fixture(scope="module")
def turned(llama):
    """The Llama that computes what `Other` does."""
    return eqx.tree_at(lambda m: m.lm_head.weight, llama, -llama.lm_head.weight)


@pytest.mark.full
def test_another_family(llama, turned, user_settings):
    """A function that takes a Llama alone, or that asks it for what only a Llama has."""
    other = Other(llama)
    got, want = (generate(m, TOKENS, 6, drafter=ModelDrafter(m)) for m in (other, turned))
    assert got.tokens.tolist() == want.tokens.tolist() and int(got.accepted.sum()) > 0
    answers = jnp.array([[[1, 2]], [[3, 4]]])
    got, want = (score_continuations(m, TOKENS, answers) for m in (other, turned))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    tokens = jnp.array([[1, 2, 3]])
    got, want = (ea.energy_report(m, tokens) for m in (other, turned))
    np.testing.assert_array_equal(got.energy, want.energy)
    mesh = make_mesh((4, 2), ("sequence", "tensor"))
    split = shard(other, mesh).layers[0].self_attn.q_proj.weight
    assert split.addressable_shards[0].data.shape == (8, 16)


def test_scores_come_from_the_models_own_tree():
    """A model that reads trees in its own way, passed by."""

    class Turned(Llama):
        def read_tree(self, *args, **options):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        score_continuations(
            Turned(CONFIG, key=jax.random.key(0)), TOKENS, jnp.array([[[1, 2]], [[3, 4]]])
        )


def test_an_incomplete_family():
    """A family that lacks a method, found when it first generates."""
    for name in sorted(AbstractDecoder.__abstractmethods__):
        partial = type("Partial", (Other,), {name: getattr(AbstractDecoder, name)})
        with pytest.raises(TypeError, match=f"abstract.*{name}"):
            partial(None)


@pytest.mark.smoke
def test_family_of_a_checkpoint(llama, tmp_path):
    """A checkpoint that is read as another family's."""
    llama.save(tmp_path)
    found = ea.models.load(tmp_path, progress=False)
    assert isinstance(found, Llama) and found.config == CONFIG
    path = tmp_path / "config.json"
    entries = json.loads(path.read_text())
    for kind in ("gpt2", None, ["llama"]):
        path.write_text(json.dumps(entries | {"model_type": kind}))
        for load in (ea.models.load, Llama.load):
            with pytest.raises(
                ValueError, match="config.json: model_type: wanted 'llama'( or .*)?, got"
            ):
                load(tmp_path)
