"""Compiled programs: what they consist of, what they send, and what in them rounds."""

import functools
import math
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from energy_attn import VocabularyParallel, attention, masks, softmax_cross_entropy
from energy_attn.distributed import KVCache, SequenceParallel, collectives, cost
from energy_attn.distributed.internal import waits as waits
from energy_attn.models import Llama, LlamaConfig
from energy_attn.vocabulary import _blocks as _word_blocks
from energy_attn.vocabulary import _summed as _token_chunks
from tests.support.llama import GPT_OSS


def instructions(compiled) -> Counter:
    """How often each operation makes an array of each shape, in the optimised HLO."""
    pattern = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", re.MULTILINE)
    found = pattern.findall(compiled.as_text())
    return Counter((re.sub(r"\{[^}]*\}", "", shape), opcode) for shape, opcode in found)


def sent(program) -> list[tuple]:
    """What a program sends between devices, and between which."""
    return [(c.kind, c.bytes, c.count, c.groups) for c in collectives(program)]


def by_kind(found) -> Counter:
    """Bytes by kind of collective, all runs together, of collectives or of predicted transfers."""
    total = Counter()
    for c in found:
        total[c.kind] += c.bytes * c.count
    return total


def payload(program) -> Counter:
    return by_kind(collectives(program))


def shared_keys(ids, devices):
    """For each distance around contiguous shards, how many keys lie between those that packed documents share."""
    shards = ids.reshape(len(ids), devices, -1)
    for distance in range(1, devices):
        needed = np.zeros(shards.shape[2], bool)
        for i in range(distance, devices):
            there, own = shards[:, i - distance], shards[:, i]
            needed |= np.stack([np.isin(*x) for x in zip(there, own, strict=True)]).any(0)
        (places,) = np.nonzero(needed)
        yield int(places[-1] - places[0] + 1) if len(places) else 0


def check_documents(mesh):
    """A program for eight devices sends the keys, and gradients of keys, that packed documents share, and no others."""
    ids = np.searchsorted([3000, 7000, 7500, 12000, 14500], np.arange(16384), side="right")[None]
    packed = masks.Segments(np.asarray(ids, np.int32))
    program = trained(mesh, mask=packed, layout="contiguous")
    token = 2 * 8 * 128 * 2  # of keys and values, in sixteen bits
    # there, and as gradients back
    sent = sum(x.bytes * x.count for x in collectives(program) if x.kind == "collective-permute")
    assert sent == 2 * token * sum(shared_keys(ids, 8)) < 2 * token * 7 * 2048


def trained(
    mesh, method="ring", window=None, layout="zigzag", mask=None, gradients=True, **options
):
    """Causal attention over a mesh of eight devices, with gradients: 16384 tokens, 32 heads of 128 over 8 of keys."""
    parallel = SequenceParallel(mesh.axis_names, method, layout=layout, **options)
    sharding = NamedSharding(mesh, P(None, mesh.axis_names))
    query, key = (
        jax.ShapeDtypeStruct((1, 16384, heads, 128), jnp.bfloat16, sharding=sharding)
        for heads in (32, 8)
    )

    def out(*arrays):
        window_size = {} if window is None else {"local_window_size": window}
        return attention(*arrays, mask=mask, is_causal=True, **window_size, parallel=parallel)

    def both(query, key, value, cotangent):
        found, backward = jax.vjp(out, query, key, value)
        return found, backward(cotangent)

    run, given = (both, [query]) if gradients else (out, [])
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(query, key, key, *given).compile()


AXES = ("node", "device")
SHARDED = P(None, AXES)


def shape_of(keys: int) -> cost.Shape:
    """The sizes of decoding in the paper: one query of 16 heads of 128."""
    return cost.Shape(1, 1, keys, 16, 16, 128)


@functools.cache
def decoding(mesh, f, keys: int, out_specs=None, donate=(), **options):
    """Decoding in the sizes of the paper over a mesh of nodes and devices, compiled."""
    arrays = [
        jax.ShapeDtypeStruct((1, n, 16, 128), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for n, spec in ((1, P()), (keys, SHARDED), (keys, SHARDED))
    ]
    run = jax.shard_map(
        functools.partial(f, axis_name=AXES, **options),
        mesh=mesh,
        in_specs=(P(), SHARDED, SHARDED),
        out_specs=out_specs or P(),
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        return jax.jit(run, donate_argnums=donate).lower(*arrays).compile()


def shards(program, keys: int, devices: int) -> float:
    """All memory that a program holds on a device, in shards of keys and values."""
    used = program.memory_analysis()
    total = used.argument_size_in_bytes + used.temp_size_in_bytes + used.output_size_in_bytes
    return (total - used.alias_size_in_bytes) / (2 * keys // devices * 16 * 128 * 2)


def cache_and_query(mesh, empty, query, dtype=jnp.bfloat16):
    """A cache as `empty()` makes it, with its tokens on the axis "device", and a query of a shape, without values."""

    def placed(x):
        spec = P(None, "device") if mesh.size > 1 and x.ndim > 2 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        cache = jax.tree.map(placed, jax.eval_shape(empty))
    replicated = NamedSharding(mesh, P())
    return cache, jax.ShapeDtypeStruct(query, jnp.dtype(dtype), sharding=replicated)


# --- reproducible programs, compiled for devices that are not there

BLOCK, HEADS, KEY_HEADS, WIDTH = 4096, 32, 8, 128
# bytes of a row's node: weighed values, a maximum and a total of each head
NODE = HEADS * (WIDTH + 2) * 4


def step_over_a_cache(mesh: Mesh, blocks: int) -> jax.stages.Compiled:
    """One query over a cache of so many blocks a device."""
    sizes = 1, blocks * BLOCK * mesh.size, KEY_HEADS, WIDTH
    options = {"parallel": SequenceParallel("device", "tree"), "block_size": BLOCK}
    empty = functools.partial(KVCache.empty, *sizes, **options)
    with jax.set_mesh(mesh):
        step = jax.jit(functools.partial(KVCache.attend, reproducible=True))
        return step.lower(*cache_and_query(mesh, empty, (1, 1, HEADS, WIDTH))).compile()


def gradients_over_a_mesh(mesh: Mesh) -> set[tuple[str, bool]]:
    """The collectives of a causal prompt and its gradients: their kinds, and whether they are of more than numbers."""
    parallel = SequenceParallel("device", "ring")

    def loss(*arrays):
        out = attention(*arrays, is_causal=True, parallel=parallel, reproducible=True)
        return out.astype(jnp.float32).sum()

    sharding = NamedSharding(mesh, P(None, "device"))
    with jax.set_mesh(mesh):
        shapes = [(1, 4096, heads, WIDTH) for heads in (8, 4, 4)]
        arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=sharding) for x in shapes]
        program = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arrays).compile()
    return {(x.kind, x.bytes > 4) for x in collectives(program)}


def sent_in_nodes(program: jax.stages.Compiled) -> float:
    """The bytes that a device gathers of each other, in nodes of a row."""
    return sum(x.bytes for x in collectives(program) if x.kind == "all-gather") / NODE


MODELS = {
    "llama": LlamaConfig(
        517,
        256,
        640,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    ),
    "gpt_oss": replace(GPT_OSS, head_dim=16),  # experts, sinks, a window
}
# of one number each: moves, choices, and what IEEE 754 rounds in one way
_EXACT = frozenset(
    "abs add all-gather all-gather-done all-gather-start all-reduce all-to-all all-to-all-done bitcast bitcast-convert "
    "broadcast call clamp collective-permute compare concatenate constant convert copy copy-done copy-start "
    "custom-call dynamic-slice dynamic-update-slice fusion fusion-done fusion-start gather get-tuple-element iota "
    "maximum minimum multiply negate pad parameter reduce-precision reshape reverse scatter select sign slice sort "
    "subtract transpose tuple while".split()
)
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%(\S+) = \(?(?:f\d+|bf16)\[([\d,]*)\][^=]*? ([a-z\-]+)\(([^)]*)\)(.*)$", re.M
)


def prompt(model, tokens):
    return model(tokens, reproducible=True).logits


def step(model, tokens, cache):
    out = model(tokens, cache=cache, reproducible=True)
    return out.logits, out.cache


def gradients(model, tokens, parallel=None):
    def loss(model):
        return model.log_probs(tokens, parallel=parallel, reproducible=True).sum()

    return jax.grad(loss)(model)


def compiled(
    what: str, name: str, dtype: str, length: int, place: Sharding, options: dict | None = None
) -> jax.stages.Compiled:
    """A program of two texts on one device."""
    run = {"prompt": prompt, "step": step, "gradients": gradients}[what]
    given = jax.eval_shape(lambda: Llama(MODELS[name], jnp.dtype(dtype), key=jax.random.key(0)))
    given = [given, jax.ShapeDtypeStruct((2, length), jnp.int32)]
    if what == "step":
        given.append(jax.eval_shape(lambda model: model.empty_cache(2, 512), given[0]))
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), given)
    return jax.jit(run).lower(*placed).compile(options)


def training(mesh: Mesh, dtype: str) -> jax.stages.Compiled:
    """The gradients of a model that devices have whole, of texts sharded over the axes "data" and "token"."""
    parallel = SequenceParallel("token", "ring", batch="data")
    whole, sharded = (NamedSharding(mesh, x) for x in (P(), P("data", "token")))
    model = jax.eval_shape(lambda: Llama(MODELS["llama"], jnp.dtype(dtype), key=jax.random.key(0)))
    model = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), model)
    tokens = jax.ShapeDtypeStruct((4, 1024), jnp.int32, sharding=sharded)
    with jax.set_mesh(mesh):
        run = jax.jit(gradients, static_argnums=2)
        return run.lower(model, tokens, parallel).compile()


def of_xla(program: jax.stages.Compiled) -> Counter[str]:
    """The operations on floating numbers whose bits XLA decides, and sums of products, which it may round once.

    Functions of one number, which are among them, are named as they are; a sum of a number and itself is `unfused`.
    """
    found: Counter[str] = Counter()
    computations = program.as_text().split("\n\n")
    choices = [x for x in computations if re.search(r" (maximum|minimum)\(", x)]
    choices = {x[1] for x in map(re.compile(r"%(\S+) ").match, choices) if x}
    for computation in computations:
        rows = [x.groups() for x in _INSTRUCTION.finditer(computation)]
        shapes, kinds = {x[0]: x[1] for x in rows}, {x[0]: x[2] for x in rows}
        for _, shape, kind, given, rest in rows:
            names = re.findall(r"%([\w.\-]+)", given)
            if kind == "reduce":
                # a maximum, or of axes of one number
                is_same = _size(shapes.get(names[0], "")) == _size(shape)
                if not is_same and re.search(r"to_apply=%([\w.\-]+)", rest)[1] not in choices:
                    found["reduce"] += 1
            elif kind not in _EXACT:
                found[kind] += 1
            elif kind in ("add", "subtract") and len(set(names)) > 1:
                found["sum of products"] += sum(kinds.get(x) == "multiply" for x in names)
    return +found


def _size(shape: str) -> int:
    return math.prod(int(x) for x in shape.split(",") if x)


def check_vocabulary_traffic(
    mesh: Mesh, data: str, model: str, tokens: int, words: int, width: int
) -> None:
    """Asserts that a loss of sharded words sends three numbers a token, and its gradient the gradients."""
    places = ((tokens, width), P(data)), ((words, width), P(model)), ((tokens,), P(data))
    kinds = jnp.bfloat16, jnp.bfloat16, jnp.int32
    arrays = [
        jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, spec))
        for (shape, spec), kind in zip(places, kinds, strict=True)
    ]
    parallel = VocabularyParallel(model, data)

    def loss(hidden, weight, labels):
        return softmax_cross_entropy(hidden, weight, labels, parallel=parallel)

    with jax.set_mesh(mesh):
        forward, both = (
            collectives(jax.jit(f).lower(*arrays).compile())
            for f in (loss, jax.value_and_grad(loss, (0, 1)))
        )
    share = tokens // mesh.shape[data]
    assert {x.kind for x in forward} == {"all-reduce"}
    assert sum(x.bytes * (x.count or 1) for x in forward) <= 4 * 3 * share + 64
    gradients = 4 * width * (share + words // mesh.shape[model])
    assert sum(x.bytes * (x.count or 1) for x in both) <= gradients + 4 * 4 * share


def word_blocks(monkeypatch, numbers: int, words: int = 128) -> None:
    """Sets the numbers in a block of logits, on all platforms, and the fewest words in a block."""
    monkeypatch.setattr(_word_blocks, "_MOST", {"cpu": numbers, "other": numbers})
    monkeypatch.setattr(_word_blocks, "_LEAST", words)


def token_chunks(monkeypatch, tokens: int) -> None:
    """Sets the tokens in a chunk of a loss, as in a process with one device."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(_token_chunks, "_MOST", 1)
    monkeypatch.setattr(_token_chunks, "_LEAST", tokens)
