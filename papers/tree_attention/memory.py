"""The paper's figure 4, peak memory, from programs that are compiled ahead of time: nothing is run.

    python papers/tree_attention/memory.py --targets rtx4090 --out docs/benchmarks
    python papers/tree_attention/memory.py --targets v5p --add --out docs/benchmarks

Attention over keys that are sharded over devices, in bfloat16: one query, by the tree and by the ring of
keys that the paper compares with, over two RTX 4090s, which were the paper's, and over TPU slices, with the
numbers of keys and of devices swept; and as many queries as keys, as for a prompt. What XLA says that a
program holds on a device stands beside the cost model and, for one query, the paper's equations 29 and 30.

It needs libtpu for TPUs, CUDA's compiler for GPUs: what `make test-tpu` and `make test-cuda` install.
`--add` keeps what the file of results has of the other targets.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from _report import machine
from _tables_report import COLOURS, pyplot

TARGETS = ("rtx4090", "v5p")


def main() -> int:
    """Compiles for the targets that the arguments name, prints rows, and writes JSON and a figure."""
    parser = argparse.ArgumentParser(description="Peak memory of tree and ring, compiled ahead.")
    add = parser.add_argument
    add("--targets", type=lambda text: text.split(","), default=["v5p"], help=", ".join(TARGETS))
    add("--add", action="store_true", help="keep what the file says of other targets")
    add("--out", type=Path, default=Path("memory"), help="folder for the results")
    args = parser.parse_args()
    for target in args.targets:
        if target not in TARGETS:
            parser.error(f"--targets: wanted some of {', '.join(TARGETS)}, got {target}")
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is run
    from _memory_aot import CASES, row

    path = args.out / "memory.json"
    kept = json.loads(path.read_text())["rows"] if args.add and path.is_file() else []
    rows = [x for x in kept if x["target"] not in args.targets]
    for case in CASES:
        if case.target in args.targets:
            rows.append(row(case))
            print(line(rows[-1]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(f"wrote {path}")
    draw(rows, path.with_suffix(".svg"))
    return 0


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    paper = "" if row["paper"] is None else f"  paper {row['paper'] / 2**20:9.1f}"
    queries = "all" if row["sharded"] else "one"
    return (
        f"{row['device']:14} {row['devices']:3} devices {row['keys']:8} keys, {queries} queries, "
        f"{row['heads']:2}/{row['kv_heads']:2} heads  {row['method']:13} MiB: {row['held'] / 2**20:9.1f} "
        f"({row['temporaries'] / 2**20:.1f} temporary)  model {row['model'] / 2**20:9.1f}{paper}"
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the memory of a decode step, over keys and over devices: compiled, by model and by paper."""
    one = [row for row in rows if row["target"] == "v5p" and not row["sharded"]]
    middle = sorted({row["keys"] for row in one})[1] if one else 0
    panels = {
        "keys": [row for row in one if row["devices"] == 8],
        "devices": [row for row in one if row["keys"] == middle],
        "heads": [row for row in rows if row["target"] == "rtx4090"],
    }
    titles = {
        "keys": "8 TPU v5p",
        "devices": f"TPU v5p, {middle // 1024}k keys",
        "heads": "2 RTX 4090, as in the paper",
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(9.6, 3.8), layout="constrained")
    for panel, (axis, panel_rows) in zip(axes, panels.items(), strict=True):
        for name, colour in COLOURS.items():
            sorted_rows = sorted(
                (x for x in panel_rows if x["method"] == name), key=lambda x: x[axis]
            )
            if not sorted_rows:
                continue
            places = [x[axis] * (x["width"] if axis == "heads" else 1) for x in sorted_rows]
            # a line for what is swept
            styles = (
                {"held": "o", "model": "-", "paper": ":"} if len(sorted_rows) > 1 else {"held": "o"}
            )
            for figure_name, style in styles.items():
                sizes = [x[figure_name] / 2**20 for x in sorted_rows if x[figure_name] is not None]
                if len(sizes) == len(places):
                    label = f"{name}, {'compiled' if figure_name == 'held' else figure_name}"
                    panel.plot(places, sizes, style, color=colour, markersize=4, label=label)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        ticks = sorted({x[axis] * (x["width"] if axis == "heads" else 1) for x in panel_rows})
        panel.set_xticks(ticks, [f"{x // 1024}k" if x >= 2**16 else f"{x}" for x in ticks])
        lowest, highest = panel.get_ylim()
        sizes = [2**i for i in range(20) if lowest <= 2**i <= highest]
        panel.set_yticks(sizes, [f"{size:,}" for size in sizes])
        panel.minorticks_off()
        panel.set_title(titles[axis], fontsize=10)
        panel.set_xlabel({"heads": "hidden size"}.get(axis, axis))
        panel.grid(axis="y", color="0.9", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("MiB on a device, a decode step")
    handles = dict(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(
        handles.values(), handles, frameon=False, loc="outside lower center", ncols=3, fontsize=8
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
