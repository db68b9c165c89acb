"""The rows of the committed results in which another library was faster.

    python -m benchmarks.losses

prints the table of `docs/compare.md`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .runner import sizes_of

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks"
# How the names of other libraries begin; all other names are ways to do the same with this one.
LIBRARIES = ("cuDNN", "eqx.", "flash-attn-jax", "jax.", "optax", "PyTorch", "transformers")


def compared(suite: str) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """How many times faster this library was, than which one, and the row, for each row and library of a suite."""
    result = json.loads((RESULTS / f"{suite}.json").read_text(encoding="utf-8"))
    for row in result.get("times", []):
        for library, times in row["times_faster"].items():
            if library.startswith(LIBRARIES):
                yield times, library, row


def table() -> str:
    """All rows below 1, the slowest first, as Markdown."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        if path.stem == "modes":  # of derivatives
            continue
        for times, library, row in compared(path.stem):
            if times < 1:
                run = f"[{path.stem}](benchmarks/{path.name})"
                cells = [_program(row), sizes_of(row), library, f"{times:.2f}", run]
                lines.append((times, f"| {' | '.join(cells)} |"))
    head = "| program | sizes | library | times faster | run |\n| --- | --- | --- | --- | --- |\n"
    return head + "\n".join(line for _, line in sorted(lines))


def _program(row: dict[str, Any]) -> str:
    causal = ", causal" if row.get("causal") else ""
    layers = f", {row['layers']} in a row" if row.get("layers", 1) > 1 else ""
    return f"{row['name']}{causal}{layers}, {row['dtype']}"


if __name__ == "__main__":
    print(table())
