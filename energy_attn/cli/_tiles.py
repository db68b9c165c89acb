"""Calls whose tiles are tuned, and the tiles to try: what the suites `tune` and `first-light` measure."""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from energy_attn.kernels import GPUPlan, GPUTiles, PallasGPU, local_attention
from energy_attn.kernels.internal import Kind

OURS = "as chosen"  # the tiles that the library has by itself
_TRIAL = 256  # what a trial divides lengths by
TOLERANCE = 0.05  # of the largest entry, between results of other tiles


class Call(NamedTuple):
    """Attention whose kernel is tuned, for all calls of its widths and number of rows.

    Attributes:
        kind: which kernel.
        queries, keys: the lengths.
        heads, kv_heads, width: as everywhere.
        candidates: sizes to try: rows, keys, warps, stages and, of each multiprocessor, programs.
    """

    kind: Kind
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    candidates: tuple[tuple[int, int, int, int, int], ...]

    @property
    def call_rows(self) -> int:
        """The class of its rows, as in `GPUTiles`."""
        rows = self.queries * self.heads // self.kv_heads
        return min(max(1 << (rows - 1).bit_length(), 16), 256)

    @property
    def label(self) -> str:
        """The kernel and the sizes, in one line."""
        rows = f"{self.call_rows} rows" if self.call_rows < 256 else "many rows"
        return f"{self.kind}, width {self.width}, {rows}"

    def tiles(self, cores: int) -> dict[str, GPUTiles]:
        """Its candidates on a GPU of so many multiprocessors, by names."""
        return {
            f"{rows} x {keys}, {warps} warps, {stages} stages, {each}": GPUTiles(
                self.kind, rows, keys, warps, stages, each * cores
            )
            for rows, keys, warps, stages, each in self.candidates
        }

    def arrays(self, dtype: str) -> list[Array]:
        """Random query, key and value."""
        sizes = (self.queries, self.heads), *[(self.keys, self.kv_heads)] * 2
        keys = jax.random.split(jax.random.key(0), 3)
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
        return [
            draw(key, (1, *size, self.width), jnp.dtype(dtype))
            for key, size in zip(keys, sizes, strict=True)
        ]


# Rows, keys, warps, stages, and the programs of each multiprocessor among which few tiles are divided.
_MANY: dict[Kind, tuple[tuple[int, int, int, int, int], ...]] = {
    "forward": (
        *((128, 128, 8, 2, 1), (128, 128, 8, 3, 1), (128, 128, 4, 3, 1), (128, 64, 8, 2, 1)),
        *((128, 64, 8, 3, 1), (128, 64, 8, 4, 1), (128, 64, 4, 3, 1), (64, 128, 4, 2, 1)),
        *((64, 128, 4, 3, 1), (64, 64, 4, 3, 1), (64, 64, 4, 4, 1), (256, 64, 8, 2, 1)),
    ),
    "query": (
        *((128, 64, 8, 2, 1), (128, 64, 8, 3, 1), (128, 64, 4, 3, 1), (128, 32, 8, 4, 1)),
        *((128, 128, 8, 2, 1), (64, 64, 4, 2, 1), (64, 64, 4, 3, 1), (64, 128, 4, 2, 1)),
    ),
    "key": (
        *((64, 128, 8, 2, 1), (64, 128, 8, 3, 1), (32, 128, 8, 3, 1), (32, 128, 8, 4, 1)),
        *((64, 64, 4, 2, 1), (64, 64, 4, 3, 1), (128, 64, 4, 2, 1), (32, 64, 4, 3, 1)),
    ),
    "tangent": (
        *((128, 64, 8, 2, 1), (128, 64, 8, 3, 1), (128, 32, 8, 3, 1), (64, 64, 4, 2, 1)),
        *((64, 64, 4, 3, 1), (64, 32, 4, 3, 1)),
    ),
}
_FEW = {
    16: (
        *((16, 32, 4, 4, 4), (16, 32, 2, 4, 4), (16, 32, 1, 4, 4), (16, 32, 4, 4, 2)),
        *((16, 32, 4, 3, 4), (16, 64, 4, 4, 2), (16, 64, 4, 3, 3), (16, 64, 2, 4, 2)),
        *((16, 128, 4, 4, 1), (16, 16, 1, 6, 4)),
    ),
    32: ((32, 32, 4, 4, 4), (32, 32, 4, 3, 4), (32, 64, 4, 3, 2), (32, 64, 4, 4, 2)),
    64: ((64, 64, 4, 3, 2), (64, 64, 4, 4, 1), (64, 32, 4, 4, 2), (64, 128, 4, 3, 1)),
    128: ((128, 64, 8, 4, 1), (128, 64, 8, 3, 1), (128, 128, 8, 3, 1), (128, 32, 8, 4, 2)),
}


def calls(shrink: int = 1) -> Iterator[Call]:
    """What is tuned: prefill and its derivatives, and decode with few rows, of the widths 64 and 128."""
    length, cached = (max(x // shrink, 16) for x in (8192, 65536))
    for width in (128, 64):
        heads = 2048 // width if shrink == 1 else 1
        for kind, found in _MANY.items():
            yield Call(kind, length, length, heads, heads, width, found)
    for rows, found in _FEW.items():
        yield Call("forward", 1, cached, rows * 8, 8, 128, found)


def trial_calls() -> list[Call]:
    """Each kernel once, of short sequences and by one candidate, of which the call has several tiles."""
    found = list(calls(_TRIAL))[: len(_MANY)]
    return [call._replace(candidates=((16, 16, 4, 2, 1),)) for call in found]


def cores_here() -> int:
    """The multiprocessors of the GPU at hand; those of an H100 where there is none."""
    return getattr(jax.devices()[0], "core_count", None) or 132


def program(call: Call, tiles: GPUTiles | None) -> Callable[..., PyTree]:
    """What runs a call by some tiles of one kernel, and by the library's own of the others."""
    kernel = PallasGPU(GPUPlan() if tiles is None else GPUPlan((tiles,)))
    causal = call.queries > 1
    attend = functools.partial(local_attention, is_causal=causal, implementation=kernel)

    def backward(*arrays: Array) -> PyTree:
        state, back = jax.vjp(attend, *arrays)
        return back(state)

    def tangent(*arrays: Array) -> PyTree:
        return jax.jvp(attend, arrays, arrays)[1]

    return {"forward": attend, "tangent": tangent}.get(call.kind, backward)


def difference(found: PyTree, wanted: PyTree) -> float:
    """The largest, relative to the largest entry of each array; infinite where it is no number."""

    def of(x: Array, y: Array) -> float:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        differs = float(jnp.abs(x - y).max() / jnp.abs(y).max())
        return differs if differs >= 0 else float("inf")

    return max(jax.tree.leaves(jax.tree.map(of, found, wanted)))
