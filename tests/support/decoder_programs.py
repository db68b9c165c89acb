"""Reproducible decoders compiled for devices that are not there, and what in such programs rounds."""

import math
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import SequenceParallel
from energy_attn.models import Llama, LlamaConfig
from tests.support.llama import GPT_OSS

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
