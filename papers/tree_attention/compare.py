"""Compares committed measurements of `latency.py` with the current cost model.

    python papers/tree_attention/compare.py FITTED.json ... --unseen OTHER.json ... --out measured.svg

Updates the model's figures in the files, prints each exchange, and draws measured against predicted times: hollow
where the model's constants were not fitted to them. Nothing is measured.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from _predicted import BAND, Point, points, predict
from _report import draw_points


def main() -> None:
    """Compares the files that the command line names."""
    parser = argparse.ArgumentParser(description="Compare measured exchanges with the cost model.")
    parser.add_argument("files", nargs="+", type=Path, help="results of latency.py")
    parser.add_argument("--unseen", nargs="*", default=[], type=Path, help="no part of the fit")
    parser.add_argument("--out", type=Path, required=True, help="the figure, an SVG file")
    args = parser.parse_args()
    draw_points(show(args.files), show(args.unseen), BAND, args.out)


def show(files: Sequence[Path]) -> list[Point]:
    """Updates the model's figures in files, prints each exchange, and returns all of them."""
    exchanges: list[Point] = []
    for path in files:
        result = json.loads(path.read_text())
        predict(result)
        path.write_text(json.dumps(result, indent=1) + "\n")
        exchanges += points(result)
    for x in exchanges:
        print(
            f"{x.hosts} x {x.devices}, {x.mbit:g} Mbit/s, {x.latency_ms:g} ms, S = {x.keys:6}, {x.method:18} "
            f"{x.measured:9.2f} ms ({x.low:.2f} to {x.high:.2f}), model {x.predicted:9.2f}, "
            f"{x.ratio:5.2f}{'' if x.resolved else '  not resolved'}"
        )
    ratios = [x.ratio for x in exchanges if x.resolved] or [1.0]
    outside = sum(not 1 / BAND <= ratio <= BAND for ratio in ratios)
    print(
        f"{len(exchanges)} exchanges, {sum(x.resolved for x in exchanges)} resolved: "
        f"{min(ratios):.2f} to {max(ratios):.2f} times the model's, {outside} outside a factor of {BAND}"
    )
    return exchanges


if __name__ == "__main__":
    main()
