"""Images in a text: Gemma 3 with images, compared with transformers, and the ways of reading one text."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from energy_attn.distributed import SequenceParallel
from energy_attn.models import Images, generate, load
from tests.support.complaints import complains
from tests.support.meshes import mesh_of

TEXT = {
    **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6},
    **{"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "max_position_embeddings": 64,
}
VISION = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 8, "patch_size": 4},
}
# an image that is longer than the window, one that ends the row, and two that touch in a row of transformers' kind
IDS = np.asarray([[0] * 3 + [1] * 9 + [0] * 4 + [1] * 4, [0] + [1] * 5 + [0] * 8 + [1] + [0] * 5])
TOKENS = np.random.default_rng(0).integers(0, 40, IDS.shape).astype(np.int32)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model of transformers, and ours of its files."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, eos_token_id=[3]
    )
    theirs = transformers.Gemma3ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for x in theirs.parameters():
            x.copy_(torch.randn_like(x) * 0.3)
    folder = tmp_path_factory.mktemp("gemma3")
    theirs.eval().save_pretrained(folder)
    embeddings = np.float32(np.random.default_rng(1).standard_normal((*IDS.shape, 32)))
    return torch, theirs, load(folder), embeddings, folder


@pytest.fixture(scope="module")
def wanted(pair):
    """Logits of the text, whose masks are theirs."""
    torch, theirs, _, embeddings, _ = pair
    ids = torch.tensor(IDS)
    with torch.no_grad():
        x = theirs.get_input_embeddings()(torch.tensor(TOKENS))
        x = torch.where(ids[..., None] > 0, torch.tensor(embeddings), x)
        # the type of tokens is read where there may be pixels, which the model must not embed again
        from transformers.models.gemma3 import modeling_gemma3 as theirs_module

        blocks = theirs_module.get_block_sequence_ids_for_mask(ids)
        masks = theirs_module.create_masks_for_vision_model(
            config=theirs.config.get_text_config(),
            inputs_embeds=x,
            attention_mask=None,
            cache=None,
            position_ids=None,
            block_sequence_ids=blocks,
        )
        hidden = theirs.model.language_model(inputs_embeds=x, attention_mask=masks)
        return theirs.lm_head(hidden.last_hidden_state).numpy()


def test_logits(pair, wanted):
    """An image whose tokens see no later ones, or keys out of the window; scaled embeddings of an image."""
    _, _, ours, embeddings, _ = pair
    images = Images(jnp.asarray(IDS), jnp.asarray(embeddings))
    found = jax.jit(lambda model: model(jnp.asarray(TOKENS), images=images).logits)(ours)
    np.testing.assert_allclose(found, wanted, atol=2e-4 * np.abs(wanted).max())
    text = ours(jnp.asarray(TOKENS)).logits
    assert np.abs(text - wanted).max() > 0.1 * np.abs(wanted).max()


@pytest.mark.parametrize("mesh", [None, "8"])
def test_through_a_cache(pair, wanted, mesh):
    """Images that the cache or a device's part of the prompt hides, tokens after them that see others."""
    _, _, ours, embeddings, _ = pair
    parallel = None if mesh is None else SequenceParallel("device")
    first = 14

    def read(model):
        cache = model.empty_cache(batch=2, slots=32, parallel=parallel)
        images = Images(jnp.asarray(IDS), jnp.asarray(embeddings[:, :first]))
        out = model.prefill(jnp.asarray(TOKENS[:, :first]), cache, images=images)
        rest = Images(jnp.asarray(IDS), jnp.asarray(embeddings[:, first:]))
        last = model(jnp.asarray(TOKENS[:, first:]), cache=out.cache, images=rest)
        return out.logits, last.logits

    if mesh is None:
        found = jax.jit(read)(ours)
    else:
        with jax.set_mesh(mesh_of(mesh)):
            found = jax.device_get(jax.jit(read)(ours))
    for x, y in zip(found, (wanted[:, first - 1 : first], wanted[:, first:]), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("exact", [False, True])
def test_losses_and_texts(pair, wanted, exact):
    """A loss, log-probabilities or a generated text that takes images for text."""
    _, _, ours, embeddings, _ = pair
    images, tokens = Images(jnp.asarray(IDS), jnp.asarray(embeddings)), jnp.asarray(TOKENS)
    options = {"images": images, "reproducible": exact}
    logits = np.float64(wanted)
    probabilities = scipy.special.log_softmax(logits, -1)
    chosen = np.take_along_axis(probabilities[:, :-1], TOKENS[:, 1:, None], -1)[..., 0]
    tolerance = 1e-3 * np.abs(wanted).max()
    np.testing.assert_allclose(ours.log_probs(tokens, **options), chosen, atol=tolerance)
    is_text = np.float32(IDS[:, 1:] == 0)
    loss = ours.loss(tokens, weights=jnp.asarray(is_text), **options)
    np.testing.assert_allclose(loss, -np.sum(chosen * is_text) / is_text.sum(), atol=tolerance)
    said = generate(ours, tokens, 3, return_logprobs=True, eos_token_id=(), **options)
    longer = jnp.concatenate([tokens, said.tokens], 1)
    more = Images(jnp.asarray(IDS), jnp.pad(images.embeddings, ((0, 0), (0, 3), (0, 0))))
    again = ours.log_probs(longer, images=more, reproducible=exact)[:, -3:]
    np.testing.assert_allclose(said.logprobs, again, atol=0 if exact else tolerance)
    assert (np.asarray(said.tokens[:, 0]) == wanted[:, -1].argmax(-1)).all()


def test_gradients_of_embeddings(pair):
    """A vision tower that is trained with a wrong gradient, or with none."""
    _, _, ours, embeddings, _ = pair
    ours = jax.tree.map(lambda x: x.astype(jnp.float64), ours)

    @jax.jit
    def loss(embeddings):
        return ours.loss(jnp.asarray(TOKENS), images=Images(jnp.asarray(IDS), embeddings))

    x = jnp.asarray(embeddings, jnp.float64)
    along = jnp.asarray(np.random.default_rng(2).standard_normal(x.shape))
    gradient = jax.grad(loss)(x)
    assert not gradient[IDS == 0].any() and (jnp.abs(gradient[IDS > 0]).max(-1) > 0).all()
    step = 1e-5
    slope = (loss(x + step * along) - loss(x - step * along)) / (2 * step)
    np.testing.assert_allclose(jnp.vdot(gradient, along), slope, rtol=1e-6)


def test_names_of_transformers_5(pair, tmp_path):
    """Tensors `model.language_model...` that are not found, or a vision tower that is read."""
    from safetensors.numpy import load_file, save_file

    *_, ours, _, folder = pair
    weights = {}
    for name, x in load_file(folder / "model.safetensors").items():
        inner = name.replace("language_model.model.", "language_model.")
        weights[f"model.{inner}"] = x
    save_file(weights, tmp_path / "model.safetensors")
    entries = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(entries))
    again = load(tmp_path)
    assert again.config == ours.config and again.config.eos_token_id == (3,)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(ours)))


def test_wrong_calls(pair, unchecked, tmp_path):
    """An image that is cut into chunks, a fork that ignores images, embeddings of other tokens."""
    _, _, ours, embeddings, folder = pair
    tokens, images = jnp.asarray(TOKENS), Images(jnp.asarray(IDS), jnp.asarray(embeddings))
    cache = ours.empty_cache(batch=2, slots=32)
    chunked = lambda: ours.prefill(tokens, cache, chunk_size=8, images=images)  # noqa: E731
    complains(chunked, ValueError, "chunk_size", "8", "20 tokens")
    forked = cache.fork(1, capacity=32)
    complains(
        lambda: ours(tokens, cache=forked, images=images), TypeError, "cache", "Forked", "no fork"
    )
    complains(lambda: ours(tokens, images=IDS), TypeError, "images", "int", "an Images")
    queue = lambda: generate(ours, tokens, 1, batch_size=1, images=images)  # noqa: E731
    complains(queue, ValueError, "batch_size", "1", "None with images")
    in_chunks = lambda: generate(ours, tokens, 1, chunk_size=8, images=images)  # noqa: E731
    complains(in_chunks, ValueError, "chunk_size", "8", "20 tokens")
    complains(lambda: ours.loss(tokens, images=IDS), TypeError, "images", "int", "an Images")
    few = Images(jnp.asarray(IDS), jnp.asarray(embeddings[:, :3]))
    complains(
        lambda: ours(tokens, images=few), ValueError, "images.embeddings", "[2,3,32]", "(2, 20"
    )
    complains(lambda: Images(jnp.ones(3)), TypeError, "ids", "float64[3]", "integer")
    complains(lambda: Images(jnp.ones(3, int), IDS), TypeError, "embeddings", "int", "float")
    entries = json.loads((folder / "config.json").read_text())
    del entries["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(entries))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="text_config: wanted a JSON object, got NoneType"):
        load(tmp_path)
