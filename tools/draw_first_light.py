#!/usr/bin/env python3
"""Write the measurements of first light into docs/kernels.md, and draw docs/benchmarks/first_light.svg.

    python tools/draw_first_light.py

The part of the page between the comments is made of docs/benchmarks/first_light.json and of nothing else. Without
that file it says that nothing has been measured.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
FILE, PICTURE = "benchmarks/first_light.json", "benchmarks/first_light.svg"
BEGIN, END = "<!-- tools/draw_first_light.py -->\n", "<!-- end of first light -->"
ABSENT = """\
!!! warning "Not measured yet"

    Our kernels for GPUs and TPUs pass the tests of all implementations in Pallas' interpreter, and splash some of its
    own. The adapters of cuDNN, flash-attn-jax and fa4-jax are tested with emulations of these. All but flash-attn-jax,
    which is only lowered, are compiled for H200 (CUDA 12 and 13; fa4-jax's kernels by CuTe for H100) or for TPU v4,
    v5e, v5p, v6e and 7x, ours with assertions on their scratch memory. None has run on the hardware."""

Steps = dict[str, dict[str, dict[str, Any]]]
Row = tuple[str, ...]


def section(steps: Steps | None) -> str:
    """The part of the page, in Markdown."""
    if not steps:
        return ABSENT
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
    checked = [*steps.get("check", {}).values(), *steps.get("check_large", {}).values()]
    if checked:
        yield "Calls of each kernel beside dense attention in float64; errors relative to their tolerance, the largest:"
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


def _checked(results: Iterable[dict[str, Any]]) -> Iterator[Row]:
    kernels: dict[str, list[dict[str, Any]]] = {}
    for x in results:
        kernels.setdefault(x["kernel"] if "kernel" in x else "?", []).append(x)
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


def page(text: str, steps: Steps | None) -> str:
    """The page with that part replaced."""
    return between(text, BEGIN, section(steps), END)


def between(text: str, begin: str, part: str, end: str) -> str:
    """The text with this part between two comments. Raises `ValueError` if it does not have them."""
    before, has_begin, remainder = text.partition(begin)
    _, has_end, after = remainder.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"wanted a page with {begin.strip()} and {end}")
    return f"{before}{begin}{part}\n{end}{after}"


def kept(docs: Path = DOCS) -> Steps | None:
    """The measured steps; None if there are none."""
    path = docs / FILE
    return json.loads(path.read_text(encoding="utf-8"))["steps"] if path.exists() else None


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
    """Writes the page, and the picture if there is something to draw; returns 0."""
    steps = kept(docs)
    if steps is not None:
        draw(steps, docs / PICTURE)
    kernels = docs / "kernels.md"
    kernels.write_text(page(kernels.read_text(encoding="utf-8"), steps), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
