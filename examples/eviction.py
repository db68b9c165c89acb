"""Compares caches that keep their most important tokens with caches that keep the newest.

Losses are those of the next bytes of a text, and of the answers to attribution.py's questions about documents.

Writes the numbers of docs/eviction.md:

    python examples/eviction.py --out docs/eviction/report.json
"""

import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import energy_attn as ea
from energy_attn.cli.demo import byte_llama, held_out_text
from energy_attn.models import DecoderCache, Llama

sys.path.insert(0, str(Path(__file__).parent))
from attribution import SIZE, main, text_of

CONTEXT, AFTER, PIECES, QUESTIONS = 2048, 128, 24, 32
KEPT = (1024, 512, 256, 128, 64)
# The newest tokens, which stay in every cache; the last queries, by which tokens are important; the first tokens.
NEWEST, QUERIES, FIRST = 16, 64, 4


def pieces() -> Array:
    """Pieces of text that the model was not trained on, `[PIECES, CONTEXT + AFTER + 1]`."""
    text = held_out_text()
    size = CONTEXT + AFTER + 1
    starts = np.linspace(0, len(text) - size, PIECES).astype(int)
    return jnp.asarray(np.stack([text[x : x + size] for x in starts]), jnp.int32)


def questions() -> Array:
    """Sixteen documents, a question and its answer, which ends the text."""
    return jnp.asarray(np.stack([text_of(seed)[0] for seed in range(QUESTIONS)]), jnp.int32)


@eqx.filter_jit
def read(model: Llama, context: Array, after: int) -> tuple[DecoderCache, list[Array], list[Array]]:
    """A cache of the context; and for each layer how much all queries read a key, and how much the last ones did."""
    size = context.shape[1]

    def last(F: ea.Gibbs) -> Array:
        rows = jnp.where(jnp.arange(size) >= size - QUERIES, 1.0, 0.0)
        return F.importance(jnp.broadcast_to(rows[:, None], F().shape), grouped=True)

    prefill = ea.record(
        lambda cache: model.prefill(context, cache, chunk_size=size).cache,
        every=lambda F: F.importance(grouped=True),
        last=last,
    )
    cache, recorded = prefill(model.empty_cache(batch=len(context), slots=size + after))
    # the first axis is that of the chunks
    return cache, *([x[name].sum(0) for x in recorded.values()] for name in ("every", "last"))


@eqx.filter_jit
def loss(model: Llama, cache: DecoderCache, after: Array) -> Array:
    """Nats per byte of what follows the context and one more byte, over all pieces."""
    logits = model(after[:, :-1], cache=cache).logits
    each = jnp.take_along_axis(jax.nn.log_softmax(logits), after[:, 1:, None], 2)
    return -each.mean()


def shrunk(
    cache: DecoderCache, count: int, importance: list[Array] | None, newest: int
) -> DecoderCache:
    """The cache with `count` tokens less in each layer; the newest ones stay."""
    first = cache.layers[0]
    stays = (first.positions >= first.lengths[:, None] - newest)[..., None]
    layers = zip(cache.layers, importance or [None] * len(cache.layers), strict=True)
    return DecoderCache(
        tuple(
            x.evict(count, importance=None if y is None else jnp.where(stays, jnp.inf, y))
            for x, y in layers
        )
    )


def losses(model: Llama, tokens: Array, after: int) -> dict[str, list[float]]:
    """Losses of the last `after` bytes for each way and amount of keeping; the whole cache first."""
    size = tokens.shape[1] - after - 1
    cache, every, last = read(model, tokens[:, :size], after)
    slot = jnp.arange(cache.layers[0].capacity)
    by_age = jnp.where(slot < FIRST, jnp.inf, slot.astype(jnp.float32))[None, :, None]
    ways = {
        "newest": (None, False),
        f"first {FIRST} and newest": ([jnp.broadcast_to(by_age, x.shape) for x in every], False),
        "read by all": (every, False),
        f"read by the last {QUERIES}": (last, False),
        f"half newest, half read by the last {QUERIES}": (last, True),
    }

    def of(cache: DecoderCache) -> float:
        return round(float(loss(model, cache, tokens[:, size:])), 4)

    return {"whole": [of(cache)]} | {
        name: [
            of(shrunk(cache, size - kept, way, kept // 2 if halved else NEWEST)) for kept in KEPT
        ]
        for name, (way, halved) in ways.items()
    }


def measure(model: Llama) -> dict[str, Any]:
    """Losses on text and on questions."""
    texts = questions()
    return {
        "kept": list(KEPT),
        "text": {"pieces": PIECES, "context": CONTEXT, "bytes": AFTER},
        "questions": {"pieces": QUESTIONS, "context": texts.shape[1] - SIZE - 1, "bytes": SIZE},
        "losses on text": losses(model, pieces(), AFTER),
        "losses on questions": losses(model, texts, SIZE),
    }


if __name__ == "__main__":
    main(__doc__, lambda: measure(byte_llama()))
