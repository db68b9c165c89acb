#!/usr/bin/env python3
"""Writes the tables of docs/kernels.md, and draws docs/benchmarks/first_light.svg.

    python tools/kernels_page.py

Which kernel a call runs on each machine and what kernels take is asked of the library: no machine of these is needed.
What first light measured is read from docs/benchmarks/first_light.json.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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

DOCS = Path(__file__).resolve().parents[1] / "docs"
FILE, PICTURE = "benchmarks/first_light.json", "benchmarks/first_light.svg"

Steps = dict[str, dict[str, dict[str, Any]]]
Row = tuple[str, ...]


# The platform of each column, and the compute capabilities of its GPUs.
MACHINES: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "T4 (7.5)": ("cuda", ("7.5",)),
    "A100, RTX 4090 (8.0, 8.9)": ("cuda", ("8.0", "8.9")),
    "H100, H200 (9.0)": ("cuda", ("9.0",)),
    "B200, RTX 5090 (10.0, 12.0)": ("cuda", ("10.0", "12.0")),
    "TPU": ("tpu", (None,)),
    "CPU": ("cpu", (None,)),
}
# Options of a call, in addition to those of a plain one.
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


class Call(NamedTuple):
    """One kind of call: batch 1, 16 heads of queries and 8 of keys."""

    queries: int
    keys: int
    width: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    segments: bool = False

    def kernel(self, platform: str, capability: str | None) -> str:
        """The kernel that it gets."""
        array: Any = jax.ShapeDtypeStruct
        query = array((1, self.queries, 16, self.width), jnp.dtype(self.dtype))
        key = array((1, self.keys, 8, self.width), jnp.dtype(self.dtype))
        operands = Operands(query, key, key)
        if self.segments:
            rows, keys = (array((1, size), jnp.int32) for size in (self.queries, self.keys))
            tokens = Tokens(query_segments=rows, key_segments=keys)
            operands = operands._replace(tokens=tokens)
        settings = Settings(self.width**-0.5, window_structure(right=0 if self.causal else None))
        device = None if capability is None else AssumedGPU(capability)
        with jax.enable_x64(self.dtype == "float64"):
            return explain(tried(), settings, operands, platform, device).name


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


def runs(steps: Steps) -> str:
    """Kernels by call and machine, and a row of the kernels that were right on hardware."""
    rows = []
    for name, call in CALLS.items():
        cells = []
        for machine, (platform, capabilities) in MACHINES.items():
            kernels = {call.kernel(platform, capability) for capability in capabilities}
            if len(kernels) > 1:
                raise ValueError(f"{name}: not one column for {machine}: {sorted(kernels)}")
            cells.append(f"`{kernels.pop()}`")
        rows.append((name, *cells))
    checked = [x for x in _checks(steps) if x["kernel"] in implementations()]
    wrong = {x["kernel"] for x in checked if x.get("good") is False or "error" in x}
    correct = {x["kernel"] for x in checked if x.get("good")} - wrong
    measured = steps["about"]["versions"]["capability"]
    names = ", ".join(f"`{x}`" for x in sorted(correct))
    last = [
        "those" if platform == "cpu" else names if measured in capabilities else "none"
        for platform, capabilities in MACHINES.values()
    ]
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


def takes(_: Steps) -> str:
    """The table of options, in Markdown; an option is taken if it does not change the reason of a kernel."""
    rows = []
    for name in implementations():
        plain = reason(name, {})
        cells = ("yes" if reason(name, make()) == plain else "" for make in OPTIONS.values())
        rows.append((f"`{name}`", *cells))
    return table(("", *OPTIONS), rows)


def first_light(steps: Steps) -> str:
    """The results of first light, in Markdown."""
    return "\n\n".join(_parts(steps))


def _parts(steps: Steps) -> Iterator[str]:
    about = steps["about"]["versions"]
    names = ("jax", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "torch")
    versions = [f"{name} {about[name]}" for name in names if name in about]
    roof = steps.get("roof", {})
    ceilings = [
        f"{name_of_ceiling} {roof[label][key] / 1e12:.3g} {unit}"
        for name_of_ceiling, label, key, unit in (
            ("copying", "copy", "bytes_per_s", "TB/s"),
            ("reading", "read", "bytes_per_s", "TB/s"),
            ("a product in bfloat16", "matmul", "flop_per_s", "TFLOP/s"),
        )
        if key in roof.get(label, {})
    ]
    yield f"Measured on {about['device']}, {about['date']}: {', '.join([*versions, *ceilings])}."
    if checked := _checks(steps):
        yield "Each kernel compared with dense attention in float64; errors relative to their tolerance, the largest:"
        yield table(
            ("kernel", "right", "wrong", "declined", "did not run", "error"), _checked(checked)
        )
    rates = [*steps.get("prefill", {}).values(), *steps.get("torch", {}).values()]
    if any("tflop_per_s" in x for x in rates):
        yield f"![TFLOP/s of prefill and share of the copy's bandwidth in decoding, by kernel]({PICTURE})"
        yield "TFLOP/s; of causal attention, half of the products are counted:"
        yield _pivot(rates, _square, lambda x: f"{x['tflop_per_s']:.0f}", "tflop_per_s")
    steps_of_decode = list(steps.get("decode", {}).values())
    if any("us_per_step" in x for x in steps_of_decode):
        yield "Microseconds of a decode step of width 128, and its share of the copy's bandwidth:"
        yield _pivot(steps_of_decode, _cache, _microseconds, "us_per_step")
    rules = list(steps.get("rules", {}).values())
    if any("seconds" in x for x in rules):
        yield "Microseconds of causal calls that cuDNN's kernel declines, 2048 features of queries and as many of keys:"
        yield _pivot(rules, _rule, lambda x: f"{x['seconds'] * 1e6:.0f}", "seconds")


def _checks(steps: Steps) -> list[dict[str, Any]]:
    """The results of checks, and of programs that were checked when they were timed."""
    names = "check", "check_large", "decode", "prefill", "rules"
    results = [(name, x) for name in names for x in steps.get(name, {}).values() if "kernel" in x]
    return [x for name, x in results if name.startswith("check") or "good" in x]


def _checked(results: Iterable[dict[str, Any]]) -> Iterator[Row]:
    kernels: dict[str, list[dict[str, Any]]] = {}
    for x in results:
        kernels.setdefault(x["kernel"], []).append(x)
    for kernel, results_of_kernel in kernels.items():
        counts = [
            sum(x.get("good") is True for x in results_of_kernel),
            sum(x.get("good") is False for x in results_of_kernel),
            sum("declined" in x for x in results_of_kernel),
            sum("error" in x for x in results_of_kernel),
        ]
        errors = [float(x["of_tolerance"]) for x in results_of_kernel if "of_tolerance" in x]
        largest = f"{max(errors):.2g}" if errors else ""
        yield f"`{kernel}`", *map(str, counts), largest


def _square(x: dict[str, Any]) -> str:
    causal = "causal" if x["causal"] else "full"
    return f"{_PASSES[x['pass']]}, {causal}, width {x['width']}, {x['batch']} × {x['length']}"


_PASSES = {"forward": "forward", "both": "forward + backward", "tangent": "forward + tangent"}


def _rule(x: dict[str, Any]) -> str:
    return f"{x['rule']}, {_PASSES[x['pass']]}, width {x['width']}, {x['length']} tokens"


def _cache(x: dict[str, Any]) -> str:
    heads = f"{x['heads']}/{x['kv_heads']} heads"
    return f"{x['batch']} × {x['queries']} queries, {heads}, {x['keys']} keys"


def _microseconds(x: dict[str, Any]) -> str:
    share = f" ({x['of_copy']:.0%})" if x["of_copy"] else ""
    return f"{x['us_per_step']:.1f}{share}"


def _pivot(results: Iterable[dict[str, Any]], row: Any, cell: Any, key: str) -> str:
    cells_by_row: dict[str, dict[str, str]] = {}
    kernels: dict[str, None] = {}
    for x in results:
        if key in x:
            cells_by_row.setdefault(row(x), {})[x["kernel"]] = cell(x)
            kernels.setdefault(x["kernel"])
    rows = (
        (name, *(cells.get(kernel, "") for kernel in kernels))
        for name, cells in cells_by_row.items()
    )
    return table(("", *kernels), rows)


def table(heads: Row, rows: Iterable[Row]) -> str:
    """A table in Markdown."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Where each part begins and ends on the page, and what makes it.
PARTS: dict[tuple[str, str], Callable[[Steps], str]] = {
    ("<!-- tools/kernels_page.py: what runs -->\n", "<!-- end of what runs -->"): runs,
    ("<!-- tools/kernels_page.py: what each takes -->\n", "<!-- end of takes -->"): takes,
    ("<!-- tools/kernels_page.py: first light -->\n", "<!-- end of first light -->"): first_light,
}


def page(text: str, steps: Steps) -> str:
    """The page with its parts replaced. Raises `ValueError` if it lacks the comments around one."""
    for (begin, end), part in PARTS.items():
        before, has_begin, remainder = text.partition(begin)
        _, has_end, after = remainder.partition(end)
        if not (has_begin and has_end):
            raise ValueError(f"wanted a page with {begin.strip()} and {end}")
        text = f"{before}{begin}{part(steps)}\n{end}{after}"
    return text


def kept(docs: Path = DOCS) -> Steps:
    """The measured steps."""
    return json.loads((docs / FILE).read_text(encoding="utf-8"))["steps"]


def draw(steps: Steps, path: Path) -> None:
    """TFLOP/s of the forward pass, and the share of the copy's bandwidth in decoding."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # the same picture from the same numbers
    pyplot.rcParams["svg.hashsalt"] = "energy_attn"
    rates = [*steps.get("prefill", {}).values(), *steps.get("torch", {}).values()]
    panels = (
        ("TFLOP/s, forward", rates, _square, "tflop_per_s", lambda x: x["pass"] == "forward"),
        (
            "share of copying",
            steps.get("decode", {}).values(),
            _cache,
            "of_copy",
            lambda x: x["of_copy"],
        ),
    )
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 7), layout="constrained")
    colors: dict[str, str] = {}  # the same for a kernel in both
    for axis, (title, results, row, key, selected) in zip(axes, panels, strict=True):
        shown = [x for x in results if key in x and selected(x)]
        rows = list(dict.fromkeys(map(row, shown)))
        kernels = list(dict.fromkeys(x["kernel"] for x in shown))
        height = 0.8 / max(len(kernels), 1)
        for i, kernel in enumerate(kernels):
            values = {row(x): x[key] for x in shown if x["kernel"] == kernel}
            lengths = [values.get(name, math.nan) for name in rows]
            color = colors.setdefault(kernel, f"C{len(colors)}")
            axis.barh([j + i * height for j in range(len(rows))], lengths, height, color=color)
        axis.set_yticks([j + 0.4 for j in range(len(rows))], rows, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel(title)
    bars = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    figure.legend(bars, list(colors), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(docs: Path = DOCS) -> int:
    """Writes the page and the picture; returns 0."""
    steps = kept(docs)
    draw(steps, docs / PICTURE)
    kernels = docs / "kernels.md"
    kernels.write_text(page(kernels.read_text(encoding="utf-8"), steps), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
