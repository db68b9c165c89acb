"""Prefix trees: packing them, verifying them over a long context, and the gain of drafting for a small model."""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from energy_attn.cli.demo import byte_llama, held_out_text
from energy_attn.distributed import KVCache, SequenceParallel, make_mesh
from energy_attn.models import AbstractDrafter, Llama, ModelDrafter, PromptLookup, generate
from energy_attn.prefix_tree import PrefixTree, tree_decode
from tests.support.tries import pack_by_tries

from .runner import JAX_NN, OURS, Case, Output, Sides

PYTHON, DECODE = "plain Python", "our decode step"
PLAIN, MODEL = "a token at a time", "drafts by a smaller model"
DRAFT = Path(__file__).parent / "draft"  # examples/byte_llama trains it


def _pack(dtype: str, B: int, M: int, C: int) -> Sides:
    # few different tokens at first and many behind, as in drafts
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 2 + 4**level, (B, M)) for level in range(C)]
    beam = jnp.asarray(np.stack(tokens, -1), dtype)
    return {
        OURS: lambda: functools.partial(jax.jit(PrefixTree.from_beam), beam),
        PYTHON: lambda: functools.partial(pack_by_tries, beam),
    }


def _verify(dtype: str, L: int, S: int, N: int, K: int, H: int) -> Sides:
    """Verification of drafts, compared with a decode step of as many queries."""
    sizes = (L, N), (L, K), (L, K), (S, K), (S, K)
    draws = jax.random.split(jax.random.key(0), len(sizes))
    query, key, value, old_key, old_value = (
        jax.random.normal(draw, (1, *size, H), dtype)
        for draw, size in zip(draws, sizes, strict=True)
    )
    # eight paths without a common node, so that all nodes are used
    tree = PrefixTree.from_beam(jnp.arange(L, dtype=jnp.int32).reshape(1, 8, L // 8))
    cache = KVCache.empty(1, S, K, H, dtype=dtype).append(old_key, old_value)

    def dense(query: Array, key: Array, value: Array, tree: PrefixTree, cache: KVCache) -> Array:
        present = (cache.positions >= 0)[:, None, None]
        context = jnp.broadcast_to(present, (1, 1, L, cache.capacity))
        all_keys = (jnp.concatenate(x, 1) for x in ((cache.key, key), (cache.value, value)))
        mask = jnp.concatenate((context, tree.mask[:, None]), -1)
        return jax.nn.dot_product_attention(query, *all_keys, mask=mask)

    def verify(query: Array, key: Array, value: Array, tree: PrefixTree, cache: KVCache) -> Array:
        return tree_decode(query, key, value, tree=tree, cache=cache).out

    def decode(query: Array, cache: KVCache) -> Array:
        return cache.attend(query, is_causal=False).out

    args = query, key, value, tree, cache
    return {
        OURS: lambda: functools.partial(jax.jit(verify), *args),
        JAX_NN: lambda: functools.partial(jax.jit(dense), *args),
        DECODE: lambda: functools.partial(jax.jit(decode), query, cache),
    }


class Models(NamedTuple):
    """The library's model of bytes, a smaller one to draft with, and held-out text."""

    model: Llama
    small: Llama
    text: np.ndarray


@functools.cache
def read_models() -> Models:
    """Loads both models and the text; raises `FileNotFoundError` if Python has no sources."""
    return Models(byte_llama(), Llama.load(DRAFT, progress=False), held_out_text())


def _generate(dtype: str, B: int, T: int, new: int, devices: int) -> Sides:
    """Greedy continuations of passages of a text, by a sharded cache; ours looks up drafts in the text."""
    models = read_models()
    index = np.arange(B)[:, None] * ((len(models.text) - T) // B) + np.arange(T)
    tokens = jnp.asarray(models.text[index], jnp.int32)
    mesh = make_mesh((devices,), ("device",), devices=jax.devices()[:devices])
    parallel = SequenceParallel("device") if devices > 1 else None

    def run(drafter: AbstractDrafter | None) -> Output:
        with jax.set_mesh(mesh):  # the same number of tokens for each
            options = {"drafter": drafter, "parallel": parallel, "eos_token_id": ()}
            generation = generate(models.model, tokens, new, **options)
        gains = ("tokens_per_pass", "acceptance_rate")
        return Output(
            generation.tokens, {x: round(float(getattr(generation, x)), 3) for x in gains}
        )

    drafters = {
        OURS: PromptLookup(ngram=4, candidates=1, length=4),
        PLAIN: None,
        MODEL: ModelDrafter(models.small, length=2, nodes=4),
    }
    return {
        name: lambda drafter=drafter: functools.partial(run, drafter)
        for name, drafter in drafters.items()
    }


CASES = (
    *(Case("pack", "int32", {"B": 8, "M": rows, "C": 8}, _pack) for rows in (16, 32, 64)),
    Case("verify", "float32", {"L": 64, "S": 65536, "N": 8, "K": 2, "H": 64}, _verify),
    *(
        Case(
            "generate", "float32", {"B": rows, "T": 384, "new": 128, "devices": devices}, _generate
        )
        for rows, devices in ((1, 1), (4, 1), (1, 8))
    ),
)
