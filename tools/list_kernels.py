#!/usr/bin/env python3
"""Writes the tables of docs/kernels.md: which kernel a call runs on each machine, and what kernels take.

    python tools/list_kernels.py

The tables between the comments are made of nothing else; a test compares them on each JAX that the tests run on. No
machine of these is needed. The last row of the first is of docs/benchmarks/first_light.json.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from draw_first_light import DOCS, Steps, between, kept, table

from energy_attn import masks, scores
from energy_attn.kernels import Operands, Settings, implementations
from energy_attn.kernels.internal import (
    AssumedGPU,
    Tokens,
    arguments,
    explain,
    tried,
    window_structure,
)

BEGIN, END = "<!-- tools/list_kernels.py -->\n", "<!-- end of kernels -->"
# The platform, and the compute capability of a GPU.
MACHINES: dict[str, tuple[str, str | None]] = {
    "T4 (7.5)": ("cuda", "7.5"),
    "A100, RTX 4090 (8.0, 8.9)": ("cuda", "8.0"),
    "H100, H200 (9.0)": ("cuda", "9.0"),
    "B200, RTX 5090 (10.0, 12.0)": ("cuda", "10.0"),
    "TPU": ("tpu", None),
    "CPU": ("cpu", None),
}
TAKES_BEGIN, TAKES_END = (
    "<!-- tools/list_kernels.py: what each takes -->\n",
    "<!-- end of takes -->",
)
# Options of a call, beside those of a plain one.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "causality, windows": lambda: {"is_causal": True, "local_window_size": (100, 0)},
    "lengths": lambda: {"key_value_seq_lengths": jnp.full(1, 100, jnp.int32)},
    "segments": lambda: {
        "query_segment_ids": jnp.zeros((1, ROWS), jnp.int32),
        "key_segment_ids": jnp.zeros((1, ROWS), jnp.int32),
    },
    "positions": lambda: {"key_positions": jnp.zeros((1, ROWS), jnp.int32)},
    "masks that compose": lambda: {"mask": masks.Causal() | masks.Prefix(100)},
    "boolean masks, biases": lambda: {
        "mask": jnp.ones((1, 1, ROWS, ROWS), bool),
        "bias": jnp.zeros((1, 1, ROWS, ROWS), jnp.float32),
    },
    "scores": lambda: {"score": scores.SoftCap(jnp.float32(30.0))},
    "a source": lambda: {"source": jnp.zeros((1, ROWS, HEADS, WIDTH), jnp.bfloat16)},
}
# of a plain call that all take, but decode, which takes few rows
ROWS, HEADS, WIDTH = 128, 8, 64
ALIKE = {"8.0": "8.9", "10.0": "12.0"}  # those that share a column


class Call(NamedTuple):
    """One kind of call: batch 1, and twice as many heads of queries as of keys unless there is one row."""

    queries: int
    keys: int
    width: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    segments: bool = False
    heads: int = 16
    kv_heads: int = 8

    def operands(self) -> Operands:
        """Abstract arrays of a call."""
        array: Any = jax.ShapeDtypeStruct
        query = array((1, self.queries, self.heads, self.width), jnp.dtype(self.dtype))
        key = array((1, self.keys, self.kv_heads, self.width), jnp.dtype(self.dtype))
        operands = Operands(query, key, key)
        if not self.segments:
            return operands
        rows, keys = (array((1, size), jnp.int32) for size in (self.queries, self.keys))
        return operands._replace(tokens=Tokens(query_segments=rows, key_segments=keys))

    def kernel(self, platform: str, capability: str | None) -> str:
        """The kernel that it gets."""
        settings = Settings(self.width**-0.5, window_structure(right=0 if self.causal else None))
        device = None if capability is None else AssumedGPU(capability)
        with jax.enable_x64(self.dtype == "float64"):
            return explain(tried(), settings, self.operands(), platform, device).name


CALLS = {
    "decode, 16 bits": Call(1, 65536),
    "decode, 16 bits, width 256": Call(1, 65536, 256),
    "decode, float32": Call(1, 65536, dtype="float32"),
    "16 queries, 16 bits": Call(16, 65536),
    "16 queries, float32": Call(16, 65536, dtype="float32"),
    "causal, 16 bits, width 64": Call(2048, 2048, 64, causal=True),
    "causal, 16 bits, width 128": Call(2048, 2048, causal=True),
    "causal, 16 bits, width 256": Call(2048, 2048, 256, causal=True),
    "causal, 16 bits, width 80": Call(2048, 2048, 80, causal=True),
    "causal, float32": Call(2048, 2048, dtype="float32", causal=True),
    "segments, 16 bits": Call(2048, 2048, causal=True, segments=True),
    "more keys than queries, 16 bits": Call(2048, 4096),
    "float64": Call(2048, 2048, dtype="float64", causal=True),
}


def section(steps: Steps | None) -> str:
    """The table, in Markdown."""
    rows = []
    for name, call in CALLS.items():
        kernels = [call.kernel(*machine) for machine in MACHINES.values()]
        for (platform, capability), kernel in zip(MACHINES.values(), kernels, strict=True):
            if capability in ALIKE and call.kernel(platform, ALIKE[capability]) != kernel:
                raise ValueError(f"{name}: {ALIKE[capability]} wants a column of its own")
        rows.append((name, *(f"`{kernel}`" for kernel in kernels)))
    ran = {capability: "none" for _, capability in MACHINES.values()}
    if steps:
        checked = steps.get("check", {}).values()
        wrong = {x["kernel"] for x in checked if x.get("good") is False or "error" in x}
        correct = {x["kernel"] for x in checked if x.get("good")} - wrong
        ran[steps["about"]["versions"]["capability"]] = ", ".join(f"`{x}`" for x in sorted(correct))
    ran[None] = "none"
    machines = list(MACHINES.values())
    last = [ran[capability] if platform != "cpu" else "those" for platform, capability in machines]
    return table(("call", *MACHINES), [*rows, ("right on hardware so far", *last)])


def reason(name: str, options: dict[str, Any]) -> str | None:
    """The reason why a kernel declines a call or is missing; None if it takes it."""
    reasons: list[str | None] = []

    def ask(query: Any) -> None:
        call = arguments.check_call(query, query, query, **options)
        try:
            explain((name,), call.settings, call.operands, "cuda")
            reasons.append(None)
        except NotImplementedError as declined:
            reasons.append(str(declined))

    jax.eval_shape(ask, jax.ShapeDtypeStruct((1, ROWS, HEADS, WIDTH), jnp.bfloat16))
    return reasons[0]


def takes() -> str:
    """The table of options, in Markdown; an option is taken if it does not change the reason of a kernel."""
    rows = []
    for name in implementations():
        plain = reason(name, {})
        cells = ("yes" if reason(name, make()) == plain else "" for make in OPTIONS.values())
        rows.append((f"`{name}`", *cells))
    return table(("", *OPTIONS), rows)


def page(text: str, steps: Steps | None) -> str:
    """The page with these tables replaced."""
    text = between(text, BEGIN, section(steps), END)
    return between(text, TAKES_BEGIN, takes(), TAKES_END)


def main() -> int:
    """Writes the page; returns 0."""
    path = DOCS / "kernels.md"
    path.write_text(page(path.read_text(encoding="utf-8"), kept()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
