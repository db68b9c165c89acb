"""Reproducible programs compiled for devices that are not there: what they send, and what in them rounds."""

import functools
import math
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from energy_attn import attention
from energy_attn.distributed import KVCache, SequenceParallel, collectives
from energy_attn.models import Llama, LlamaConfig
from tests.support.llama import GPT_OSS
from tests.support.programs import cache_and_query

BLOCK, HEADS, KEY_HEADS, WIDTH = 4096, 32, 8, 128
NODE = (
    HEADS * (WIDTH + 2) * 4
)  # bytes of a row's node: weighed values, a maximum and a total of each head


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
