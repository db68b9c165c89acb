"""Published times of training steps, compared with the cost model.

    python -m benchmarks.predictions

writes docs/benchmarks/predictions.json, and the table of `docs/predictions.md` to standard output.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from energy_attn.cli.plan import Job, planned
from energy_attn.distributed import cost, plan
from energy_attn.models import LlamaConfig

RESULT = Path(__file__).parents[1] / "docs" / "benchmarks" / "predictions.json"
# A prediction that is further off than this factor is a miss.
MISS = 1.25

MODELS = {
    "llama2-7b": LlamaConfig(32000, 4096, 11008, 32, 32, 32),
    "llama2-70b": LlamaConfig(32000, 8192, 28672, 80, 64, 8),
    "llama3-8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8),
    "llama3-70b": LlamaConfig(128256, 8192, 28672, 80, 64, 8),
}


class Source(NamedTuple):
    """A publication of times: its address, date and remarks."""

    url: str
    date: str
    says: str


_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext"
SOURCES = {
    "tiers": Source(
        f"{_MAXTEXT}/blob/main/docs/reference/models/tiering.md",
        "2026-06-15",
        "Tokens per second of a chip, without context parallelism; a step is that of one sequence on one chip here. "
        "The efficiencies of v5p and v6e in the model are from this page.",
    ),
    "ulysses": Source(
        f"{_MAXTEXT}/pull/4687",
        "2026-07-31",
        "64 v5p, context 16, 2M tokens a step, blocks of 2048 (Ulysses) and 1024. Whether gather and ring were "
        "balanced it does not say; by default they are (zigzag).",
    ),
    "usp": Source(
        f"{_MAXTEXT}/pull/4893",
        "2026-08-14",
        "64 v5p, context 64, one sequence a step, balanced (zigzag); medians. Blocks are assumed to be of 1024.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A published step: of a model on a mesh of chips that share a context, by a method."""

    source: str
    model: str
    chip: str
    sizes: tuple[int, ...]  # of the axes that share the context
    tokens: int  # of a sequence
    batch: int  # sequences that those chips have
    method: str
    layout: str
    published: float  # seconds of a step
    tile: int = 1024  # queries and keys of a block


_USP = {  # seconds of 64K, 128K and 256K tokens
    ("gather", (4, 4, 4)): (1.09, 2.98, 9.71),
    ("ring", (4, 4, 4)): (1.42, 3.71, 10.78),
    ("hybrid", (16, 4)): (1.04, 2.88, 9.50),
    ("hybrid", (8, 8)): (1.20, 2.93, 9.34),
    ("hybrid", (32, 2)): (1.38, 3.49, 10.24),
}
ROWS = (
    Row("tiers", "llama2-70b", "v5p", (1,), 4096, 1, "ulysses", "contiguous", 4096 / 692),
    Row("tiers", "llama3-8b", "v6e", (1,), 8192, 1, "ulysses", "contiguous", 8192 / 7207),
    Row("tiers", "llama3-70b", "v6e", (1,), 8192, 1, "ulysses", "contiguous", 8192 / 960),
    Row("ulysses", "llama2-7b", "v5p", (4, 4), 2**15, 16, "ulysses", "contiguous", 8.90, tile=2048),
    Row("ulysses", "llama2-7b", "v5p", (4, 4), 2**15, 16, "gather", "zigzag", 8.83),
    Row("ulysses", "llama2-7b", "v5p", (4, 4), 2**15, 16, "ring", "zigzag", 16.38),
    Row("ulysses", "llama2-7b", "v5p", (4, 4), 2**15, 16, "ring", "contiguous", 16.38),
    *(
        Row("usp", "llama3-8b", "v5p", sizes, 2**16 << i, 1, method, "zigzag", seconds)
        for i in range(3)
        for (method, sizes), times in _USP.items()
        for seconds in times[i : i + 1]
    ),
)


def predicted(row: Row) -> dict[str, Any]:
    """A row with its prediction: products of weights and attention, transfers, and their exposed part."""
    chip = plan.chip(row.chip)
    topology = cost.topology(chip.network, row.sizes)
    job = Job(MODELS[row.model], chip, topology, row.tokens, row.batch, tile=row.tile)
    step = planned(job, row.method, row.layout)
    weights = job.weight_seconds()
    times = {
        "weights": weights,
        "attention": step.products,
        "transfers": step.transfers,
        "exposed": step.exposed,
        "predicted": weights + step.seconds,
        "ratio": row.published / (weights + step.seconds),
    }
    result = {
        **dataclasses.asdict(row),
        "sizes": list(row.sizes),
        "published": round(row.published, 4),
    }
    return result | {name: round(x, 4) for name, x in times.items()}


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds of the longest of three lengths that grow quadratically; each length is twice the one before.

    Through the three goes one parabola in the number of tokens.
    """
    results = []
    for method, sizes in _USP:
        mine = [
            x for x in rows if (x["source"], x["method"], x["sizes"]) == ("usp", method, [*sizes])
        ]
        lengths = np.array([x["tokens"] for x in mine]) / mine[-1]["tokens"]
        squares = {
            name: round(float(np.polyfit(lengths, [x[name] for x in mine], 2)[0]), 2)
            for name in ("published", "predicted")
        }
        results.append({"method": method, "sizes": [*sizes], **squares})
    return results


def compute() -> dict[str, Any]:
    """Computes all predictions, as the file holds them."""
    rows = [predicted(row) for row in ROWS]
    sources = {name: source._asdict() for name, source in SOURCES.items()}
    return {"sources": sources, "rows": rows, "growth": growth(rows)}


def table(result: dict[str, Any]) -> str:
    """Formats the rows as Markdown, grouped by source."""
    head = (
        "| model | chips | tokens | method, layout | weights | attention | transfers | exposed | predicted | published "
        "| published / predicted |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    parts = []
    for name, source in result["sources"].items():
        lines = [_line(row) for row in result["rows"] if row["source"] == name]
        title = f"[{source['url'].removeprefix('https://')}]({source['url']}), {source['date']}"
        parts.append(f"{title}. {source['says']}\n\n{head}" + "\n".join(lines))
    lines = [
        f"| {x['method']} | {_form(x['sizes'])} | {x['predicted']:.2f} | {x['published']:.2f} |"
        for x in result["growth"]
    ]
    head = "| method | chips | predicted | published |\n| --- | --- | --- | --- |\n"
    title = "Of 256K tokens, the seconds that grow with the square of the length (a parabola through the three above):"
    return "\n\n".join([*parts, f"{title}\n\n{head}" + "\n".join(lines)])


def _form(sizes: list[int]) -> str:
    return "×".join(map(str, sizes))


def _line(row: dict[str, Any]) -> str:
    seconds = (
        f"{row[name]:.2f}"
        for name in ("weights", "attention", "transfers", "exposed", "predicted", "published")
    )
    ratio = f"{row['ratio']:.2f}"
    is_miss = not 1 / MISS <= row["ratio"] <= MISS
    cells = (
        *(
            row["model"],
            f"{_form(row['sizes'])} {row['chip']}",
            f"{row['batch']} × {row['tokens'] // 1024}K",
        ),
        *(f"{row['method']}, {row['layout']}", *seconds, f"**{ratio}**" if is_miss else ratio),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    results = compute()
    lines = json.dumps(results).replace("}, ", "},\n ")  # a row on each
    RESULT.write_text(lines + "\n", encoding="utf-8")
    print(table(results))
