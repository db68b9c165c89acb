"""Benchmarks of a queue of prompts that complete Python lines, compared with batches and transformers."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from energy_attn.models import generate

from . import llama
from .runner import OURS, Case, Output, Run, Sides, torch

ALONE, BATCHES = "one by one", "batches"
PEER_ALONE, PEER_BATCHES = "transformers, one by one", "transformers, batches"
END = ord("\n")
CHUNK = 64  # of a prompt, read at a time


def _queue(dtype: str, P: int, B: int, T: int, new: int) -> Sides:
    """Greedy ends of lines after `P` pieces of a text, of 8 to `T` bytes; the queue has `B` rows."""
    model, text = llama.byte_llama(), llama.held_out_text()
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(8), np.log(T), P)).astype(int)
    starts = rng.integers(0, len(text) - T, P)
    prompts = [text[i : i + n].tolist() for i, n in zip(starts, lengths, strict=True)]
    padded = jnp.asarray(text[starts[:, None] + np.arange(lengths.max())], jnp.int32)
    sizes = jnp.asarray(lengths, jnp.int32)
    options: dict[str, Any] = {"eos_token_id": END, "chunk_size": CHUNK}

    def queue(rows: int) -> Output:
        generation = generate(model, prompts, new, batch_size=rows, **options)
        return Output(generation.tokens, {"tokens": int(generation.lengths.sum())})

    def batches() -> Output:
        parts = [(padded[i : i + B], sizes[i : i + B]) for i in range(0, P, B)]  # of one shape
        results = [generate(model, part, new, lengths=n, **options).tokens for part, n in parts]
        tokens = jnp.concatenate(results)
        return Output(tokens, {"tokens": int((tokens >= 0).sum())})

    def peer(rows: int) -> Run:
        other = llama.peer_of(model)

        def run() -> Any:
            parts = [prompts[i : i + rows] for i in range(0, P, rows)]
            return torch().cat([_continued(other, part, new) for part in parts])

        inside = llama.inference(run)

        def counted() -> Output:
            tokens = inside()
            return Output(tokens, {"tokens": int((tokens >= 0).sum())})

        return counted

    return {
        OURS: lambda: functools.partial(queue, B),
        ALONE: lambda: functools.partial(queue, 1),
        BATCHES: lambda: batches,
        PEER_ALONE: lambda: peer(1),
        PEER_BATCHES: lambda: peer(B),
    }


def _continued(model: Any, prompts: Sequence[Sequence[int]], new: int) -> Any:
    """The new tokens of a model of transformers, `[B, new]`; -1 behind the end of each row."""
    longest = max(map(len, prompts))
    tokens, mask = torch().zeros((2, len(prompts), longest), dtype=torch().int64)
    for row, prompt in enumerate(prompts):  # padded in front, as transformers wants it
        tokens[row, longest - len(prompt) :] = torch().tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": END, "pad_token_id": 0}
    new_tokens = model.generate(tokens, attention_mask=mask, **options)[:, longest:]
    new_tokens = torch().nn.functional.pad(new_tokens, (0, new - new_tokens.shape[1]))
    ended = (new_tokens == END).cumsum(1) - (new_tokens == END).long() > 0
    return new_tokens.masked_fill(ended, -1).int()


CASES = tuple(
    Case("queue", "float32", {"P": 32, "B": rows, "T": longest, "new": 96}, _queue, long="PT")
    for longest in (64, 512)
    for rows in (4, 16)
)
