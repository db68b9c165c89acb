"""Benchmarks of prefill and generation with the small Llama, compared with transformers."""

import importlib
import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from energy_attn.cli.demo import byte_llama, held_out_text
from energy_attn.models import DecoderCache, Llama

from .runner import OURS, Case, Run, Sides, torch

TRANSFORMERS = "transformers"


def _prefill(dtype: str, S: int) -> Sides:
    """The logits after a prompt; ours returns the cache as well."""
    model, tokens = byte_llama(), held_out_text()[None, :S]

    @jax.jit
    def read(model: Llama, tokens: Array) -> tuple[Array, Any]:
        out = model.prefill(tokens, model.empty_cache(1, S))
        return out.logits, out.cache

    def ours() -> Run:
        inputs = jnp.asarray(tokens, jnp.int32)
        return lambda: read(model, inputs)[0]

    def peer_run() -> Run:
        peer, inputs = peer_of(model), torch().from_numpy(tokens.astype(np.int64))
        return inference(lambda: peer(inputs, use_cache=True, logits_to_keep=1).logits)

    return {OURS: ours, TRANSFORMERS: peer_run}


def _decode(dtype: str, S: int, new: int) -> Sides:
    """The loop of greedy generation after a prompt and its first token.

    Ours is one program; transformers' model is in a bare loop, which is less work than its own `generate`.
    """
    model, tokens = byte_llama(), held_out_text()[None, :S]

    @jax.jit
    def write(model: Llama, first: Array, cache: DecoderCache) -> Array:
        def step(carry: tuple[Array, DecoderCache], _: None) -> tuple[Any, Array]:
            token, cache = carry
            out = model(token, cache=cache)
            token = out.logits.argmax(-1).astype(jnp.int32)
            return (token, out.cache), token[0, 0]

        return jax.lax.scan(step, (first, cache), None, length=new - 1)[1][None]

    def ours() -> Run:
        out = model.prefill(jnp.asarray(tokens, jnp.int32), model.empty_cache(1, S + new))
        first = out.logits.argmax(-1).astype(jnp.int32).reshape(1, 1)
        return lambda: write(model, first, out.cache)

    def peer_run() -> Run:
        peer, inputs = peer_of(model), torch().from_numpy(tokens.astype(np.int64))
        with torch().inference_mode():
            read = peer(inputs, use_cache=True, logits_to_keep=1)
        # newer versions of transformers call it `cache`, and warn of the other name
        named = "cache" in inspect.signature(peer.forward).parameters
        name = "cache" if named else "past_key_values"
        first, cache = read.logits.argmax(-1), read[name]

        def run() -> Any:
            token, written = first, []
            for _ in range(new - 1):
                token = peer(token, use_cache=True, **{name: cache}).logits.argmax(-1)
                written.append(token)
            cache.crop(1 - new)  # back to the prompt
            return torch().cat(written, 1).int()

        return inference(run)

    return {OURS: ours, TRANSFORMERS: peer_run}


def peer_of(model: Llama) -> Any:
    """Loads the model's weights into transformers."""
    peer = importlib.import_module(TRANSFORMERS)
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        return peer.LlamaForCausalLM.from_pretrained(folder, dtype=torch().float32).eval()


def inference(run: Callable[[], Any]) -> Run:
    """Runs without gradients and returns a JAX array."""

    def inside() -> Array:
        with torch().inference_mode():
            return jnp.asarray(run().numpy())

    return inside


CASES = (
    Case("llama prefill", "float32", {"S": 4096}, _prefill),
    Case("llama decode", "float32", {"S": 4096, "new": 128}, _decode),
)
