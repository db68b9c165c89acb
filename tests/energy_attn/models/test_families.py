"""What families have beside a Llama: flags, routed MLPs, latent attention, weights of four bits, ropes of a length."""

import json
from dataclasses import replace

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, collectives, make_mesh
from energy_attn.models import (
    ExpertsConfig,
    Rope,
    generate,
    load,
    shard,
)
from energy_attn.models.llama._experts import grouped_dot
from energy_attn.prefix_tree import PrefixTree
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.llama import CONFIG, CUT, DEEPSEEK, GPT_OSS, build, drafter_of, numpy_llama
from tests.support.meshes import mesh_of
from tests.support.selection import few

FULL, SLIDING = "full_attention", "sliding_attention"
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
    """A window or a norm that the cache, a fork of it or a tree leaves out: compared with the definition."""
    tokens = array(np.random.default_rng(0).integers(0, 40, (2, 24)))
    whole, _ = numpy_llama(model, np.asarray(tokens))

    @jax.jit
    def read(model):
        cache = model.empty_cache(batch=2, slots=32)
        cache = model.prefill(tokens[:, :17], cache).cache
        step = model(tokens[:, 17:20], cache=cache)
        forked = model(jnp.repeat(tokens[:, 17:20], 2, 0), cache=cache.fork(2, capacity=8))
        tree = PrefixTree.from_beam(tokens[:, None, 17:20])
        return step.logits, forked.logits[::2], model.read_tree(tree, cache).logits[:, :3]

    for found in read(model):
        close(found, whole[:, 17:20])


@pytest.mark.full
def test_reading_over_devices(model):
    """A window or a norm that devices leave out, of all tokens at once and with a cache."""
    tokens = array(np.random.default_rng(0).integers(0, 40, (2, 24)))
    whole, _ = numpy_llama(model, np.asarray(tokens))

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
def test_recorded_windows(model):
    """An energy that is recorded without its window."""
    tokens = array(np.random.default_rng(1).integers(0, 40, (1, 16)))
    _, seen = ea.record(model, "effective_keys", keys=lambda F: (F.weights() > 0).sum(-1))(tokens)
    counted = [x["keys"][0, :, 0].tolist() for x in seen.values()]
    assert counted == [[min(i + 1, 5) for i in range(16)], list(range(1, 17))]
    report = ea.energy_report(model, tokens, per_query=True)
    close(report.effective_keys, np.stack([x["effective_keys"] for x in seen.values()]))


def test_narrow_cache(model):
    """A cache that holds less than a layer's window sees: silently other logits."""
    cache = model.empty_cache(batch=1, slots=16, window=3)
    with pytest.raises(ValueError, match="local_window_size: wanted at most the cache's window, 3"):
        jax.eval_shape(lambda: model(jnp.zeros((1, 4), jnp.int32), cache=cache))


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


@pytest.mark.parametrize("pre_norms", [True, False])
def test_gemma_by_definition(pre_norms):
    """A flag that is left out: a cap, a norm, a scale, a window's own rotary embedding; with the norms of OLMo 2."""
    model = build(replace(GEMMA, pre_norms=pre_norms, qk_norm_over_heads=not pre_norms))
    tokens = np.random.default_rng(2).integers(0, 40, (1, 13))
    found = jax.jit(lambda model: model(array(tokens), return_energies=True))(model)
    close((found.logits, found.energies), numpy_llama(model, tokens))


@pytest.mark.parametrize("sizes", [[3, 0, 4, 2], [0, 0, 9, 0], [5, 4, 1, 30]])
def test_grouped_dot(sizes):
    """A row by another group's matrix, an empty group, rows behind all groups; and every derivative."""
    draw = np.random.default_rng(0)
    rows = max(11, sum(sizes))
    x, dx, y = (draw.standard_normal(shape) for shape in ((rows, 6), (rows, 6), (rows, 5)))
    w, dw = draw.standard_normal((2, 4, 5, 6))
    group = np.repeat(np.arange(4), sizes)
    used = len(group)

    def by_hand(x, w):
        out = np.zeros((rows, 5))
        out[:used] = np.einsum("ri,roi->ro", x[:used], w[group])
        return out

    gx, gw = np.zeros_like(x), np.zeros_like(w)
    gx[:used] = np.einsum("ro,roi->ri", y[:used], w[group])
    np.add.at(gw, group, np.einsum("ro,ri->roi", y[:used], x[:used]))
    count = array(sizes, np.int32)

    @jax.jit
    def all_of(x, w, dx, dw, y):
        def f(x, w):
            return grouped_dot(x, w, count)

        out, tangent = jax.jvp(f, (x, w), (dx, dw))
        return out, tangent, jax.vjp(f, x, w)[1](y)

    found = all_of(*map(array, (x, w, dx, dw, y)))
    close(found, (by_hand(x, w), by_hand(dx, w) + by_hand(x, dw), (gx, gw)))


def silu(x):
    return x / (1 + np.exp(-x))


def routed_by_hand(mlp, x):
    """`[T, width]`, one token and one expert at a time."""
    c, out = mlp.experts.config, np.zeros_like(x)
    for t, row in enumerate(x):
        logits = mlp.gate.weight @ row + (0 if mlp.gate.bias is None else mlp.gate.bias)
        if c.scoring == "softmax":
            scores = np.exp(logits - logits.max())
            scores = rank = scores / scores.sum()
        else:
            scores = 1 / (1 + np.exp(-logits))
            rank = scores + mlp.gate.e_score_correction_bias
            grouped = rank.reshape(c.n_group, -1)
            best = np.argsort(np.sort(grouped, 1)[:, -2:].sum(1))[-c.topk_group :]
            rank = np.where(np.isin(np.arange(c.n_group), best)[:, None], grouped, -np.inf).ravel()
        chosen = np.argsort(rank)[-c.num_experts_per_tok :]
        weights = scores[chosen] / (scores[chosen].sum() if c.norm_topk_prob else 1)
        for e, weight in zip(chosen, c.routed_scaling_factor * weights, strict=True):
            w, bias = mlp.experts, [0, 0, 0]
            if c.bias:
                bias = w.gate_proj_bias[e], w.up_proj_bias[e], w.down_proj_bias[e]
            gate, up = w.gate_proj[e] @ row + bias[0], w.up_proj[e] @ row + bias[1]
            if c.swiglu_limit is None:
                inner = silu(gate) * up
            else:
                gate = np.minimum(gate, c.swiglu_limit)
                up = np.clip(up, -c.swiglu_limit, c.swiglu_limit)
                inner = (up + 1) * gate / (1 + np.exp(-c.swiglu_alpha * gate))
            out[t] += weight * (w.down_proj[e] @ inner + bias[2])
    if mlp.shared_experts is not None:
        w = mlp.shared_experts
        inner = silu(x @ w.gate_proj.weight.T) * (x @ w.up_proj.weight.T)
        out += inner @ w.down_proj.weight.T
    return out


ROUTED = {
    "sigmoids in groups": DEEPSEEK,
    "cut off, with biases": GPT_OSS,
    "weights below one": replace(
        CONFIG,
        model_type="qwen3_moe",
        qk_norm=True,
        experts=ExpertsConfig(6, 3, 12, norm_topk_prob=False),
    ),
}


@pytest.mark.parametrize("kind", ROUTED)
def test_routed_by_definition(kind):
    """A token that an expert drops, a weight of another expert, a group that is not chosen, a bias left out."""
    mlp = build(ROUTED[kind]).layers[1].mlp
    x = np.random.default_rng(1).standard_normal((2, 9, 24))
    found = jax.jit(lambda mlp, x: mlp(x))(mlp, array(x))
    by_hand = routed_by_hand(jax.tree.map(np.asarray, mlp), x.reshape(-1, 24))
    close(found, by_hand.reshape(x.shape))


def test_latent_by_definition():
    """The part of a key that all heads share, the order of what is turned, the norm of a latent vector."""
    model = build(DEEPSEEK)
    layer = model.layers[0].self_attn
    x = np.random.default_rng(2).standard_normal((1, 6, 24))
    rope = model.rope(array(np.arange(6)[None], np.int32), 6)[0]
    cos, sin = (np.asarray(part)[0, :, 0] for part in rope)
    found = jax.jit(lambda layer: layer.project(array(x), rope))(layer)
    w = jax.tree.map(np.asarray, layer)

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    def turned(x):  # neighbours [T, ..., 4], and the result in halves
        pairs = x.reshape(*x.shape[:-1], 2, 2)
        wide = (slice(None), *[None] * (x.ndim - 2))
        a, b = pairs[..., 0], pairs[..., 1]
        return np.concatenate([a * cos[wide] - b * sin[wide], b * cos[wide] + a * sin[wide]], -1)

    q = norm(x[0] @ w.q_a_proj.weight.T, w.q_a_layernorm.weight) @ w.q_b_proj.weight.T
    q = q.reshape(6, 4, 10)
    joint = x[0] @ w.kv_a_proj_with_mqa.weight.T
    latent = norm(joint[:, :10], w.kv_a_layernorm.weight)
    kv = (latent @ w.kv_b_proj.weight.T).reshape(6, 4, 11)
    shared = np.repeat(turned(joint[:, 10:])[:, None], 4, 1)
    q = np.concatenate([q[..., :6], turned(q[..., 6:])], -1)
    k = np.concatenate([kv[..., :6], shared], -1)
    close(found, (q[None], k[None], kv[None, ..., 6:]))


@pytest.mark.parametrize(
    "kind", few(["sigmoids in groups", "cut off, with biases"], "cut off, with biases")
)
def test_over_devices(kind):
    """An expert's tokens that are lost between devices; experts or tokens that are gathered."""
    model = build(ROUTED[kind])
    tokens = array(np.random.default_rng(3).integers(0, 40, (2, 16)))
    mesh = make_mesh((4, 2), ("sequence", "tensor"))

    def loss(model, **options):
        logits = jax.nn.log_softmax(model(tokens, **options).logits[:, :-1])
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], 2).mean()

    want = jax.jit(jax.value_and_grad(loss))(model)
    with jax.set_mesh(mesh):
        split = shard(model, mesh)
        held = split.layers[1].mlp.experts.gate_proj.sharding.shard_shape(
            model.layers[1].mlp.experts.gate_proj.shape
        )
        assert held[0] == len(model.layers[1].mlp.experts.gate_proj) // 2
        parallel = SequenceParallel("sequence", heads="tensor")
        found = jax.jit(jax.value_and_grad(lambda model: loss(model, parallel=parallel)))(split)
        mlp = jax.jit(lambda mlp, x: mlp(x, parallel))
        x = jax.device_put(
            array(np.ones((2, 16, 24))),
            jax.NamedSharding(mesh, jax.P(None, "sequence")),
        )
        sent = collectives(mlp.lower(split.layers[1].mlp, x).compile())
    close(jax.tree.leaves(jax.device_get(found)), jax.tree.leaves(want))
    # a device's 2 × 4 tokens, once for the experts and once for those that all tokens share
    assert {x.kind for x in sent} == {"all-reduce"}
    assert sum(x.bytes for x in sent) <= 2 * 2 * 4 * 24 * 8


@pytest.mark.parametrize("over", few([False, True], True), ids=["one device", "4 x 2"])
def test_gradients_of_16_bits(over):
    """Weights of sixteen bits beside scores of thirty-two that do not meet; gradients that lose more than rounding."""
    model = build(DEEPSEEK)
    tokens = array(np.random.default_rng(3).integers(0, 40, (2, 16)))

    def loss(model, **options):
        logits = model(tokens, **options).logits[:, :-1].astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2).mean()

    def narrow(model):  # as `load` does, which leaves what orders experts in float32
        def cast(path, x):
            kept = "e_score_correction_bias" in jax.tree_util.keystr(path)
            return x.astype(jnp.float32 if kept else jnp.bfloat16)

        return jax.tree_util.tree_map_with_path(cast, model)

    want = jax.tree.leaves(jax.jit(jax.grad(loss))(model))
    if over:
        mesh = make_mesh((4, 2), ("sequence", "tensor"))
        with jax.set_mesh(mesh):
            parallel = SequenceParallel("sequence", heads="tensor")
            gradient = jax.jit(jax.grad(lambda model: loss(model, parallel=parallel)))
            found = gradient(shard(narrow(model), mesh))
    else:
        found = jax.jit(jax.grad(loss))(narrow(model))
    pairs = zip(jax.tree.leaves(found), want, strict=True)
    pairs = [(np.asarray(x, np.float64).ravel(), np.asarray(y).ravel()) for x, y in pairs]
    x, y = map(np.concatenate, zip(*pairs, strict=True))
    assert np.linalg.norm(x - y) < 0.05 * np.linalg.norm(y)


@pytest.mark.parametrize("kind", few(["none", "lookup"], "lookup"))
def test_text_over_devices(kind):
    """Experts, or keys from latent vectors, of a step or a tree that a mesh divides in another way than a prompt."""
    model = build(DEEPSEEK)
    prompts = array(np.random.default_rng(8).integers(0, 40, (2, 7)), np.int32)
    want = np.asarray(generate(model, prompts, 12).tokens)
    mesh = make_mesh((4, 2), ("sequence", "tensor"))
    with jax.set_mesh(mesh):
        parallel = SequenceParallel("sequence", heads="tensor")
        drafter = drafter_of(kind, model)
        found = generate(shard(model, mesh), prompts, 12, drafter=drafter, parallel=parallel)
    np.testing.assert_array_equal(np.asarray(found.tokens), want)


@pytest.mark.parametrize("config", few([GPT_OSS, DEEPSEEK], DEEPSEEK), ids=["softmax", "groups"])
def test_symbolic_sizes(config, unchecked):
    """A program for any batch and number of tokens: fewer rows than a tile, and several tiles for an expert."""
    model = build(config)
    b, t = jax.export.symbolic_shape("b, t")
    read = jax.jit(lambda tokens: model(tokens).logits)
    program = jax.export.export(read)(jax.ShapeDtypeStruct((b, t), jnp.int32))
    for shape in ((1, 2), (3, 70)):
        tokens = array(np.random.default_rng(8).integers(0, 40, shape), jnp.int32)
        close(program.call(tokens), read(tokens))


def test_cache_in_an_exported_program(unchecked):
    """A prompt and a step of any number of rows, in caches of arrays."""
    model = build(GPT_OSS)
    arrays, tree = jax.tree.flatten(model.empty_cache(2, 8))
    (b,) = jax.export.symbolic_shape("b")
    like = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in arrays]
    tokens = array(np.random.default_rng(8).integers(0, 40, (2, 6)), jnp.int32)

    @jax.jit
    def read(tokens, arrays):
        out = model.prefill(tokens[:, :5], tree.unflatten(arrays))
        out = model(tokens[:, 5:], cache=out.cache)
        return out.logits, jax.tree.leaves(out.cache)

    program = jax.export.export(read)(jax.ShapeDtypeStruct((b, 6), jnp.int32), like)
    assert "callback" not in program.mlir_module()
    found, _ = program.call(tokens, arrays)
    close(found, jax.jit(lambda tokens: model(tokens).logits[:, 5:])(tokens))


def test_experts_that_no_axis_divides():
    """Experts that do not lie evenly on devices: a wrong part of them, or an error of XLA that names no weight."""
    mesh = make_mesh((2, 4), ("sequence", "tensor"))
    experts = ExpertsConfig(num_experts=6, num_experts_per_tok=2, intermediate_size=36)
    sizes = {"num_key_value_heads": 4, "experts": experts}
    model = build(replace(CONFIG, model_type="mixtral", **sizes))
    with pytest.raises(ValueError, match=r"mesh: wanted an axis 'tensor' that divides .*gate_proj"):
        shard(model, mesh)


@pytest.mark.parametrize("kind", ROUTED)
def test_files(kind, tmp_path):
    """Experts that lie in other places of a file than they are read from; a bias in the dtype of the others."""
    model = jax.tree.map(lambda x: x.astype(jnp.float32), build(ROUTED[kind]))
    model.save(tmp_path, max_shard_size=10_000)
    for mesh in (None, make_mesh((4, 2), ("sequence", "tensor"))):
        back = load(tmp_path, mesh=mesh, progress=False)
        assert back.config == model.config
        for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(model), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    half = load(tmp_path, dtype="bfloat16", progress=False)
    kinds = {x.dtype.name for x in jax.tree.leaves(half)}
    assert kinds == ({"bfloat16", "float32"} if kind == "sigmoids in groups" else {"bfloat16"})


@pytest.mark.parametrize("is_wide", [False, True])
def test_norms_of_16_bits(is_wide):
    """A norm that rounds before it multiplies where the family's rounds once, or the other way round."""
    norm = build(replace(GPT_OSS, wide_norms=is_wide), jnp.bfloat16).norm
    x = array(np.random.default_rng(7).standard_normal((50, 24)), jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + norm.eps)
    weight = np.asarray(norm.weight, np.float32)
    once = np.asarray((wide * weight).astype(jnp.bfloat16), np.float32)
    twice = np.asarray(wide.astype(jnp.bfloat16), np.float32) * weight
    twice = np.asarray(twice.astype(jnp.bfloat16), np.float32)
    found = np.asarray(norm(x), np.float32)
    same, other = (once, twice) if is_wide else (twice, once)
    assert (found == same).mean() > 0.99 > 0.9 > (found == other).mean()


@pytest.mark.parametrize(
    "config", few([FLAGS, GPT_OSS, DEEPSEEK], DEEPSEEK), ids=["flags", "sinks", "latent"]
)
def test_what_is_asked_of_layers(config):
    """An energy without the sink, of other heads or without a window; documents that do not reach a layer."""
    model = build(config)
    tokens = array(np.random.default_rng(6).integers(0, 40, (1, 12)))
    out = jax.jit(lambda model: model(tokens, return_energies=True))(model)
    report = ea.energy_report(model, tokens, per_query=True)
    close(report.energy, out.energies)
    if config is GPT_OSS:  # each sink is one of the outcomes
        sinks = np.stack([np.asarray(layer.self_attn.sinks) for layer in model.layers])
        assert (np.asarray(out.energies) > sinks[:, None, None]).all()
        own = [jnp.full(4, -1e9)] * 2
        without = eqx.tree_at(lambda m: [x.self_attn.sinks for x in m.layers], model, own)
        first = jax.jit(lambda model: model(tokens, return_energies=True).energies[0])(without)
        close(out.energies[0], np.logaddexp(first, sinks[0]))
    read = jax.jit(ea.weigh(lambda: model(tokens).logits))
    close(read(jnp.zeros(12), jnp.arange(12)), out.logits)
    hidden = read(jnp.where(jnp.arange(12) < 6, -jnp.inf, 0.0), jnp.arange(12))
    assert float(jnp.abs(hidden - out.logits)[:, 8:].max()) > 1e-3


def four_bits(code):
    """E2M1, by its bits: sign, exponent, mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if sign else size


def packed(folder, change=None):
    """Rewrites the experts of a checkpoint in blocks of four bits; returns the weights `[E, in, out]` by name."""
    file, draw = folder / "model.safetensors", np.random.default_rng(4)
    tensors, weights = load_file(file), {}
    for name in [x for x in tensors if x.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = draw.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = draw.integers(120, 130, blocks.shape[:3], np.uint8)
        weight = np.zeros((experts, inputs, outputs))
        for e, o, i in np.ndindex(experts, outputs, inputs):
            byte = int(blocks[e, o, i // 32, i % 32 // 2])
            number = four_bits(byte >> 4 if i % 2 else byte & 15)
            weight[e, i, o] = number * 2.0 ** (int(scales[e, o, i // 32]) - 127)
        weights[name] = weight
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors if change is None else change(tensors), file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return weights


@pytest.fixture
def in_four_bits(tmp_path):
    """A folder whose experts have inputs of whole blocks, 64 and 32."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "experts": replace(CUT, intermediate_size=32),
    }
    model = build(replace(GPT_OSS, num_hidden_layers=1, layer_types=None, **sizes))
    jax.tree.map(lambda x: x.astype(jnp.bfloat16), model).save(tmp_path)
    return tmp_path


def test_four_bits(in_four_bits):
    """A number of another block, half of a byte, exponent or expert; the parts that devices read."""
    weights = packed(in_four_bits)
    down, both = (weights[f"model.layers.0.mlp.experts.{x}"] for x in ("down_proj", "gate_up_proj"))
    for mesh in (None, make_mesh((4, 2), ("sequence", "tensor"))):
        experts = load(in_four_bits, mesh=mesh, progress=False).layers[0].mlp.experts
        assert experts.down_proj.dtype == jnp.bfloat16
        wanted = (down, both[..., ::2], both[..., 1::2])
        found = (experts.down_proj, experts.gate_proj, experts.up_proj)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float64), y.swapaxes(1, 2))


DAMAGED = {  # by the error: a tensor's name, and what takes the place of the tensor, or of none
    "down_proj_blocks: wanted 16 bytes .* and scales None": ("down_proj_scales", lambda x: None),
    r"down_proj_blocks: wanted 16 bytes .* and scales \(4, 64, 2\)": (
        *("down_proj_scales", lambda x: np.repeat(x, 2, 2)),
    ),
    "down_proj_blocks: wanted U8 .* got U8, F32": ("down_proj_scales", np.float32),
    "gate_up_proj_blocks: wanted finite scales": (
        *("gate_up_proj_scales", lambda x: np.full_like(x, 255)),
    ),
    "down_proj: wanted a weight or .*_blocks .* got both": (
        *("down_proj", lambda _: np.zeros((4, 32, 64), np.float32)),
    ),
}


@pytest.mark.parametrize("said", DAMAGED)
def test_damaged_four_bits(said, in_four_bits):
    """Blocks that are read by scales which they do not have, or a weight that is dropped for blocks of its name."""
    name, change = f"model.layers.0.mlp.experts.{DAMAGED[said][0]}", DAMAGED[said][1]

    def damaged(tensors):
        changed = {**tensors, name: change(tensors.get(name))}
        return {name: x for name, x in changed.items() if x is not None}

    packed(in_four_bits, damaged)
    with pytest.raises(ValueError, match=said):
        load(in_four_bits, progress=False)


@pytest.mark.parametrize("drafts", [True, False])
def test_layers_behind_the_last(drafts, tmp_path):
    """Layers that draft tokens are left out; a layer of the decoder is not."""
    build(DEEPSEEK, jnp.float32).save(tmp_path)
    file, path = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, entries = load_file(file), json.loads(path.read_text())
    if drafts:
        tensors["model.layers.1.eh_proj.weight"] = np.zeros((24, 48), np.float32)
    save_file(tensors, file)
    del entries["energy_attn_save"]
    path.write_text(json.dumps(entries | {"num_hidden_layers": 1}))
    if drafts:
        assert len(load(tmp_path, progress=False).layers) == 1
    else:
        with pytest.raises(ValueError, match="wanted no other tensors, got model.layers.1"):
            load(tmp_path, progress=False)


LONG = Rope.longrope((1.0, 1.5, 2.0, 1.0), (3.0, 5.0, 9.0, 2.0), 20, factor=4.0)


@pytest.mark.parametrize(
    "scaling", few([LONG, Rope.dynamic(3.0, 20)], LONG), ids=["long", "dynamic"]
)
def test_ropes_of_a_length(scaling):
    """Keys of a chunk, a step, a tree or a fork that are turned by another length than the text's."""
    model = build(replace(CONFIG, rope_scaling=scaling))
    tokens = array(np.random.default_rng(5).integers(0, 40, (1, 24)))

    @jax.jit
    def read(model):
        # 24 slots are three blocks of 8 on a device, and 64 on eight: what counts is the slots
        cache = model.empty_cache(1, 24, block_size=8)
        cache = model.prefill(tokens[:, :15], cache, chunk_size=5).cache
        step = model(tokens[:, 15:18], cache=cache)
        forked = model(tokens[:, 15:18], cache=cache.fork(1, capacity=8))
        tree = model.read_tree(PrefixTree.from_beam(tokens[:, None, 15:18]), cache)
        return step.logits, forked.logits, tree.logits[:, :3]

    whole = np.asarray(jax.jit(lambda model: model(tokens).logits)(model))
    for found in read(model):
        close(found, whole[:, 15:18])
    short = jax.jit(lambda model: model(tokens[:, :18]).logits)(model)
    assert np.abs(np.asarray(short) - whole[:, :18]).max() > 1e-2
    with jax.set_mesh(make_mesh((8,), ("device",))):
        parallel = SequenceParallel("device")
        cache = model.empty_cache(1, 18, parallel=parallel, block_size=4)
        assert cache.capacity == 32
        found = jax.jit(lambda model, cache: model.prefill(tokens[:, :18], cache).logits)(
            model, cache
        )
    close(found, np.asarray(short)[:, -1:])
