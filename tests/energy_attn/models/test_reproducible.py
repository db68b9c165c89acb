"""One set of bits: a token's log-probabilities have the same bytes however its text is read, and those of the model."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from energy_attn.functional._by_rows import by_rows
from energy_attn.models import (
    LlamaConfig,
    ModelDrafter,
    PromptLookup,
    generate,
    score_continuations,
)
from energy_attn.prefix_tree import PrefixTree
from tests.support.arrays import array
from tests.support.compare import close, same
from tests.support.llama import DEEPSEEK, GPT_OSS, build
from tests.support.meshes import mesh_of
from tests.support.selection import few

SMALL = LlamaConfig(
    40, 48, 72, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)
LENGTH = 300  # of a text: three tiles, two leaves of keys
MODELS = {
    "float32": (SMALL, "float32"),
    "bfloat16": (SMALL, "bfloat16"),
    "deep": (replace(SMALL, hidden_size=640, intermediate_size=1100, vocab_size=517), "float32"),
    "gemma": (
        replace(
            SMALL,
            hidden_act="gelu_pytorch_tanh",
            qk_norm=True,
            post_norms=True,
            unit_offset=True,
            final_logit_softcapping=7.0,
        ),
        "float32",
    ),
    "routed": (replace(GPT_OSS, sliding_window=70), "float32"),
    "latent": (replace(DEEPSEEK, rope_scaling=None), "float32"),
}


@pytest.fixture(scope="module", params=few([*MODELS], "routed"))
def model(request):
    config, dtype = MODELS[request.param]
    return build(config, jnp.dtype(dtype), scale=config.hidden_size**-0.5)


@pytest.fixture(scope="module")
def small():
    """Of one layer: each compilation takes seconds."""
    return build(replace(SMALL, num_hidden_layers=1), jnp.float32, scale=0.3)


@functools.cache
def texts(vocab: int = 40):
    return np.random.default_rng(1).integers(0, vocab, (5, LENGTH)).astype(np.int32)


@jax.jit
def plain(model, tokens):
    return model(tokens).logits


@jax.jit
def whole(model, tokens):
    return model(tokens, reproducible=True).logits


@jax.jit
def step(model, tokens, cache, lengths=None):
    out = model(tokens, cache=cache, lengths=lengths, reproducible=True)
    return out.logits, out.cache


def in_chunks(model, tokens, sizes, slots):
    cache, found, first = model.empty_cache(len(tokens), slots), [], 0
    for size in sizes:
        logits, cache = step(model, tokens[:, first : first + size], cache)
        found.append(np.asarray(logits))
        first += size
    return np.concatenate(found, 1)


@jax.jit
def in_scan(model, tokens, cache):
    def one(cache, token):
        logits, cache = step(model, token[:, None], cache)
        return cache, logits[:, 0]

    return jax.lax.scan(one, cache, tokens.T)[1].swapaxes(0, 1)


def test_one_text(model):
    """A tile whose size is that of the call, one row beside none, a loop of known length: in all ways of reading."""
    tokens = texts(model.config.vocab_size)
    wanted = np.asarray(whole(model, tokens))
    tolerance = 0.1 if model.norm.weight.dtype == jnp.bfloat16 else 1e-4
    close(wanted, np.asarray(plain(model, tokens)), tolerance=tolerance)
    same(whole(model, tokens[2:3]), wanted[2:3])
    same(jax.jit(lambda x: whole(model, x))(tokens[2:3]), wanted[2:3])  # weights are constants
    same(jax.vmap(whole, (None, 0))(model, tokens[:2, None])[:, 0], wanted[:2])
    same(in_chunks(model, tokens[:1], (LENGTH,), LENGTH), wanted[:1])
    same(in_chunks(model, tokens[:1], (1, 1, 7, 90, 201), 777), wanted[:1])
    cache = model.empty_cache(3, 512)
    same(in_scan(model, tokens[:3, :40], cache), wanted[:3, :40])


@pytest.mark.parametrize("shape", [(0, 8), (2, 0)])
def test_no_rows(small, shape):
    """Tiles of no row, or experts of no token: an error, NaN, or another shape than that without the option."""
    tokens, routed = jnp.zeros(shape, jnp.int32), build(GPT_OSS, jnp.float32)

    @functools.partial(jax.jit, static_argnums=2)
    def read(model, tokens, reproducible):
        found = model(tokens, return_energies=True, reproducible=reproducible)
        return found.logits, found.energies

    for model in small, routed:
        found = read(model, tokens, True)
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, read(model, tokens, False))
        assert found[0].shape == (*shape, 40)
        with jax.set_mesh(mesh_of("8")):
            assert whole(model, tokens).shape == (*shape, 40)
    weights = jnp.zeros(shape, jnp.float32)
    assert not any(x.any() for x in jax.tree.leaves(gradient(small, tokens, weights, True)))
    if shape[0]:
        logits, cache = step(small, tokens, small.empty_cache(2, 8))
        assert logits.shape == (2, 0, 40) and cache.lengths.tolist() == [0, 0]
    else:
        assert small.log_probs(tokens, reproducible=True).shape == (0, 7)


def test_ragged_prompts(small):
    """Padding behind a row's tokens, or the chunks of a prompt: other logits of its last token."""
    tokens, lengths = texts(), jnp.asarray([300, 7, 131, 64, 1])
    wanted = np.asarray(whole(small, tokens))[np.arange(5), lengths - 1]

    @functools.partial(jax.jit, static_argnums=2)
    def prefill(model, tokens, chunk_size, cache):
        read = model.prefill(
            tokens, cache, lengths=lengths, chunk_size=chunk_size, reproducible=True
        )
        return read.logits[:, 0]

    for chunk_size, slots in (1024, 300), (70, 1000):
        same(prefill(small, tokens, chunk_size, small.empty_cache(5, slots)), wanted)


KINDS = {
    "lookup": {"drafter": PromptLookup(length=3)},
    "another model": {
        "drafter": lambda: ModelDrafter(build(SMALL, jnp.float32, seed=2), 2, nodes=5)
    },
    "queue": {"batch_size": 2, "chunk_size": 3},
}


@pytest.mark.parametrize("drawn", few([False, True], False))
@pytest.mark.parametrize("kind", few(["lookup", "another model", "queue"], "lookup"))
def test_drafted_text(small, kind, drawn):
    """A draft, a queue or the prompts of other rows: another text, or other bits of its log-probabilities."""
    prompts = [[1, 2, 3, 4, 1, 2], [5, 6, 7, 8, 9, 5, 6, 7], [12], [7, 7, 7]]
    sampling = {"temperature": 0.8, "top_p": 0.9, "key": jax.random.key(3)} if drawn else {}
    write = functools.partial(
        generate, small, max_new_tokens=20, return_logprobs=True, reproducible=True, **sampling
    )
    options = {name: x() if callable(x) else x for name, x in KINDS[kind].items()}
    found, wanted = write(prompts, **options), write(prompts)
    same((found.tokens, found.logprobs), (wanted.tokens, wanted.logprobs))
    if kind == "queue":
        same(write(prompts[:1]).logprobs, wanted.logprobs[:1])
    tokens = np.concatenate([np.asarray(prompts[0]), np.asarray(wanted.tokens[0])])[None]
    logits = plain(small, jnp.asarray(tokens, jnp.int32))
    log_p = np.asarray(jax.nn.log_softmax(logits))[0, np.arange(5, 25), tokens[0, 6:]]
    close(wanted.logprobs[0], log_p, tolerance=1e-5)


def test_scored_continuations(small):
    """Branches of a tree that share a position: other bits than each continuation alone has."""
    prompt, beam = [[3, 1, 4, 1, 5]], jnp.asarray([[[9, 2, 6], [9, 2, 7], [8, 2, 6]]])
    score = functools.partial(score_continuations, small, prompt, reproducible=True)
    found = score(beam)
    for i in range(3):
        same(score(beam[:, i : i + 1]), found[:, i : i + 1])
    close(found, score_continuations(small, prompt, beam), tolerance=1e-5)


def test_tree(small):
    """A node that sees its sibling, or whose position is its slot: not the logits of the text that ends there."""
    tokens = jnp.asarray(texts()[:1, :9])
    branches = jnp.asarray([[[5, 7, 7], [5, 7, 8], [5, 2, 0], [4, 0, 0]]], jnp.int32)
    lengths = jnp.asarray([[3, 3, 2, 1]])
    tree = PrefixTree.from_beam(branches, lengths=lengths)

    @jax.jit
    def read(model, tokens, tree, cache):
        _, cache = step(model, tokens, cache)
        return model.read_tree(tree, cache, reproducible=True).logits

    found = np.asarray(read(small, tokens, tree, small.empty_cache(1, 9)))
    for branch in range(4):
        text = jnp.concatenate([tokens, branches[:, branch]], 1)
        logits = np.asarray(whole(small, text))[0]
        for level in range(lengths[0, branch]):
            same(found[0, tree.unpacker[0, branch, level]], logits[9 + level])


@pytest.mark.full
def test_over_devices(small):
    """Rows that XLA splits otherwise over devices, and weights that do not vary beside tokens that do."""
    tokens = jnp.asarray(np.concatenate([texts(), texts()[:3]])[:, :40])
    wanted = np.asarray(whole(small, tokens))
    with jax.set_mesh(mesh_of("8")):
        for spec in P("device"), P(None, "device"):
            same(whole(small, jax.device_put(tokens, spec)), wanted)
        each = jax.shard_map(whole, in_specs=(P(), P("device")), out_specs=P("device"))
        same(jax.jit(each)(small, tokens), wanted)
        with pytest.raises(NotImplementedError, match="reproducible: wanted False for gradients"):
            jax.grad(lambda model: each(model, tokens).sum())(small)


def test_declined(small):
    """Bits that differ in silence: weights, and sums of their gradients, under `jax.vmap`."""
    many = jax.tree.map(lambda x: jnp.stack([x, x]), small)
    with pytest.raises(NotImplementedError, match="reproducible: wanted False where jax.vmap maps"):
        jax.vmap(whole, (0, None))(many, array(texts()[:1, :4]))
    tokens = array(texts()[:2, None, :4])
    with pytest.raises(NotImplementedError, match="reproducible: wanted False for gradients under"):
        jax.grad(lambda model: jax.vmap(whole, (None, 0))(model, tokens).sum())(small)


@functools.partial(jax.jit, static_argnums=3)
def gradient(model, tokens, weights, reproducible):
    def loss(model):
        log_p = jax.nn.log_softmax(model(tokens, reproducible=reproducible).logits)[:, :-1]
        chosen = jnp.take_along_axis(log_p, tokens[:, 1:, None], 2)[:, :, 0]
        return (weights[:, 1:] * chosen).sum()

    return jax.grad(loss)(model)


def test_gradients(small):
    """Sums over tokens that follow the shape of a batch: the halves of one do not add up to it, or padding counts."""
    tokens = jnp.asarray(texts()[:4])
    weights = jnp.asarray(np.random.default_rng(2).standard_normal((4, LENGTH)), jnp.float32)
    found = gradient(small, tokens, weights, True)
    wanted = jax.tree.map(np.asarray, gradient(small, tokens, weights, False))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close(np.asarray(x) / np.abs(y).max(), y / np.abs(y).max(), tolerance=1e-5)
    halves = (gradient(small, tokens[i : i + 2], weights[i : i + 2], True) for i in (0, 2))
    same(jax.tree.map(jnp.add, *halves), found)
    pads = (0, 0), (0, 250)
    same(gradient(small, jnp.pad(tokens, pads), jnp.pad(weights, pads), True), found)


@pytest.mark.parametrize("width", few([1, 3, 8, 37, 96, 256], 256))
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "gelu", "silu", "norm", "map"])
def test_sizes_of_tiles(name, width):
    """A function of a tile whose instructions follow the number of its rows."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(3 * rng.standard_normal((1, 128, width)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((50, width)), jnp.float32)
    f = {
        "softmax": jax.nn.softmax,
        "log_softmax": jax.nn.log_softmax,
        "gelu": jax.nn.gelu,
        "silu": jax.nn.silu,
        "norm": lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) + x,
        "map": lambda x: x @ weight.T,
    }[name]
    run = jax.jit(functools.partial(by_rows, f))
    wanted = np.asarray(run(x))
    close(wanted, np.asarray(f(x)), tolerance=1e-5)
    for count in 1, 9, 17, 33:  # tiles of 8, 16, 32 and 64 rows
        same(run(x[:, :count]), wanted[:, :count])


@pytest.mark.emulated
def test_products_of_few_rows():
    """A product that the library of XLA:CPU sums in another order where there are few rows, or one column."""
    rng = np.random.default_rng(0)
    sizes = (8, 96), (64, 1), (64, 3), (64, 96), (256, 50), (256, 256), (512, 1000), (2048, 50)
    weights = [jnp.asarray(rng.standard_normal(x), jnp.float32) for x in sizes]
    x = jnp.asarray(rng.standard_normal((1, 130, 2048)), jnp.float32)

    @jax.jit
    def run(x, weights):
        def products(x):
            rows = [x[..., : len(w)] for w in weights]
            by_columns = [y @ w for y, w in zip(rows, weights, strict=True)]
            turned = [y @ w.reshape(w.shape[::-1]).T for y, w in zip(rows, weights, strict=True)]
            return by_columns, turned

        return by_rows(products, x)

    wanted = jax.tree.map(np.asarray, run(x, weights))
    for found, weight in zip(wanted[0], weights, strict=True):
        exact = np.float64(x[..., : len(weight)]) @ np.float64(weight)
        close(found, exact.astype(np.float32), tolerance=1e-5)
    for count in 1, 9, 32, 33:  # tiles of 8, 16, 32 and 64 rows
        same(run(x[:, :count], weights), jax.tree.map(lambda y, n=count: y[:, :n], wanted))
