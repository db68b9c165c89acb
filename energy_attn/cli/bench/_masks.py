"""Attention under masks of which few blocks are alive, beside attention to all keys."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import energy_attn
from energy_attn import masks

from ._cases import ONE_PASS, OURS, Run

BLOCK = 512
CAUSAL = "our causal attention"


def _chosen(query: Array, key: Array, blocks: Array, size: Array) -> Array:
    row = blocks[query // size]
    return (row[..., 0] == key // size) | (row[..., 1] == key // size)


def given_blocks(length: int, share: float = 0.1) -> masks.AbstractMask:
    """Each block of queries sees its own keys, and some see another: so many of all blocks are alive."""
    size = min(BLOCK, length)
    count = -(-length // size)
    blocks = np.tile(np.arange(count, dtype=np.int32)[:, None], (1, 2))
    more = np.linspace(0, count, max(round(share * count**2) - count, 0), endpoint=False)
    for row in more.astype(int):
        blocks[row, 1] = (row + count // 2) % count
    return masks.Function(_chosen, blocks, size)


def _table(rule: masks.AbstractMask, length: int) -> masks.AbstractMask:
    return masks.tabulate(rule, length, block=min(BLOCK, length))


def _documents(length: int) -> masks.AbstractMask:
    return masks.Segments(np.arange(length, dtype=np.int32) * 10 // length)


def _longformer(length: int) -> masks.AbstractMask:
    near, shared = length // 32, max(length // 256, 1)
    return masks.Window(near, near) | masks.Prefix(shared) | masks.Lengths(length, shared)


# The rule for a length of each case, and whether it is measured beside causal attention.
RULES: dict[str, tuple[Callable[[int], masks.AbstractMask], bool]] = {
    "10% of the blocks, from a table": (lambda n: _table(given_blocks(n), n), False),
    "10% of the blocks, by a function": (given_blocks, False),
    "ten documents": (_documents, False),
    "window and global tokens": (lambda n: _table(_longformer(n), n), False),
    "prefix-LM": (lambda n: masks.Causal() | masks.Prefix(n // 16), True),
}


class MaskCase(NamedTuple):
    """A rule, beside the same call without it; with the gradients if told."""

    rule: str
    length: int
    backward: bool = False

    @property
    def name(self) -> str:
        """The rule, and whether there are gradients."""
        return self.rule + (", forward + backward" if self.backward else "")

    @property
    def sizes(self) -> str:
        """The lengths, in short."""
        return f"T={self.length}, S={self.length}"

    def about(self) -> dict[str, Any]:
        """The fields of the case in the results."""
        shape = {"batch": 1, "length": self.length, "heads": 4, "width": 64, "block": BLOCK}
        return {"dtype": "float32", "shape": shape}

    def shrunk(self, by: int) -> "MaskCase":
        """The case with sequences `by` times shorter."""
        return self._replace(length=max(self.length // by, 16))

    def sides(self, platform: str) -> tuple[dict[str, Run], dict[str, str]]:
        """Attention under the rule, and without it."""
        keys = jax.random.split(jax.random.key(0), 3)
        arrays = [jax.random.normal(key, (1, self.length, 4, 64)) for key in keys]
        make, causal = RULES[self.rule]

        def loss(rule: masks.AbstractMask, *arrays: Array) -> Array:
            return (energy_attn.attention(*arrays, mask=rule) ** 2).sum()

        def attend(rule: masks.AbstractMask, *arrays: Array) -> Array:
            return energy_attn.attention(*arrays, mask=rule)

        job = jax.jit(jax.grad(loss, (1, 2, 3)) if self.backward else attend)
        arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
        full = masks.Causal() if causal else masks.All()
        return {
            OURS: functools.partial(job, make(self.length), *arrays),
            CAUSAL if causal else ONE_PASS: functools.partial(job, full, *arrays),
        }, {}


MASKS = (
    *(MaskCase(rule, 8192) for rule in RULES),
    MaskCase("10% of the blocks, from a table", 8192, backward=True),
    MaskCase("prefix-LM", 8192, backward=True),
)
