"""The library's small Llama as a whole: prefill and generation, beside transformers."""

import functools
import importlib
import importlib.util
import inspect
import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ...models import Llama
from ...models.generation._loop import Sampling, begin
from ...models.generation._loop import run as write
from .._byte_llama import byte_llama, held_out_text
from ._cases import OURS, Run, torch

TRANSFORMERS = "transformers"


class Pass(NamedTuple):
    """One comparison: reading a prompt, or greedy generation behind it.

    Attributes:
        name: the job.
        prompt: number of bytes to read.
        new: number of bytes to generate; 0 where reading is timed.
    """

    name: str
    prompt: int
    new: int
    dtype: str = "float32"

    @property
    def sizes(self) -> str:
        """The sizes, in short."""
        return f"S={self.prompt}" + (f", new={self.new}" if self.new else "")

    def about(self) -> dict[str, Any]:
        """The fields of the case in the results."""
        sizes = {"prompt": self.prompt, "new": self.new}
        return {"dtype": self.dtype, "shape": sizes, "weights": "the library's model of bytes"}

    def shrunk(self, by: int) -> "Pass":
        """The case with a shorter prompt."""
        return self._replace(prompt=max(self.prompt // by, 1))

    def sides(self, platform: str) -> tuple[dict[str, Run], dict[str, str]]:
        """Our job and transformers', on a CPU, ready to run; and the reason where the latter is absent.

        Raises `FileNotFoundError` where Python comes without its sources.
        """
        del platform
        model, text = byte_llama(), held_out_text()
        tokens = np.asarray(text[None, : self.prompt], np.int32)
        found = {OURS: (_writing if self.new else _reading)(model, tokens, self.new)}
        if torch() is None or importlib.util.find_spec(TRANSFORMERS) is None:
            return found, {TRANSFORMERS: "not installed, or PyTorch is not"}
        peer = _peer_writing if self.new else _peer_reading
        return found | {TRANSFORMERS: peer(_peer(model), tokens, self.new)}, {}


def _reading(model: Llama, tokens: np.ndarray, new: int) -> Run:
    """The logits behind a prompt; the program returns the cache as well."""
    del new

    @jax.jit
    def read(model: Llama, tokens: Array) -> tuple[Array, Any]:
        out = model.prefill(tokens, model.empty_cache(1, tokens.shape[1]))
        return out.logits, out.cache

    given = jnp.asarray(tokens)
    return lambda: read(model, given)[0]


def _writing(model: Llama, tokens: np.ndarray, new: int) -> Run:
    """The loop of `generate` behind the first token, on a copy of its initial state."""
    cache = model.empty_cache(1, tokens.shape[1] + new)
    lengths, stop = jnp.full(1, tokens.shape[1], jnp.int32), jnp.zeros(0, jnp.int32)
    prompt = jnp.asarray(tokens)
    loop = begin(model, None, prompt, lengths, cache, Sampling(), stop, None, new, 1024)
    copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))

    def run() -> Array:
        ended = write(model, None, Sampling(), stop, None, copy(loop))
        return ended.text[:, tokens.shape[1] + 1 :]

    return run


def _peer(model: Llama) -> Any:
    """The same weights as a model of transformers."""
    peer, torch_ = importlib.import_module(TRANSFORMERS), torch()
    torch_.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        return peer.LlamaForCausalLM.from_pretrained(folder, dtype=torch_.float32).eval()


def _inference(run: Callable[[], Any]) -> Run:
    """Runs without gradients and returns a JAX array."""

    def inside() -> Array:
        with torch().inference_mode():
            return jnp.asarray(run().numpy())

    return inside


def _peer_reading(peer: Callable[..., Any], tokens: np.ndarray, new: int) -> Run:
    del new
    given = torch().from_numpy(tokens.astype(np.int64))
    return _inference(lambda: peer(given, use_cache=True, logits_to_keep=1).logits)


def _peer_writing(peer: Any, tokens: np.ndarray, new: int) -> Run:
    """The bare loop around the model, which is less work than transformers' own `generate`."""
    given = torch().from_numpy(tokens.astype(np.int64))
    with torch().inference_mode():
        read = peer(given, use_cache=True, logits_to_keep=1)
    # transformers 5.24 calls it `cache`, and warns of the other name
    name = "cache" if "cache" in inspect.signature(peer.forward).parameters else "past_key_values"
    first, cache = read.logits.argmax(-1), read[name]

    def run() -> Any:
        token, written = first, []
        for _ in range(new - 1):
            out = peer(token, use_cache=True, **{name: cache})
            token = out.logits.argmax(-1)
            written.append(token)
        cache.crop(1 - new)  # back to the prompt
        return torch().cat(written, 1).int()

    return _inference(run)


PASSES = (Pass("llama prefill", 4096, 0), Pass("llama decode", 4096, 128))
