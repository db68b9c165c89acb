"""Trains the byte-level Llama that comes with the library, on the sources of Python's standard library.

Writes a checkpoint in Hugging Face's format, config.json and model.safetensors, and a curve: loss and attention on
held-out text during the training. It takes about an hour on two cores. The model of the library was made by

    python examples/byte_llama/train.py --out energy_attn/cli/demo/model --curve examples/byte_llama/curves/model.json

the smaller one that the benchmark of generation drafts with by

    python examples/byte_llama/train.py --draft --short --steps 2000 --seed 1 --out benchmarks/draft

and the other curves, for NAME none, z-loss and entropy, by

    python examples/byte_llama/train.py --steps 600 --short --every 20 --penalty NAME --out /tmp/NAME \\
        --curve examples/byte_llama/curves/NAME.json
"""

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from library import standard_library
from training import (
    CONFIG,
    DRAFT,
    PENALTIES,
    SHORT,
    STAGES,
    WINDOW,
    Observed,
    observe,
    stored,
    surprise,
    train,
)

from energy_attn.models import Llama

PIECES = 8  # of held-out text, to observe the model on
SAVED = 500  # steps between checkpoints


def pieces(text: np.ndarray, count: int, size: int) -> jax.Array:
    """Pieces `[count, size + 1]` of a text, at equal distances."""
    starts = np.linspace(0, len(text) - size - 1, count).astype(int)
    return jnp.asarray(text[starts[:, None] + np.arange(size + 1)], jnp.int32)


def held_out(model: Llama, text: np.ndarray, size: int) -> float:
    """The loss over a text read in pieces of `size` bytes, in nats a byte."""
    losses = jax.jit(surprise)
    nats = [losses(model, piece[None]) for piece in pieces(text, len(text) // size, size)]
    return float(jnp.concatenate(nats).mean())


def main(arguments: list[str] | None = None) -> int:
    """Trains and writes; returns 0, or 2 for a wrong option."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--steps", type=int, default=5200, help="of training (%(default)s)")
    add("--penalty", choices=tuple(PENALTIES), default="none", help="added to the loss")
    add("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    add("--draft", action="store_true", help="train the smaller model of the benchmark")
    add("--short", action="store_true", help=f"read pieces of {WINDOW} bytes to the end")
    add("--every", type=int, default=100, help="steps between points of the curve (%(default)s)")
    add("--out", type=Path, required=True, help="folder for the model")
    add("--curve", type=Path, help="file for the curve (curve.json in that folder)")
    args = parser.parse_args(arguments)
    if args.steps < 1 or args.every < 1:
        print("train.py: --steps and --every want numbers of at least 1", file=sys.stderr)
        return 2
    text = standard_library()
    watched = pieces(text.held_out, PIECES, WINDOW)
    points: list[list[float]] = []
    began = time.perf_counter()

    def after(step: int, model: Llama) -> None:
        if step % args.every == 0 or step == 1:
            points.append([step, *(float(f"{x:.4g}") for x in observe(model, watched))])
            shown = "  ".join(
                f"{name} {x:.3f}" for name, x in zip(Observed._fields, points[-1][1:], strict=True)
            )
            print(f"step {step:5}  {time.perf_counter() - began:5.0f} s  {shown}", flush=True)
        if step % SAVED == 0:
            stored(model).save(args.out)

    stages = SHORT if args.short else STAGES
    training = train(
        text.train,
        args.seed,
        args.steps,
        config=DRAFT if args.draft else CONFIG,
        penalty=args.penalty,
        stages=stages,
        after=after,
    )
    stored(training.model).save(args.out)
    sizes = WINDOW, CONFIG.max_position_embeddings
    losses = {str(size): round(held_out(training.model, text.held_out, size), 4) for size in sizes}
    result = {
        "penalty": args.penalty,
        "steps": args.steps,
        "seed": args.seed,
        "python": sys.version.split()[0],
        "seconds": round(training.seconds),
        "held_out": losses,
        "columns": ["step", *Observed._fields],
        "curve": points,
    }
    curve = args.curve or args.out / "curve.json"
    curve.write_text(json.dumps(result) + "\n")
    print(f"nats per held-out byte, by the number of bytes read at once: {losses}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
