"""Tables 1 and 2 of the paper's later text, and the cost model's predictions for the same machines."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from energy_attn.distributed import cost
from energy_attn.distributed.internal import STRATEGIES, network
from energy_attn.models import Llama, LlamaConfig, Rope

TOKENS = 10


class Measured(NamedTuple):
    """A row of the paper's tables: seconds for a prompt and ten tokens, and their standard errors."""

    prompt: int
    tree: float
    tree_error: float
    ring: float
    ring_error: float


class System(NamedTuple):
    """A machine of the paper, and the times that the paper gives for it.

    `bandwidth` is that of a device's memory, bytes per second; `flops` those of its dense bfloat16
    products, per second.
    """

    model: str
    topology: cost.Topology
    bandwidth: float
    flops: float
    rows: tuple[Measured, ...]


def _llama(
    layers: int, width: int, inside: int, head_dim: int, factor: float, tied: bool
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=inside,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=Rope.llama3(factor, 1.0, 4.0, 8192),
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )


# As in the config.json of the published checkpoints.
LLAMAS = {
    "Llama 3.1 8B": _llama(32, 4096, 14336, 128, 8.0, tied=False),
    "Llama 3.2 1B": _llama(16, 2048, 8192, 64, 32.0, tied=True),
}

# Times: section 6.4 (table 1) and appendix C.3 (table 2). Bandwidths and products: the data sheets
# of H100 SXM and MI300X, and NVIDIA's Ada architecture paper.
_FABRIC = cost.topology("mi300x", (4,), bandwidth=64e9)
SYSTEMS = {
    "8x H100": System(
        *("Llama 3.1 8B", cost.topology("dgx_h100", (8,)), 3.35e12, 989.4e12),
        (
            Measured(32 * 1024, 0.60, 0.15, 2.57, 0.35),
            Measured(64 * 1024, 1.08, 0.10, 4.42, 0.38),
            Measured(128 * 1024, 2.68, 0.28, 6.38, 0.58),
            Measured(256 * 1024, 2.89, 0.62, 8.19, 1.07),
        ),
    ),
    "4x MI300X": System(
        *("Llama 3.1 8B", _FABRIC, 5.3e12, 1307.4e12),
        (
            Measured(32 * 1024, 1.05, 0.01, 3.57, 0.25),
            Measured(64 * 1024, 2.36, 0.01, 7.33, 0.25),
            Measured(128 * 1024, 6.43, 0.25, 16.40, 0.40),
            Measured(256 * 1024, 15.30, 4.93, 35.12, 5.02),
        ),
    ),
    "2x RTX 4090": System(
        *("Llama 3.2 1B", cost.topology("rtx_4090", (2,)), 1.008e12, 165.2e12),
        (
            Measured(8000, 0.34, 0.05, 1.38, 0.07),
            Measured(16000, 0.58, 0.07, 2.77, 0.04),
            Measured(20000, 0.74, 0.01, 3.47, 0.04),
            Measured(32000, 1.01, 0.02, 5.45, 0.03),
        ),
    ),
}


def attention_of(config: LlamaConfig, keys: int, dtype: str) -> cost.Shape:
    """The attention of one layer in a decode step, as the cost model takes it."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return cost.Shape(1, 1, keys, heads, kv_heads, config.head_dim, dtype=dtype, causal=True)


def abstract(config: LlamaConfig) -> Any:
    """The model in bfloat16 without its numbers: shapes and dtypes alone."""
    return jax.eval_shape(lambda key: Llama(config, jnp.bfloat16, key=key), jax.random.key(0))


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a tree, abstract or not."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def predict(system: System, prompt: int) -> dict[str, float]:
    """Seconds of reading the prompt and of a step by each method, by the model that `docs/benchmarks.md` describes."""
    config, topology = LLAMAS[system.model], system.topology
    model, layers = abstract(config), config.num_hidden_layers
    embedding = 0 if config.tie_word_embeddings else bytes_of(model.embed_tokens)
    weights = bytes_of(model) - embedding

    def reading(shape: cost.Shape, shards: int) -> float:
        stored = 2 * shape.keys * shape.kv_heads * shape.width * shape.bytes // topology.devices
        return (weights + layers * shards * stored) / system.bandwidth

    def step(method: str, merge: str, shape: cost.Shape, shards: int = 1) -> float:
        return reading(shape, shards) + layers * cost.latency(method, merge, shape, topology)

    shape = attention_of(config, prompt, "bfloat16")
    repeated = dataclasses.replace(shape, kv_heads=shape.heads)
    inside = bytes_of(model.layers) // 2
    products = 2 * prompt * inside + 2 * layers * prompt**2 * shape.heads * shape.width
    scatter = STRATEGIES["gather"].scatter_transfers(shape.rows, shape, topology)
    scattered = sum(network.seconds(x, topology) for x in scatter)
    return {
        "prompt": products / topology.devices / system.flops,
        "tree": step("tree", cost.choose_merge(shape, topology), shape),
        "queries": step("ring", "queries", shape),
        "scatter": reading(shape, 1) + layers * scattered,
        "ring": step("ring", "keys", shape, topology.devices),
        "repeated": step("ring", "keys", repeated, topology.devices),
    }


def paper_rows() -> list[dict[str, Any]]:
    """Rows of the paper's tables: its times, the part of them that is a step's, and predicted times."""
    return [
        {
            "system": name,
            "model": system.model,
            "prompt": row.prompt,
            "paper": {
                "tree": {"mean": row.tree, "error": row.tree_error},
                "ring": {"mean": row.ring, "error": row.ring_error},
            },
            # the prompt is read alike, so that the difference is the steps'
            "step_difference_s": (row.ring - row.tree) / TOKENS,
            "predicted": predict(system, row.prompt),
        }
        for name, system in SYSTEMS.items()
        for row in system.rows
    ]
