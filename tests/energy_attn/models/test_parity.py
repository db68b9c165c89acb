"""Decoders beside Hugging Face's in PyTorch: the same checkpoint gives the same logits, text and gradients.

    PARITY=docs/benchmarks/families.json pytest tests/energy_attn/models/test_parity.py -m full

writes what the tests saw: the table on docs/models.md.
"""

import copy
import functools
import importlib.metadata
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.models import Llama, PromptLookup, generate, load
from energy_attn.models.llama._json import read_scaling
from energy_attn.models.llama._rope import frequencies
from tests.support.llama import leaves_of

pytestmark = pytest.mark.full

# Logits here are of order 3; PyTorch's own float32 is up to 1e-5 from its float64, and so is ours.
TOLERANCE = 2e-5
TEXT = 64
LONG = 120  # tokens, where the original context is 32
PROMPTS = (50, 17, 33)
# Other implementations leave caps of scores out, or have no float64.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}

SHAPES = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "max_position_embeddings": 256},
    # far from ties: with the usual 0.02 all logits are nearly equal
    **{"initializer_range": 0.15, "bos_token_id": None, "eos_token_id": None},
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
CHECKPOINTS = {
    # grouped 8/2, tied, llama3 beyond the original context
    "llama3": {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    # rotated queries and keys that grow, a ramp that is not of whole pairs
    "yarn": {
        "num_key_value_heads": 2,
        "rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    },
    # heads wider than hidden_size / heads, biases, linear scaling, several files
    "biases": {
        **{"num_key_value_heads": 4, "head_dim": 10, "attention_bias": True, "mlp_bias": True},
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    # a window in every layer, shorter than prompts
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 12},
    # biases before attention alone, a window in the second layer
    "qwen2": {
        **{"model_type": "qwen2", "num_key_value_heads": 4, "use_sliding_window": True},
        **{"sliding_window": 12, "max_window_layers": 1},
    },
    # norms of queries and keys, heads of another width
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 12},
    # a second layer without a rotary embedding, in a window
    "smollm3": {
        **{"model_type": "smollm3", "num_key_value_heads": 2, "no_rope_layer_interval": 2},
        **{"use_sliding_window": True, "sliding_window": 20, "pad_token_id": None},
    },
    # soft caps that bend scores and logits, norms around each part, every second layer in a window
    "gemma2": {
        **{"model_type": "gemma2", "num_key_value_heads": 4, "head_dim": 12, "sliding_window": 12},
        **{"query_pre_attn_scalar": 20, "attn_logit_softcapping": 4.0},
        **{"final_logit_softcapping": 9.0, "tie_word_embeddings": False, "pad_token_id": None},
    },
    # norms of what is added, and of all queries and keys together
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 2, "pad_token_id": None},
    # embeddings that are scaled where they are read, not where they are the output projection
    "gemma2 tied": {"model_type": "gemma2", "head_dim": 8, "pad_token_id": None},
    # two rotary embeddings, of which one is scaled
    "gemma3": {
        **{"model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 12},
        **{"query_pre_attn_scalar": 12, "sliding_window": 16, "tie_word_embeddings": False},
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        "pad_token_id": None,
    },
    # projections of one tensor, a quarter of a head that is not rotated, a list of divisors beyond 16 tokens
    "phi3": {
        **{"model_type": "phi3", "num_key_value_heads": 2, "sliding_window": 30},
        **{"original_max_position_embeddings": 16, "partial_rotary_factor": 0.75},
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 300.0},
            **{"short_factor": [1.0, 1.0, 1.5], "long_factor": [1.0, 2.0, 5.0]},
        },
        "pad_token_id": None,
    },
    # a base that has grown for 120 tokens
    "dynamic": {
        "max_position_embeddings": 48,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 3.0},
    },
    # two of four experts, a window
    "mixtral": {
        **{"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4},
        "sliding_window": 12,
    },
    # weights of experts that do not add up to one
    "qwen3 routed": {
        **{"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 8},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 112},
    },
    # sinks, a window in the first layer, biases everywhere, MLPs that are clipped
    "gpt_oss": {
        **{"model_type": "gpt_oss", "num_key_value_heads": 2, "head_dim": 8},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 12},
        **{"swiglu_limit": 0.9, "pad_token_id": None},
    },
    # latent attention with YaRN, a dense layer before one of four groups of experts
    "deepseek": {
        **{"model_type": "deepseek_v3", "num_key_value_heads": 8, "moe_intermediate_size": 24},
        **{"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        **{"q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "v_head_dim": 6},
        **{"qk_nope_head_dim": 10, "first_k_dense_replace": 1},
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    },
    # queries without a latent vector, halves instead of neighbours
    "deepseek plain": {
        **{"model_type": "deepseek_v3", "num_key_value_heads": 8, "q_lora_rank": None},
        **{"kv_lora_rank": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "qk_nope_head_dim": 6},
        **{"first_k_dense_replace": 2, "rope_interleave": False},
    },
}
FAMILIES = ["mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3", "olmo2"]
FAMILIES += ["phi3", "mixtral", "qwen3 routed", "gpt_oss", "deepseek"]


@pytest.fixture(scope="module")
def seen():
    """What each test saw of each checkpoint, written at the end where `PARITY` names a file."""
    found = {}
    yield found
    if "PARITY" in os.environ:
        packages = ("jax", "torch", "transformers")
        versions = {name: importlib.metadata.version(name) for name in packages}
        families = {name: x.get("model_type", "llama") for name, x in CHECKPOINTS.items()}
        said = {"versions": versions, "families": families, "tokens": len(PROMPTS) * TEXT}
        Path(os.environ["PARITY"]).write_text(json.dumps(said | {"seen": found}, indent=1) + "\n")


def note(seen, pair, **what):
    seen.setdefault(pair.name, {}).update(what)


@functools.cache
def libraries():
    """PyTorch and transformers, imported by tests: that takes seconds."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch, transformers


def theirs(config, dtype="float32"):
    """Weights that all matter: initial biases and norms are 0 and 1."""
    torch, transformers = libraries()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{"model_type": "llama", **SHAPES, **config})
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER)
    model = model.eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
        for name, buffer in model.named_buffers():  # zeros, like biases
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    return model.to(getattr(torch, dtype))


class Pair:
    """Their model, and ours, read from their checkpoint."""

    def __init__(self, name, folder):
        self.name, self.folder, self.config = name, folder, CHECKPOINTS[name]
        self.theirs = theirs(self.config)
        size = "60KB" if name == "biases" else "5GB"
        self.theirs.save_pretrained(folder, max_shard_size=size)
        assert len(list(folder.glob("*.safetensors"))) == (7 if name == "biases" else 1)
        self.ours = load(folder)
        draw = np.random.default_rng(1)
        self.prompts = [draw.integers(0, SHAPES["vocab_size"], n).tolist() for n in PROMPTS]
        self.tokens = draw.integers(0, SHAPES["vocab_size"], (2, LONG))

    def their_logits(self, model=None):
        torch, _ = libraries()
        with torch.no_grad():
            return (model or self.theirs)(torch.tensor(self.tokens)).logits.double().numpy()

    def their_text(self):
        """Each prompt alone: nothing is padded."""
        torch, found = libraries()[0], []
        for prompt in self.prompts:
            row = torch.tensor([prompt])
            out = self.theirs.generate(
                row, attention_mask=torch.ones_like(row), max_new_tokens=TEXT, do_sample=False
            )
            found.append(out[0, len(prompt) :].tolist())
        return found


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request, tmp_path_factory):
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


@jax.jit
def our_logits(model, tokens):
    return model(tokens).logits


def test_logits(pair, seen):
    """A norm, rotation, scaling, bias or grouping that differs; positions beyond the original context."""
    assert {leaf.dtype for leaf in jax.tree.leaves(pair.ours)} == {jnp.dtype("float32")}
    got = np.asarray(our_logits(pair.ours, jnp.asarray(pair.tokens, jnp.int32)))
    want = pair.their_logits()
    largest = np.abs(want).max()
    note(seen, pair, logits=float(np.abs(got - want).max() / largest))
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
    assert largest > 2
    # the tolerance is a few times what PyTorch's float32 costs
    exact = pair.their_logits(theirs(pair.config, "float64"))
    own = np.abs(want - exact).max()
    assert TOLERANCE / 10 < own < TOLERANCE
    ours = np.abs(got - exact).max()
    note(seen, pair, exact=float(ours / largest), theirs=float(own / largest))
    assert ours < 4 * own


@pytest.mark.parametrize("pair", ["llama3", *FAMILIES], indirect=True)
def test_greedy_text(pair, seen):
    """Prompts of different lengths: one wrong position in the cache changes the text, also where it is drafted."""
    want = pair.their_text()
    found = {"text": generate(pair.ours, pair.prompts, TEXT)}
    found["drafted"] = generate(pair.ours, pair.prompts, TEXT, drafter=PromptLookup())
    with jax.set_mesh(make_mesh((2, 4))):
        ours = load(pair.folder)
        found["mesh"] = generate(ours, pair.prompts, TEXT, parallel=SequenceParallel())
    for name, out in found.items():
        note(seen, pair, **{name: int((np.asarray(out.tokens) == np.array(want)).sum())})
        assert out.tokens.tolist() == want, name
    assert all(len(set(row)) > 8 for row in want)


def test_the_way_back(pair, seen, tmp_path):
    """They read what we write bit for bit: weights, and a configuration that gives the same logits."""
    torch, transformers = libraries()
    for size in (60_000, 10**9, 60_000):  # several files, then one, and several again
        pair.ours.save(tmp_path, max_shard_size=size)
        assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == 60_000)
        back, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True, **EAGER
        )
        assert not any(report.values())
        for name, weight in pair.theirs.state_dict().items():
            assert torch.equal(back.state_dict()[name], weight), name
    assert back.dtype == torch.float32 and back.config.eos_token_id is None
    np.testing.assert_array_equal(pair.their_logits(back.eval()), pair.their_logits())
    # we read what they write of it, in a folder with our own save
    back.save_pretrained(tmp_path)
    assert load(tmp_path).config == pair.ours.config
    note(seen, pair, saved=True)


@pytest.mark.parametrize("pair", ["llama3", *FAMILIES], indirect=True)
def test_gradients(pair, seen, tmp_path):
    """A layer whose own norm, bias or window passes another derivative; over devices, too."""
    torch, _ = libraries()
    tokens = torch.tensor(pair.tokens)
    pair.theirs.zero_grad()
    pair.theirs(tokens, labels=tokens).loss.backward()
    theirs = copy.deepcopy(pair.theirs)  # with gradients in the place of weights
    with torch.no_grad():
        for x, y in zip(theirs.parameters(), pair.theirs.parameters(), strict=True):
            x.copy_(y.grad)
        for x in theirs.buffers():
            x.zero_()
    theirs.save_pretrained(tmp_path)
    want = leaves_of(load(tmp_path))

    def loss(model, tokens, **options):
        logits = jax.nn.log_softmax(model(tokens, **options).logits[:, :-1])
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], 2).mean()

    ours = jnp.asarray(pair.tokens, jnp.int32)
    with jax.set_mesh(make_mesh((8,), ("device",))):
        parallel = SequenceParallel("device")
        spread = jax.jit(jax.grad(lambda model: loss(model, ours, parallel=parallel)))(pair.ours)
    alone = jax.jit(jax.grad(loss))(pair.ours, ours)
    for kind, found in {"gradients": alone, "gradients_of_8": spread}.items():
        errors = {
            name: np.abs(leaf - want[name]).max() / max(np.abs(want[name]).max(), 1e-30)
            for name, leaf in leaves_of(found).items()
        }
        note(seen, pair, **{kind: float(max(errors.values()))})
        assert max(errors.values()) < 2e-5, max(errors, key=errors.__getitem__)


@pytest.mark.parametrize("pair", ["llama3"], indirect=True)
def test_head_unlike_the_embedding(pair, tmp_path):
    """A fine-tuned head beside `tie_word_embeddings: true`, which transformers uses."""
    torch, transformers = libraries()
    pair.theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = np.random.default_rng(2).normal(0, 0.15, tensors["model.embed_tokens.weight"].shape)
    save_file({**tensors, "lm_head.weight": head.astype(np.float32)}, file, {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **EAGER).eval()
    with pytest.warns(UserWarning, match="differs from the embedding"):
        ours = load(tmp_path)
    got = np.asarray(our_logits(ours, jnp.asarray(pair.tokens, jnp.int32)))
    np.testing.assert_allclose(got, pair.their_logits(model), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("pair", ["llama3"], indirect=True)
def test_weights_of_16_bits(pair):
    """bfloat16 weights, norms and softmax in float32: no further from the exact logits than theirs."""
    rounded = theirs(pair.config, "bfloat16")
    exact = theirs(pair.config, "bfloat16").double()
    model = Llama.load(pair.folder, dtype="bfloat16")
    got = np.asarray(our_logits(model, jnp.asarray(pair.tokens, jnp.int32)), np.float64)
    want = pair.their_logits(exact)
    error = [np.sqrt(((x - want) ** 2).mean()) for x in (got, pair.their_logits(rounded))]
    assert error[0] < 1.1 * error[1] < 0.1


REAL = LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}
ROPES = {
    "Llama 2": {"rope_type": "default", "rope_theta": 10000.0},
    "Llama 3": {"rope_type": "default", "rope_theta": 500000.0},
    "Llama 3.1": REAL,
    "Llama 3.2": REAL | {"factor": 32.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "YaRN": YARN | {"rope_theta": 1000000.0, "original_max_position_embeddings": 32768},
    "YaRN of DeepSeek-V3": {
        **YARN,
        **{"rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096},
        **{"mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 32, "beta_slow": 1},
    },
    "YaRN of a given scale": {
        **YARN,
        **{"rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"attention_factor": 1.2, "truncate": False},
    },
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_frequencies_of_real_models(rope):
    """At position 130,000 a frequency that is one bit off turns a pair by a hundredth too much."""
    _, transformers = libraries()
    for width in (64, 128):
        config = transformers.LlamaConfig(**SHAPES, head_dim=width, rope_parameters=dict(rope))
        want = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        scaling = read_scaling(rope, 0)
        factor = 1.0 if scaling is None else scaling.attention_factor
        np.testing.assert_allclose(factor, want.attention_scaling, rtol=1e-15)
        want = want.inv_freq.numpy()
        got = frequencies(width, rope["rope_theta"], scaling, np.dtype("float32"), 1000)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1.3e-7)  # one bit
        assert (got == want).mean() > 0.9
