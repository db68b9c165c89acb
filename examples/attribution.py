"""Finds which of sixteen documents a model answers from, by derivatives and by leaving each out.

Writes the numbers of docs/attribution.md:

    python examples/attribution.py --out docs/attribution/report.json
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import energy_attn as ea
from energy_attn.cli.demo import byte_llama
from energy_attn.distributed import SequenceParallel, make_mesh

DOCUMENTS, QUESTIONS = 16, 32
LENGTHS = (32768, 65536, 131072)
WORDS = (
    "action buffer client config device filter folder format header kernel length matrix module number object "
    "option parser record result search server signal source stream string symbol target thread update vector "
    "window worker"
).split()
SIZE = 6  # bytes of a word, which is the answer
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)


def text_of(seed: int) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Bytes, the document of each (-1: the question), where the answer begins, and the document that has it.

    Each document is a method with a random name that calls a random word; the question repeats one of the names, and
    the answer is its word.
    """
    rng = np.random.default_rng(seed)
    names = [rng.choice(LETTERS, 6).tobytes().decode() for _ in range(DOCUMENTS)]
    words = list(rng.choice(WORDS, DOCUMENTS, replace=False))
    documents = [
        f"    def set_{name}(self):\n        return self.{name}.{word}()\n\n"
        for name, word in zip(names, words, strict=True)
    ]
    chosen = int(rng.integers(DOCUMENTS))
    question = f"    def reset(self):\n        return self.{names[chosen]}."
    text = "".join([*documents, question, words[chosen]])
    number = np.full(len(text), -1)
    sizes = [len(x) for x in documents]
    number[: sum(sizes)] = np.repeat(np.arange(DOCUMENTS), sizes)
    return np.frombuffer(text.encode(), np.uint8), number, len(text) - SIZE, chosen


def log_probability(model: Any, tokens: Array, start: Array, **options: Any) -> Array:
    """Log-probability of the bytes from `start` on, given the bytes before."""
    logits = model(tokens[None, :-1], **options).logits[0]
    each = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], 1)[:, 0]
    return jnp.where(jnp.arange(1, len(tokens)) >= start, each, 0.0).sum()


def removals(model: Any, numbers: Array, tokens: Array, start: Array) -> Array:
    """Loss of log-probability when a document is hidden; one run per document."""
    at = ea.weigh(log_probability)
    hidden = jnp.where(jnp.eye(DOCUMENTS, dtype=bool), -jnp.inf, 0.0)
    whole = log_probability(model, tokens, start)
    return whole - jax.lax.map(lambda w: at(w, numbers, model, tokens, start), hidden)


def effects(model: Any, numbers: Array, tokens: Array, start: Array) -> dict[str, Array]:
    """Effects of the documents, `[documents]`, by each way, and the gap of the path."""
    zeros, rest = jnp.zeros(DOCUMENTS), (numbers, model, tokens, start)
    attribution = ea.attribute(log_probability)(zeros, *rest)
    return {
        "gradient": jax.grad(ea.weigh(log_probability))(zeros, *rest),
        "path": attribution.effects,
        "removals": removals(model, numbers, tokens, start),
        "change": attribution.change,
        "gap": attribution.gap,
        "points": attribution.points,
    }


def measure(model: Any) -> dict[str, Any]:
    """Compares the ways on all questions."""
    questions = [text_of(seed) for seed in range(QUESTIONS)]
    longest = max(len(x[0]) for x in questions)
    compiled, results, rates = jax.jit(effects), [], []
    for text, number, start, _ in questions:
        # behind the answer, where nothing before it sees it
        tokens = jnp.asarray(np.pad(text, (0, longest - len(text))), jnp.int32)
        numbers = jnp.asarray(np.pad(number, (0, longest - len(text)), constant_values=-1))[:-1]
        rates.append(np.exp(float(_answer(model, tokens, start, len(text))) / SIZE))
        results.append(jax.device_get(compiled(model, numbers, tokens, jnp.asarray(start))))
    right = np.asarray([x[3] for x in questions])
    ways = "gradient", "path", "removals"
    return {
        "bytes": longest,
        "probability_of_a_byte": float(np.median(rates)),
        "named": {
            way: int((np.argmax([x[way] for x in results], 1) == right).sum()) for way in ways
        },
        "correlation": {
            way: [round(float(np.corrcoef(x[way], x["removals"])[0, 1]), 3) for x in results]
            for way in ways[:2]
        },
        "effect_of_all": [round(float(x["change"]), 2) for x in results],
        "gap": [round(float(x["gap"]), 3) for x in results],
        "points": [int(x["points"]) for x in results],
        "first": {way: [round(float(y), 3) for y in results[0][way]] for way in ways}
        | {"right": int(right[0])},
    }


def _answer(model: Any, tokens: Array, start: int, length: int) -> Array:
    return log_probability(model, tokens[:length], jnp.asarray(start))


def memory(model: Any) -> dict[str, float]:
    """MiB of temporary memory on each of eight devices for the gradient of long contexts; compiled, not run."""
    parallel = SequenceParallel("device")

    def gradient(weights: Array, numbers: Array, tokens: Array, start: Array) -> Array:
        return jax.grad(ea.weigh(log_probability))(
            weights, numbers, model, tokens, start, parallel=parallel
        )

    mebibytes = {}
    with jax.set_mesh(make_mesh((8,), ("device",))):
        for length in LENGTHS:
            shapes = [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((length,), (length + 1,), ())]
            weights = jax.ShapeDtypeStruct((DOCUMENTS,), jnp.float32)
            program = jax.jit(gradient).lower(weights, *shapes).compile()
            mebibytes[str(length)] = round(program.memory_analysis().temp_size_in_bytes / 2**20, 1)
    return mebibytes


def processor() -> str:
    """The name of the processor, where the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return names[0] if names else platform.machine()


def report() -> dict[str, Any]:
    """All numbers of the page, and the machine."""
    model = byte_llama()
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "jax": jax.__version__,
        "documents": DOCUMENTS,
        "questions": QUESTIONS,
        **measure(model),
        "mebibytes_on_each_of_8_devices": memory(model),
    }


def main(description: str | None, report: Callable[[], dict[str, Any]]) -> None:
    """Measures, prints, and writes to the path behind `--out`, a line for each entry."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=None)
    out = parser.parse_args().out
    lines = [f"  {json.dumps(name)}: {json.dumps(x)}" for name, x in report().items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    print(text)
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    main(__doc__, report)
