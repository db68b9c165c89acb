"""Benchmarks of block-sparse masks, compared with full and causal attention."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

import energy_attn
from energy_attn import masks

from .attention import arrays, gradient
from .runner import ONE_PASS, OURS, Case, Run, Sides

BLOCK = 512
CAUSAL = "our causal attention"
MaskOf = Callable[[int], masks.AbstractMask]  # for a length


def _chosen(query: Array, key: Array, blocks: Array, size: Array) -> Array:
    row = blocks[query // size]
    return (row[..., 0] == key // size) | (row[..., 1] == key // size)


def given_blocks(length: int, share: float = 0.1) -> masks.AbstractMask:
    """A mask in which `share` of all blocks are visible: each block sees itself, and some see another."""
    size = min(BLOCK, length)
    count = -(-length // size)
    blocks = np.tile(np.arange(count, dtype=np.int32)[:, None], (1, 2))
    more = np.linspace(0, count, max(round(share * count**2) - count, 0), endpoint=False)
    for row in more.astype(int):
        blocks[row, 1] = (row + count // 2) % count
    return masks.Function(_chosen, blocks, size)


def _table(mask: MaskOf) -> MaskOf:
    return lambda length: masks.tabulate(mask(length), length, block=min(BLOCK, length))


def _longformer(length: int) -> masks.AbstractMask:
    near, shared = length // 32, max(length // 256, 1)
    return masks.Window(near, near) | masks.Prefix(shared) | masks.Lengths(length, queries=shared)


def _case(name: str, make: MaskOf, causal: bool = False, backward: bool = False) -> Case:
    def sides(T: int, **sizes: Any) -> Sides:
        query, key, value = arrays(T=T, **sizes)

        def attend(mask: masks.AbstractMask, *x: Array) -> Array:
            out = functools.partial(energy_attn.attention, mask=mask)
            return (gradient(out) if backward else out)(*x)

        def run(mask: masks.AbstractMask) -> Run:
            return functools.partial(jax.jit(attend), mask, query, key, value)

        full = masks.Causal() if causal else masks.All()
        return {
            OURS: lambda: run(make(T)),
            CAUSAL if causal else ONE_PASS: lambda: run(full),
        }

    name += ", forward + backward" if backward else ""
    return Case(name, "float32", {"B": 1, "T": 8192, "S": 8192, "N": 4, "K": 4, "H": 64}, sides)


def _prefix(length: int) -> masks.AbstractMask:
    return masks.Causal() | masks.Prefix(length // 16)


CASES = (
    _case("10% of the blocks, from a table", _table(given_blocks)),
    _case("10% of the blocks, by a function", given_blocks),
    _case("ten documents", lambda n: masks.Segments(np.arange(n, dtype=np.int32) * 10 // n)),
    _case("window and global tokens", _table(_longformer)),
    _case("prefix-LM", _prefix, causal=True),
    _case("10% of the blocks, from a table", _table(given_blocks), backward=True),
    _case("prefix-LM", _prefix, causal=True, backward=True),
)
