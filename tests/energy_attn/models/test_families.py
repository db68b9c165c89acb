"""The fields that families have beside a Llama's: what they mean, what is missing, and what is refused."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel
from energy_attn.models import LlamaConfig, Rope, load
from energy_attn.prefix_tree import PrefixTree
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.llama import CONFIG, build
from tests.support.meshes import mesh_of

SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 32}
FULL, SLIDING = "full_attention", "sliding_attention"
FIRST = json.dumps([SLIDING, FULL, FULL, FULL])


def read(tmp_path, **fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, **fields}))
    return LlamaConfig.from_json(path)


# by model_type and fields: windows, and which layers turn; or what is refused
READ = {
    "llama {}": ([None] * 4, [1] * 4),
    # transformers' default, and null
    "mistral {}": ([4096] * 4, [1] * 4),
    'mistral {"sliding_window": null}': ([None] * 4, [1] * 4),
    'mistral {"sliding_window": 7}': ([7] * 4, [1] * 4),
    # a size without the flag
    'qwen2 {"sliding_window": 7, "max_window_layers": 2}': ([None] * 4, [1] * 4),
    'qwen2 {"use_sliding_window": true, "sliding_window": 7, "max_window_layers": 2}': (
        [None, None, 7, 7],
        [1] * 4,
    ),
    'qwen3 {"use_sliding_window": true, "max_window_layers": 3}': (
        [None, None, None, 4096],
        [1] * 4,
    ),
    f'qwen3 {{"use_sliding_window": true, "sliding_window": 5, "layer_types": {FIRST}}}': (
        [5, None, None, None],
        [1] * 4,
    ),
    "smollm3 {}": ([None] * 4, [1, 1, 1, 0]),
    'smollm3 {"no_rope_layer_interval": 2, "use_sliding_window": true, "sliding_window": 9}': (
        [None, 9, None, 9],
        [1, 0, 1, 0],
    ),
    'smollm3 {"no_rope_layers": [0, 1, 1, 1]}': ([None] * 4, [0, 1, 1, 1]),
    'gemma2 {"sliding_window": 6}': ([6, None, 6, None], [1] * 4),
    "gemma3_text {}": ([4096] * 4, [1] * 4),
    'gemma3_text {"sliding_window_pattern": 3}': ([4096, 4096, None, 4096], [1] * 4),
}


@pytest.mark.parametrize("said", READ)
def test_layers(said, tmp_path):
    """A layer in a window that it has not, or turned where it is not; and the same when it is written and read."""
    kind, _, fields = said.partition(" ")
    windows, turned = READ[said]
    config = read(tmp_path, model_type=kind, **json.loads(fields))
    assert [config.window(i) for i in range(4)] == windows
    assert [config.rotates(i) for i in range(4)] == [bool(x) for x in turned]
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    again = LlamaConfig.from_json(tmp_path / "config.json")
    assert [again.window(i) for i in range(4)] == windows
    assert again.to_json() == config.to_json()


def test_defaults(tmp_path):
    """A missing field with Llama's default where the family has another."""
    found = {
        kind: read(tmp_path, model_type=kind) for kind in ("mistral", "qwen2", "qwen3", "smollm3")
    }
    assert [x.num_key_value_heads for x in found.values()] == [8, 32, 32, 4]
    assert [x.head_dim for x in found.values()] == [16, 16, 128, 16]
    assert [x.tie_word_embeddings for x in found.values()] == [False, False, False, True]
    assert [x.rope_theta for x in found.values()] == [1e4, 1e4, 1e4, 2e6]
    assert [x.qk_norm for x in found.values()] == [False, False, True, False]
    assert [(x.attention_bias, x.output_bias) for x in found.values()][1] == (True, False)
    olmo = read(tmp_path, model_type="olmo2")
    assert (olmo.rms_norm_eps, olmo.pre_norms, olmo.post_norms) == (1e-5, False, True)
    assert olmo.qk_norm and olmo.qk_norm_over_heads
    with pytest.raises(ValueError, match="post_norms: wanted True where pre_norms is False"):
        LlamaConfig(pre_norms=False)
    second, third = (read(tmp_path, model_type=kind) for kind in ("gemma2", "gemma3_text"))
    assert (second.attn_logit_softcapping, second.final_logit_softcapping) == (50, 30)
    assert (third.attn_logit_softcapping, third.final_logit_softcapping) == (None, None)
    assert (second.rope_theta, second.rope_local_base_freq) == (1e4, None)
    assert (third.rope_theta, third.rope_local_base_freq) == (1e6, 1e4)
    for config in (second, third):
        assert config.unit_offset and config.post_norms and config.scaled_embeddings
        assert (config.head_dim, config.query_pre_attn_scalar) == (256, 256)
    bases = {"rope_theta": 7e5, "rope_local_base_freq": 5e3}
    old = read(
        tmp_path, model_type="gemma3_text", rope_scaling={"type": "linear", "factor": 8.0}, **bases
    )
    assert (old.rope_theta, old.rope_local_base_freq) == (7e5, 5e3)
    assert old.rope_scaling == Rope.linear(8.0)


REFUSED = {
    "mistral attention_bias: wanted only": {"attention_bias": True},
    "mistral no_rope_layers: wanted only": {"no_rope_layers": [1, 1, 0, 1]},
    "qwen2 layer_types: wanted 'full_attention' without": {"layer_types": [SLIDING] * 4},
    "qwen2 layer_types: wanted .* for each of 4 layers": {
        "use_sliding_window": True,
        "layer_types": [SLIDING],
    },
    "qwen3 layer_types: wanted .* 'chunked'": {
        "use_sliding_window": True,
        "layer_types": [FULL, FULL, FULL, "chunked"],
    },
    "qwen3 sliding_window: wanted at least 1, got 0": {
        "use_sliding_window": True,
        "sliding_window": 0,
    },
    "smollm3 no_rope_layers: wanted 0 or 1": {"no_rope_layers": [1, 1, 2, 1]},
    "smollm3 no_rope_layers: wanted a list": {"no_rope_layers": 3},
    "llama sliding_window: wanted only": {"sliding_window": 7},
    "gpt2 model_type: wanted 'llama' or 'mistral'": {},
    "phi3 rope_scaling: wanted its long_factor": {
        "rope_scaling": {"type": "su", "short_factor": [1.0]}
    },
    "mixtral num_experts_per_tok: wanted at most the 2 experts": {
        "num_local_experts": 2,
        "num_experts_per_tok": 3,
    },
    "gpt_oss quantization_config: wanted .* or by 'mxfp4', got str 'awq'": {
        "quantization_config": {"quant_method": "awq"}
    },
    "qwen3_moe mlp_only_layers: wanted a routed MLP in every layer": {"mlp_only_layers": [0]},
    "deepseek_v3 scoring_func: wanted 'sigmoid', got str 'softmax'": {"scoring_func": "softmax"},
    "deepseek_v3 n_group: wanted a divisor of the 10 experts": {"n_routed_experts": 10},
    "deepseek_v3 qk_rope_head_dim: wanted an even number": {"qk_rope_head_dim": 5},
    "deepseek_v3 num_key_value_heads: wanted 32 beside latent attention": {
        "num_key_value_heads": 8
    },
    "gemma2 hidden_activation: wanted 'gelu_pytorch_tanh', got str 'gelu'": {
        "hidden_activation": "gelu"
    },
    "gemma3_text use_bidirectional_attention: wanted false": {"use_bidirectional_attention": True},
    "gemma3_text rope_type: wanted 'default' in": {
        "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    },
    "gemma3_text rope_type: wanted 'default' in 'sliding_attention', got 'linear'": {
        "rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}
    },
    "gemma3_text rope_type: wanted 'default' in .*, partial_rotary_factor 0.5": {
        "rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}
    },
    "gemma3_text rope_theta: wanted only": {
        "rope_parameters": {"full_attention": {}, "rope_theta": 1e4}
    },
    "gemma3_text rope_theta: wanted one value in .*, got float 300.0 and float 10000.0": {
        "rope_parameters": {"sliding_attention": {"rope_theta": 300.0}},
        "rope_local_base_freq": 1e4,
    },
    "gemma3_text full_attention: wanted a JSON object, got list": {
        "rope_parameters": {"full_attention": [1]}
    },
    "gemma3_text attn_logit_softcapping: wanted null in this family, got float 50.0": {
        "attn_logit_softcapping": 50.0
    },
    "qwen2 hidden_act: wanted 'silu', got str 'gelu'": {"hidden_act": "gelu"},
    "qwen2 use_sliding_window: wanted True or False, got dict": {"use_sliding_window": {"a": 1}},
    "qwen3 layer_types: wanted a list, got dict": {"layer_types": {"a": 1}},
    "smollm3 layer_types: wanted a list, got float 1.5": {"layer_types": 1.5},
    r"qwen3_moe layer_types: wanted 'full_attention' without use_sliding_window, got \[\[1": {
        "layer_types": [[1], 2, 3, 4]
    },
    "llama rope_local_base_freq: wanted only": {"rope_local_base_freq": 5e3},
    "llama eos_token_id: wanted an integer of 32 bits, got int 1099511627776": {
        "eos_token_id": [2**40]
    },
    "llama vocab_size: wanted an integer of 32 bits": {"vocab_size": 2**31},
    "llama num_attention_heads: wanted an integer of 32 bits": {"num_attention_heads": 2**70},
    "mistral sliding_window: wanted an integer of 32 bits": {"sliding_window": 2**40},
    "gemma2 sliding_window_pattern: wanted an integer of 32 bits": {
        "sliding_window_pattern": 2**40
    },
    "mixtral num_local_experts: wanted an integer of 32 bits": {"num_local_experts": 2**31},
    "deepseek_v3 n_routed_experts: wanted an integer, got list": {"n_routed_experts": [1]},
    "deepseek_v3 kv_lora_rank: wanted an integer of 32 bits": {"kv_lora_rank": 2**40},
    "llama attention_factor: wanted a real number, got list": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": [1]}
    },
    "phi3 original_max_position_embeddings: wanted an integer, got str 'x'": {
        "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]},
        "original_max_position_embeddings": "x",
    },
    "llama rope_scaling: wanted its factor": {"rope_scaling": {"rope_type": "yarn"}},
    "llama long_factor: wanted only": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "long_factor": [1.0]}
    },
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused(said, tmp_path, unchecked):
    """A setting that is ignored, or an error that does not name it."""
    kind, _, words = said.partition(" ")
    with pytest.raises((ValueError, TypeError), match=f"config.json: {words}"):
        read(tmp_path, model_type=kind, **REFUSED[said])


def test_yarn(tmp_path):
    """A field of the scaling that is lost between a file and the configuration."""
    scaling = Rope.yarn(4.0, 64, 16.0, 2.0, mscale=0.7, mscale_all_dim=0.9, truncate=False)
    config = LlamaConfig(rope_scaling=scaling, num_attention_heads=4)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_json()))
    assert LlamaConfig.from_json(path) == config
    given = {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}
    found = read(tmp_path, model_type="llama", max_position_embeddings=96, rope_scaling=given)
    assert found.rope_scaling == Rope.yarn(2.0, 96, scale=1.5)


LOST = {
    "sliding_window: wanted what a checkpoint of 'llama' can say": {"sliding_window": 5},
    "qk_norm: wanted what a checkpoint of 'qwen2' can say": {
        "model_type": "qwen2",
        "attention_bias": True,
        "output_bias": False,
        "qk_norm": True,
    },
    "mlp_bias: wanted what a checkpoint of 'mistral' can say": {
        "model_type": "mistral",
        "mlp_bias": True,
    },
    "no_rope_layers: wanted what a checkpoint of 'gemma2' can say": {
        "model_type": "gemma2",
        "no_rope_layers": (0, 1, 1, 1),
        **dict.fromkeys(("unit_offset", "post_norms", "scaled_embeddings"), True),
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 4,
        "sliding_window": 4,
        "layer_types": (FULL,) * 4,
    },
}


@pytest.mark.parametrize("said", LOST)
def test_lost_in_a_file(said):
    """A checkpoint that is read as another decoder, as its family has no word for what this one has."""
    with pytest.raises(ValueError, match=said):
        LlamaConfig(**SIZES, **LOST[said]).to_json()


def test_unknown_family(tmp_path):
    """A folder of another family that is taken for a Llama."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(
        ValueError, match=r"model_type: wanted 'llama' or .*'qwen3'.*got str 'gpt2'"
    ):
        load(tmp_path)


FLAGS = replace(
    CONFIG,
    model_type="smollm3",
    attention_bias=True,
    output_bias=False,
    qk_norm=True,
    sliding_window=5,
    layer_types=(SLIDING, FULL),
    no_rope_layers=(0, 1),
)


@pytest.fixture(scope="module")
def model():
    return build(FLAGS)


def test_every_way_of_reading(model):
    """A window or a norm that the cache, a fork of it, a tree or a device leaves out: beside all tokens at once."""
    tokens = array(np.random.default_rng(0).integers(0, 40, (2, 24)))
    whole = np.asarray(jax.jit(lambda model: model(tokens).logits)(model))

    @jax.jit
    def read(model):
        cache = model.empty_cache(batch=2, slots=32)
        cache = model.prefill(tokens[:, :17], cache, chunk_size=7).cache
        step = model(tokens[:, 17:20], cache=cache)
        forked = model(jnp.repeat(tokens[:, 17:20], 2, 0), cache=cache.fork(2, capacity=8))
        tree = PrefixTree.from_beam(tokens[:, None, 17:20])
        return step.logits, forked.logits[::2], model.read_tree(tree, cache).logits[:, :3]

    for found in read(model):
        close(found, whole[:, 17:20])

    @jax.jit
    def spread(model):
        parallel = SequenceParallel("device")
        cache = model.empty_cache(batch=2, slots=32, parallel=parallel, block_size=2)
        cache = model.prefill(tokens[:, :17], cache).cache
        return model(tokens, parallel=parallel).logits, model(tokens[:, 17:20], cache=cache).logits

    with jax.set_mesh(mesh_of("8")):
        found, after = jax.device_get(spread(model))
    close((found, after), (whole, whole[:, 17:20]))


@pytest.mark.full
def test_what_is_asked_of_layers(model):
    """An energy that is recorded without its window; weights of documents that do not reach a layer."""
    tokens = array(np.random.default_rng(1).integers(0, 40, (1, 16)))
    out, seen = ea.record(model, "effective_keys", keys=lambda F: (F.weights() > 0).sum(-1))(tokens)
    counted = [x["keys"][0, :, 0].tolist() for x in seen.values()]
    assert counted == [[min(i + 1, 5) for i in range(16)], list(range(1, 17))]
    report = ea.energy_report(model, tokens, per_query=True)
    close(report.effective_keys, np.stack([x["effective_keys"] for x in seen.values()]))
    weighed = ea.weigh(lambda: model(tokens).logits)(jnp.zeros(16), jnp.arange(16))
    close(weighed, out.logits)
    hidden = ea.weigh(lambda: model(tokens).logits)(
        jnp.where(jnp.arange(16) < 8, -jnp.inf, 0.0), jnp.arange(16)
    )
    assert float(jnp.abs(hidden - out.logits)[:, 12:].max()) > 1e-3


def test_narrow_cache(model):
    """A cache that holds less than a layer's window sees: silently other logits."""
    cache = model.empty_cache(batch=1, slots=16, window=3)
    with pytest.raises(ValueError, match="local_window_size: wanted at most the cache's window, 3"):
        model(jnp.zeros((1, 4), jnp.int32), cache=cache)


GEMMA = replace(
    CONFIG,
    model_type="gemma3_text",
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    qk_norm=True,
    sliding_window=5,
    layer_types=(SLIDING, FULL),
    rope_local_base_freq=10.0,
    query_pre_attn_scalar=20,
    attn_logit_softcapping=3.0,
    final_logit_softcapping=7.0,
    unit_offset=True,
    post_norms=True,
    scaled_embeddings=True,
)


def by_definition(model, tokens):
    """Logits `[T, vocab]` of one row, in NumPy: a Gemma with everything that one may have."""
    c, w = model.config, jax.tree.map(lambda x: np.asarray(x, np.float64), model)
    time, half = len(tokens), c.head_dim // 2
    apart = np.arange(time)[:, None] - np.arange(time)

    def norm(x, part):
        if part is None:
            return x
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.rms_norm_eps) * (1 + part.weight)

    def normed(x, part):  # of heads
        if not c.qk_norm_over_heads:
            return norm(x, part)
        return norm(x.reshape(time, -1), part).reshape(x.shape)

    def turned(x, theta):
        angle = np.arange(time)[:, None, None] / theta ** (np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def gelu(x):
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = w.embed_tokens.weight[tokens] * np.sqrt(c.hidden_size)
    for layer, theta, reach in zip(w.layers, (10.0, 100.0), (5, time), strict=True):
        y, attend = norm(x, layer.input_layernorm), layer.self_attn
        q, k, v = (
            (y @ part.weight.T).reshape(time, -1, c.head_dim)
            for part in (attend.q_proj, attend.k_proj, attend.v_proj)
        )
        q, k = turned(normed(q, attend.q_norm), theta), turned(normed(k, attend.k_norm), theta)
        k, v = (np.repeat(part, 2, 1) for part in (k, v))
        scores = 3 * np.tanh(np.einsum("tnh,snh->nts", q, k) / np.sqrt(20) / 3)
        weights = np.where((apart >= 0) & (apart < reach), np.exp(scores), 0)
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("nts,snh->tnh", weights, v).reshape(time, -1) @ attend.o_proj.weight.T
        x = x + norm(out, layer.post_attention_layernorm)
        y, mlp = norm(x, layer.pre_feedforward_layernorm), layer.mlp
        inner = gelu(y @ mlp.gate_proj.weight.T) * (y @ mlp.up_proj.weight.T)
        x = x + norm(inner @ mlp.down_proj.weight.T, layer.post_feedforward_layernorm)
    return 7 * np.tanh(norm(x, w.norm) @ w.embed_tokens.weight.T / 7)


@pytest.mark.parametrize("pre_norms", [True, False])
def test_gemma_by_definition(pre_norms):
    """A flag that is left out: a cap, a norm, a scale, a window's own rotary embedding; with the norms of OLMo 2."""
    model = build(replace(GEMMA, pre_norms=pre_norms, qk_norm_over_heads=not pre_norms))
    tokens = np.random.default_rng(2).integers(0, 40, 13)
    found = jax.jit(lambda model: model(array(tokens[None])).logits[0])(model)
    close(found, by_definition(model, tokens))
