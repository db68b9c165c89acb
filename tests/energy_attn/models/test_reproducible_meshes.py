"""One set of bits over meshes: of texts, of their log-probabilities, and of the weights that a training ends with."""

import dataclasses
import functools
import hashlib
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from energy_attn import reproducible
from energy_attn.distributed import SequenceParallel, collectives, make_mesh
from energy_attn.models import (
    Llama,
    LlamaConfig,
    PromptLookup,
    generate,
    score_continuations,
    shard,
)
from energy_attn.prefix_tree import PrefixTree
from tests.support.compare import same
from tests.support.flags import spawn
from tests.support.llama import GPT_OSS, build
from tests.support.selection import few

# of one layer, as each compilation takes seconds
SMALL = LlamaConfig(
    40, 48, 72, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)
LENGTH, ROWS = 160, 6  # two tiles of tokens; rows that four devices do not share evenly
OPTIMISER = optax.adam(1e-2)


def on(devices: int):
    """A mesh of so many devices, and how tokens are sharded over it."""
    sizes, names = ((2, 4), ("b", "s")) if devices == 8 else ((devices,), ("s",))
    mesh = make_mesh(sizes, names, devices=jax.devices()[:devices])
    batch = "b" if devices == 8 else ()
    method = {1: "auto", 2: "ring", 3: "ring", 4: "tree", 8: "gather"}[devices]
    return mesh, SequenceParallel("s", method, batch=batch)  # pyright: ignore[reportArgumentType]


@functools.cache
def texts(step: int = 0):
    """Random ones."""
    return np.random.default_rng(step).integers(0, 40, (ROWS, LENGTH)).astype(np.int32)


@functools.cache
def model(dtype: str = "float32") -> Llama:
    """A small one."""
    return build(SMALL, jnp.dtype(dtype), scale=0.3)


@functools.partial(jax.jit, static_argnums=2)
def log_probs(model, tokens, parallel=None):
    """Of a text, as its training computes them."""
    return model.log_probs(tokens, parallel=parallel, reproducible=True)


@functools.partial(jax.jit, static_argnums=2)
def gradient(model, tokens, parallel):
    """Of a loss."""
    return jax.grad(lambda model: -log_probs(model, tokens, parallel).sum() / tokens.size)(model)


@jax.jit
@reproducible
def update(gradient, model, state):
    """Of an optimiser, whose products and sums XLA fuses on one device otherwise than on several."""
    with jax.numpy_dtype_promotion("standard"):  # optax's
        change, state = OPTIMISER.update(gradient, state, model)
    return eqx.apply_updates(model, change), state


def trained(first: int, last: int, devices: int, model, state):
    """Weights and the state of the optimiser after some steps on some devices."""
    mesh, parallel = on(devices)
    with jax.set_mesh(mesh):
        for step in range(first, last):
            change = gradient(model, jnp.asarray(texts(step)), parallel)
            model, state = update(change, model, state)
    return jax.tree.map(jnp.asarray, jax.device_get((model, state)))


@pytest.mark.full
@pytest.mark.parametrize(("devices", "dtype"), [(8, "float32"), (3, "float32"), (8, "bfloat16")])
def test_training(devices, dtype):
    """Sums over tokens in the order of devices, or rounded to 16 bits on each; rows left out or counted twice."""
    start = model(dtype), OPTIMISER.init(model(dtype))
    same(trained(0, 3, devices, *start), trained(0, 3, 1, *start))


@functools.cache
def routed() -> Llama:
    """A small one with experts and sinks."""
    config = dataclasses.replace(GPT_OSS, sliding_window=70)
    return build(config, jnp.float32, scale=config.hidden_size**-0.5)


def test_sinks_and_experts():
    """A sink that each device counts; tokens that are routed by the rows beside them on a device."""
    mesh, parallel = on(8)
    with jax.set_mesh(mesh):
        found = log_probs(routed(), jnp.asarray(texts()), parallel)
    same(jax.device_get(found), log_probs(routed(), jnp.asarray(texts())))


@pytest.mark.full
def test_split_experts():
    """Experts that a device has not, or a sink, in a sum over devices: of a prompt, with a cache, and in gradients."""
    tokens, parallel = jnp.asarray(texts()), SequenceParallel("s", heads="t")

    @jax.jit
    def prefilled(model, tokens, cache):
        read = model.prefill(tokens, cache, chunk_size=90, reproducible=True)
        return read.logits

    wanted = (
        log_probs(routed(), tokens),
        prefilled(routed(), tokens, routed().empty_cache(ROWS, LENGTH)),
        gradient(routed(), tokens, None),
    )
    mesh = make_mesh((2, 4), ("t", "s"))
    with jax.set_mesh(mesh):
        split = shard(routed(), mesh, tensor="t")
        # one program at a time, as those of simulated devices may wait for each other
        same(jax.device_get(log_probs(split, tokens, parallel)), wanted[0])
        cache = split.empty_cache(ROWS, LENGTH, parallel=parallel, reproducible=True)
        same(jax.device_get(prefilled(split, tokens, cache)), wanted[1])
        same(jax.device_get(gradient(split, tokens, parallel)), jax.device_get(wanted[2]))


def resume(folder: str, last: int, devices: int) -> None:
    """Goes on from what a process left in a folder, and leaves what it has."""
    leaves, form = jax.tree.flatten((model(), OPTIMISER.init(model())))
    path, first = Path(folder) / "left.npz", 0
    if path.exists():
        with np.load(path) as left:
            first = int(left["step"])
            leaves = [jnp.asarray(left[f"{i}"]) for i in range(len(leaves))]
    found = trained(first, last, devices, *form.unflatten(leaves))
    arrays = {f"{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(found))}
    np.savez(path, step=last, **arrays)  # pyright: ignore[reportArgumentType]
    print(hashlib.sha256(b"".join(x.tobytes() for x in arrays.values())).hexdigest())


@pytest.mark.full
def test_fifty_steps(tmp_path):
    """Bits that a process, a checkpoint or other devices change, in a training of fifty steps."""
    program = "import sys; from tests.energy_attn.models.test_reproducible_meshes import resume; "
    program += "resume(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))"
    ends = {}
    for name, parts in {"1": [(50, 1)], "8": [(50, 8)], "4, then 2": [(23, 4), (50, 2)]}.items():
        folder = tmp_path / name
        folder.mkdir()
        for last, devices in parts:
            said = spawn("-c", program, folder, str(last), str(devices), devices=8)
            ends[name] = said.split()[-1]
    assert len(set(ends.values())) == 1, ends


@functools.cache
def rollout():
    """A text that a policy samples, and its log-probabilities."""
    options = {"temperature": 1.0, "key": jax.random.key(1), "return_logprobs": True}
    write = functools.partial(
        generate, model("bfloat16"), jnp.asarray(texts()[:, :90]), 20, reproducible=True, **options
    )
    said = write()
    return write, said, np.concatenate([texts()[:, :90], said.tokens], 1)


@pytest.mark.parametrize("devices", few([1, 8], 8))
def test_rollout(devices):
    """A policy whose log-probabilities are others where its texts are sampled than where it is trained."""
    _, said, text = rollout()
    mesh, parallel = on(devices)
    with jax.set_mesh(mesh):
        found = log_probs(model("bfloat16"), jnp.asarray(text), parallel)
        same(jax.device_get(found)[:, 89:], said.logprobs)


@pytest.mark.full
def test_rollout_over_devices(tmp_path):
    """A policy that samples over devices, or whose weights are split over them."""
    write, said, text = rollout()
    with jax.set_mesh(on(4)[0]):
        found = write(parallel=SequenceParallel("s"))
        same(jax.device_get((found.tokens, found.logprobs)), (said.tokens, said.logprobs))
    model("bfloat16").save(tmp_path)
    mesh = make_mesh((4, 2), ("node", "tensor"))
    with jax.set_mesh(mesh):
        read = Llama.load(tmp_path, mesh=mesh, progress=False)
        heads = read.layers[0].self_attn.q_proj.weight.sharding
        assert heads.spec[0] == "tensor" and heads.mesh == mesh
        found = log_probs(read, jnp.asarray(text), None)
        same(jax.device_get(found)[:, 89:], said.logprobs)


@functools.partial(jax.jit, static_argnames=("options",))
def read_tree(model, tokens, tree, lengths, options):
    """The logits of the nodes of a tree behind texts, over a cache of two leaves."""
    cache = model.empty_cache(len(tokens), 512, reproducible=True, **dict(options))
    cache = model.prefill(tokens, cache, lengths=lengths, chunk_size=90, reproducible=True).cache
    return model.read_tree(tree, cache, reproducible=True).logits


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"window": 70}, {"quantize": "int8"}], ids=str)
def test_trees(options):
    """A path whose keys are folded beside the cache's: other bits than on one device, or than without drafts."""
    config = dataclasses.replace(SMALL, sliding_window=options.get("window"))
    model, parallel = build(config, jnp.float32, scale=0.3), SequenceParallel("s")
    rng = np.random.default_rng(1)
    lengths = np.array(
        [509, 250, 1], np.int32
    )  # the first has no room for all levels, but in a ring
    tokens = rng.integers(0, 40, (3, 509)).astype(np.int32)
    branches = jnp.asarray(rng.integers(0, 40, (3, 3, 5)), jnp.int32)
    tree = PrefixTree.from_beam(branches, lengths=jnp.asarray([[5, 5, 2]] * 3))
    read = functools.partial(read_tree, model, tokens, tree, lengths)
    prompts = [[1, 2, 3, 1, 2], [7, 7, 7]]
    write = functools.partial(generate, model, prompts, 20, return_logprobs=True, reproducible=True)
    score = functools.partial(score_continuations, model, prompts, branches[:2], reproducible=True)
    wanted, plain, scored = np.array(read(tuple(options.items()))), write(), score()
    with jax.set_mesh(on(2)[0]):
        found = np.array(read((*options.items(), ("parallel", parallel))))
        drafted = write(parallel=parallel, drafter=PromptLookup(length=3))
        same(jax.device_get(score(parallel=parallel)), np.asarray(scored))
    same(jax.device_get(drafted.logprobs), np.asarray(plain.logprobs))
    same(jax.device_get(drafted.tokens), np.asarray(plain.tokens))
    if "window" not in options:
        missing = np.asarray(tree.depth)[0] >= 3
        assert np.isnan(found[0, missing]).all()
        found[0, missing] = wanted[0, missing] = 0
    same(found, wanted)


@pytest.mark.full
def test_own_leaves():
    """Keys, or a root for each 256 of them, that a step of `generate` gathers; keys that are lost at a leaf's end."""
    config = dataclasses.replace(SMALL, max_position_embeddings=1 << 16)
    model, parallel = build(config, jnp.float32), SequenceParallel("s")

    @functools.partial(jax.jit, static_argnames=("count", "parallel"))
    def said(model, prompt, count, parallel=None):
        options = {"return_logprobs": True, "reproducible": True}
        found = generate(model, prompt, count, parallel=parallel, **options)
        return found.tokens, found.logprobs

    prompt = np.random.default_rng(2).integers(0, 40, (2, 766)).astype(np.int32)
    wanted = said(model, prompt, 4)
    with jax.set_mesh(make_mesh((4,), ("s",), devices=jax.devices()[:4])):
        same(jax.device_get(said(model, prompt, 4, parallel)), wanted)
        sent = []
        for room in (1 << 13, 1 << 15):  # behind a prompt of one token, which all devices read
            program = said.lower(model, prompt[:, :1], room - 1, parallel).compile()
            sent.append([(x.kind, x.shapes) for x in collectives(program)])
    assert sent[0] == sent[1] and sent[0]


class Made(Exception):
    """The options of a cache."""


def test_blocks(monkeypatch):
    """A call whose cache is not made for it; another default of calls without the option, or of one device."""
    with jax.set_mesh(make_mesh((4,), ("s",), devices=jax.devices()[:4])):
        for slots, reproducible, wanted in (
            *((40, False, 10), (4096, False, 128), (40, True, 256), (4 * 2048, True, 256)),
            *((4 * 2048 + 1, True, 512), (4 * 5000, True, 1024)),
        ):
            made = functools.partial(model().empty_cache, 1, slots, reproducible=reproducible)
            cache = jax.eval_shape(functools.partial(made, parallel=SequenceParallel("s")))
            assert cache.layers[0].slots.block == wanted, slots
            assert jax.eval_shape(made).layers[0].slots.block == min(slots, 128)

    def make(self, *sizes, **options):
        raise Made(options["reproducible"])

    monkeypatch.setattr(Llama, "empty_cache", make)
    for reproducible in (False, True):
        chosen = {"reproducible": reproducible}
        for call in (
            functools.partial(generate, model(), [[1, 2], [3]], 4, **chosen),
            functools.partial(generate, model(), [[1, 2], [3]], 4, batch_size=1, **chosen),
            functools.partial(
                score_continuations, model(), [[1]], jnp.ones((1, 1, 1), int), **chosen
            ),
        ):
            with pytest.raises(Made, match=str(reproducible)):
                call()
