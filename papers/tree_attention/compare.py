"""Compares committed measurements of `latency.py` with the current cost model.

    python papers/tree_attention/compare.py FITTED.json ... --unseen OTHER.json ... --out measured.svg

Updates the model's figures in the files, prints each exchange, and draws all of them, measured against
predicted: hollow where the model's constants were not fitted to them. Nothing is measured.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from _predicted import BAND, Point, points, predict
from _report import COLOURS, pyplot


def main() -> None:
    """Compares the files that the command line names."""
    parser = argparse.ArgumentParser(description="Measured exchanges beside the cost model's.")
    parser.add_argument("files", nargs="+", type=Path, help="results of latency.py")
    parser.add_argument("--unseen", nargs="*", default=[], type=Path, help="no part of the fit")
    parser.add_argument("--out", type=Path, required=True, help="the figure, an SVG file")
    args = parser.parse_args()
    fitted, unseen = show(args.files), show(args.unseen)
    draw(fitted, unseen, args.out)
    print(f"wrote {args.out}")


def show(files: Sequence[Path]) -> list[Point]:
    """Updates the model's figures in files, prints each exchange, and returns all of them."""
    all_points: list[Point] = []
    for path in files:
        result = json.loads(path.read_text())
        predict(result)
        path.write_text(json.dumps(result, indent=1) + "\n")
        all_points += points(result)
    for point in all_points:
        print(
            f"{point.hosts} x {point.devices}, {point.mbit:g} Mbit/s, {point.latency_ms:g} ms, "
            f"S = {point.keys:6}, {point.method:18} {point.measured:9.2f} ms "
            f"({point.low:.2f} to {point.high:.2f}), model {point.predicted:9.2f}, "
            f"{point.ratio:5.2f}{'' if point.resolved else '  not resolved'}"
        )
    ratios = [point.ratio for point in all_points if point.resolved] or [1.0]
    outside = sum(not 1 / BAND <= ratio <= BAND for ratio in ratios)
    print(
        f"{len(all_points)} exchanges, {sum(x.resolved for x in all_points)} resolved: "
        f"{min(ratios):.2f} to {max(ratios):.2f} times the model's, {outside} outside a factor of {BAND}"
    )
    return all_points


def draw(fitted: Sequence[Point], unseen: Sequence[Point], path: Path) -> None:
    """Measured against predicted, with the line where they are equal and a factor of 1.5 on both sides."""
    pyplot.rcParams.update({"svg.hashsalt": "energy_attn", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(6.4, 5.6), layout="constrained")
    resolved = [point for point in (*fitted, *unseen) if point.resolved]
    span = [
        min(point.predicted for point in resolved) / 2,
        max(point.predicted for point in resolved) * 2,
    ]
    axes.plot(span, span, color="0.4", linewidth=0.8, zorder=0)
    low, high = ([end * factor for end in span] for factor in (1 / BAND, BAND))
    axes.fill_between(span, low, high, color="0.92", zorder=-1, label=f"within {BAND}")
    shown: set[str] = set()
    series = [(method, exchanges) for method in COLOURS for exchanges in (fitted, unseen)]
    for method, exchanges in series:
        selected = [point for point in exchanges if point.resolved and point.method == method]
        if not selected:
            continue
        label = "_" if method in shown else method
        shown.add(method)
        middles = [point.measured for point in selected]
        axes.errorbar(
            [point.predicted for point in selected],
            middles,
            (
                [max(0.0, point.measured - point.low) for point in selected],
                [max(0.0, point.high - point.measured) for point in selected],
            ),
            color=COLOURS[method],
            markerfacecolor="white" if exchanges is unseen else COLOURS[method],
            linestyle="none",
            marker="o",
            markersize=3.5,
            elinewidth=0.7,
            label=label,
        )
    axes.set(xscale="log", yscale="log", xlim=span, ylim=span)
    axes.set_xlabel("ms by the model")
    axes.set_ylabel("ms measured: a step less the attention in it (median, 95% interval)")
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
