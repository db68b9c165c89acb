"""The instructions that libtpu makes of the canonical kernel; a program of its own, since libtpu reads its flags once.

    python -m tests.support.tpu_tiles CHIP ...

Prints for each chip, and for each of some calls of other lengths and batches, how often each instruction of vectors of
floating-point numbers is in each kernel.
"""

import collections
import functools
import json
import re
import sys
from pathlib import Path

import jax

from energy_attn.kernels import AttentionState, local_attention
from energy_attn.kernels.pallas.canonical._kernel import CanonicalTPU
from tests.support.tpu import compiled
from tests.support.tpu_schedule import with_listings

CALLS = (2, 1000, 1000), (1, 1, 7777), (1, 3000, 400)  # batch, queries, keys
INSTRUCTION = re.compile(
    r"\b(v[a-z0-9]+\.[a-z0-9.]*(?:f32|bf16)[a-z0-9.]*|vmat\w+[.\w]*|vpop\.erf)\b"
)
KERNEL = re.compile(r"attention_canonical_(\w+?)\.\d+-")


def derivatives(query, key, value):
    """The state of causal attention, its gradients and a tangent."""
    run = functools.partial(local_attention, is_causal=True, implementation=CanonicalTPU())
    state, back = jax.vjp(run, query, key, value)
    moved = jax.jvp(run, (query, key, value), (query, key, value))
    return state, back(AttentionState(state.out, state.lse)), moved


def instructions(chip: str, folder: Path) -> list[dict[str, dict[str, int]]]:
    """Those of the kernels of each call, by name."""
    found = []
    for batch, queries, keys in CALLS:
        shapes = [("bfloat16", batch, n, k, 128) for n, k in ((queries, 4), (keys, 2), (keys, 2))]
        compiled(chip, derivatives, *shapes, kernels=4)
        listings = [x for x in folder.glob("*final_bundles.txt") if "analysis" not in x.name]
        found.append(
            {
                KERNEL.search(x.name)[1]: collections.Counter(INSTRUCTION.findall(x.read_text()))
                for x in listings
                if KERNEL.search(x.name)
            }
        )
        for path in folder.iterdir():
            path.unlink()
    return found


if __name__ == "__main__":
    print(
        json.dumps(with_listings(lambda folder: {x: instructions(x, folder) for x in sys.argv[1:]}))
    )
