"""The calls whose tiles are tuned, and the tiles to try, for `tune` and for the step `sweep` of first light."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, PyTree

from energy_attn.kernels import AttentionState, local_attention
from energy_attn.kernels.internal import GPUTiles, KernelKind, PallasGPU

from .attention import arrays

_TRIAL = 256  # the divisor of lengths in a trial
TOLERANCE = 0.05  # of the largest entry, between results of other tiles


class Sizes(NamedTuple):
    """Tiles to try, as in `GPUTiles`."""

    rows: int
    keys: int
    warps: int
    stages: int
    each: int = 1  # the programs of each multiprocessor among which few tiles are divided
    least_steps: int = 4

    @property
    def label(self) -> str:
        """The sizes in one line."""
        steps = f" of {self.least_steps}" if self.least_steps != 4 else ""
        return f"{self.rows} x {self.keys}, {self.warps} warps, {self.stages} stages, {self.each}{steps}"

    def tiles(self, kind: KernelKind, cores: int) -> GPUTiles:
        """These sizes for a kernel on a GPU with `cores` multiprocessors."""
        sizes = self._asdict()
        return GPUTiles(kind, programs=sizes.pop("each") * cores, **sizes)


class Call(NamedTuple):
    """Attention call whose tiles are tuned; calls with equal dtype, widths and row count use them."""

    kind: KernelKind
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    dtype: str
    candidates: tuple[Sizes, ...]
    few_keys: bool | None = None  # of few rows: whether there are few keys

    @property
    def call_rows(self) -> int:
        """The rows of a key head, up to a power of two; 256 for more than 128."""
        rows = self.queries * self.heads // self.kv_heads
        return min(max(1 << (rows - 1).bit_length(), 16), 256)

    @property
    def steps(self) -> int:
        """How many times a program runs it: a step from a short cache may take less time than to start a program."""
        return 8 if self.few_keys else 1

    @property
    def label(self) -> str:
        """The kernel, the dtype and the sizes, in one line."""
        rows = f"{self.call_rows} rows" if self.call_rows < 256 else "many rows"
        short = ", short cache" if self.few_keys else ""
        return f"{self.kind}, {self.dtype}, width {self.width}, {rows}{short}"

    def tiles(self, cores: int) -> dict[str, GPUTiles]:
        """Candidate tiles on a GPU with `cores` multiprocessors, by name."""
        return {sizes.label: sizes.tiles(self.kind, cores) for sizes in self.candidates}

    @property
    def shape(self) -> dict[str, int]:
        """The sizes, by the library's letters."""
        sizes = 1, self.queries, self.keys, self.heads, self.kv_heads, self.width
        return dict(zip("BTSNKH", sizes, strict=True))

    def arrays(self) -> list[Array]:
        """Random query, key and value."""
        return arrays(self.dtype, **self.shape)


def _sizes(*sizes: tuple[Any, ...]) -> tuple[Sizes, ...]:
    return tuple(Sizes(*x) for x in sizes)


_MANY: dict[KernelKind, tuple[Sizes, ...]] = {
    "forward": _sizes(
        *((128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 4, 3), (128, 64, 8, 2)),
        *((128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (64, 128, 4, 2)),
        *((64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4), (256, 64, 8, 2)),
    ),
    "query": _sizes(
        *((128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (128, 32, 8, 4)),
        *((128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2)),
    ),
    "key": _sizes(
        *((64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3), (32, 128, 8, 4)),
        *((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (32, 64, 4, 3)),
    ),
    "tangent": _sizes(
        *((128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2)),
        *((64, 64, 4, 3), (64, 32, 4, 3)),
    ),
}
_FEW = {
    16: _sizes(
        *((16, 32, 4, 4, 4), (16, 32, 2, 4, 4), (16, 32, 1, 4, 4), (16, 32, 4, 4, 2)),
        *((16, 32, 4, 3, 4), (16, 64, 4, 4, 2), (16, 64, 4, 3, 3), (16, 64, 2, 4, 2)),
        *((16, 128, 4, 4, 1), (16, 16, 1, 6, 4)),
    ),
    32: _sizes((32, 32, 4, 4, 4), (32, 32, 4, 3, 4), (32, 64, 4, 3, 2), (32, 64, 4, 4, 2)),
    64: _sizes((64, 64, 4, 3, 2), (64, 64, 4, 4, 1), (64, 32, 4, 4, 2), (64, 128, 4, 3, 1)),
    128: _sizes((128, 64, 8, 4, 1), (128, 64, 8, 3, 1), (128, 128, 8, 3, 1), (128, 32, 8, 4, 2)),
}
# Of a cache of 8192 tokens: as many programs as fill their stages twice, or once, or one for each multiprocessor.
_SHORT = {
    16: _sizes((16, 32, 4, 4, 4, 8), (16, 32, 4, 4, 4, 4), (16, 32, 4, 4, 1), (16, 64, 4, 4, 1)),
    32: _sizes((32, 32, 4, 4, 4, 8), (32, 32, 4, 4, 1), (32, 64, 4, 4, 1)),
    64: _sizes((64, 64, 4, 3, 2, 4), (64, 64, 4, 3, 1)),
    128: _sizes((128, 64, 8, 4, 1), (128, 32, 8, 4, 1)),
}
# No tensor core multiplies float32: larger tiles are longer programs, which take minutes to compile.
_FLOAT32 = _sizes(
    *((16, 16, 4, 2), (16, 16, 4, 3), (16, 16, 8, 2)),
    *((16, 32, 4, 2), (32, 16, 4, 2), (32, 32, 8, 2)),
)
_FEW_FLOAT32 = _sizes((16, 16, 4, 4, 4), (16, 16, 4, 3, 4), (16, 16, 4, 4, 2), (16, 32, 4, 3, 2))
_SHORT_FLOAT32 = _sizes((16, 16, 4, 4, 4, 8), (16, 16, 4, 4, 1))
WIDTHS = 128, 64


def calls(
    shrink: int = 1, dtype: str = "bfloat16", widths: tuple[int, ...] | None = None
) -> Iterator[Call]:
    """The calls to tune: prefill and its derivatives, and decode with few rows from a long and from a short cache.

    By default of the widths 128 and 64, and few rows of 128 alone.
    """
    length, cached, short = (max(x // shrink, 16) for x in (8192, 65536, 8192))
    narrow = dtype != "float32"
    for width in widths or WIDTHS:
        heads = max(2048 // width, 1) if shrink == 1 else 1
        for kind, candidates in _MANY.items():
            sizes = candidates if narrow else _FLOAT32
            yield Call(kind, length, length, heads, heads, width, dtype, sizes)
    for width in widths or WIDTHS[:1]:
        for rows in _FEW:
            sizes = _SHORT[rows] if narrow else _SHORT_FLOAT32
            yield Call("forward", 1, short, rows * 8, 8, width, dtype, sizes, True)
            sizes = _FEW[rows] if narrow else _FEW_FLOAT32
            yield Call("forward", 1, cached, rows * 8, 8, width, dtype, sizes, False)


def trial_calls(dtype: str = "float32", widths: tuple[int, ...] | None = None) -> Iterator[Call]:
    """Small calls for a trial run: each kernel once and a short cache, with one candidate each."""
    for width in widths or WIDTHS[:1]:
        *each, short = list(calls(_TRIAL, dtype, (width,)))[: len(_MANY) + 1]
        for call in each:
            yield call._replace(candidates=(Sizes(16, 16, 4, 2),))
        yield short._replace(candidates=(Sizes(16, 16, 4, 2, least_steps=1),))


def cores_here() -> int:
    """The number of multiprocessors of the attached GPU, or of an H100."""
    return getattr(jax.devices()[0], "core_count", None) or 132


def program(call: Call, tiles: GPUTiles | None) -> Callable[..., PyTree]:
    """A program that runs a call `call.steps` times, with these tiles for one kernel and default ones for others."""
    kernel = PallasGPU(() if tiles is None else (tiles,))
    causal = call.queries > 1
    attend = functools.partial(local_attention, is_causal=causal, implementation=kernel)

    def backward(*arrays: Array) -> PyTree:
        state, back = jax.vjp(attend, *arrays)
        return back(state)

    def tangent(*arrays: Array) -> PyTree:
        return jax.jvp(attend, arrays, arrays)[1]

    def steps(query: Array, key: Array, value: Array) -> PyTree:
        def step(_: Array, state: AttentionState) -> AttentionState:
            return attend(query + state.out * query.dtype.type(1e-3), key, value)

        return jax.lax.fori_loop(1, call.steps, step, attend(query, key, value))

    forward = attend if call.steps == 1 else steps
    return {"forward": forward, "tangent": tangent}.get(call.kind, backward)
