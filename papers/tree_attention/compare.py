"""Compares committed measurements of `latency.py` with the current cost model.

    python papers/tree_attention/compare.py FITTED.json ... --unseen OTHER.json ... --out measured.svg

Updates the model's figures in the files, prints each exchange, and draws measured against predicted times: hollow
where the model's constants were not fitted to them. Nothing is measured.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _report import draw_points
from _worker import HEADS, WIDTH

from energy_attn.distributed import cost
from energy_attn.distributed.internal import STRATEGIES
from energy_attn.distributed.internal import network as modelled

ALONE, KEYS = "no exchange", "ring, keys"
# Seconds of a core for one message of gloo's; the devices that share this machine's cores wait in turn.
OVERHEAD = 2.5e-4
# The model is to be right within this factor.
BAND = 1.5
SCATTERS = {"sums": STRATEGIES["allreduce"], "exchange": STRATEGIES["gather"]}


class Point(NamedTuple):
    """One exchange: the median time without attention, a 95% interval of it, and the model's time, in ms."""

    hosts: int
    devices: int
    mbit: float
    latency_ms: float
    keys: int
    method: str
    measured: float
    low: float
    high: float
    predicted: float

    @property
    def resolved(self) -> bool:
        """Whether the interval is narrower than the band; if not, the point does not test the model."""
        return 0 < self.low and self.high <= BAND**2 * self.low

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


def topology(run: dict[str, Any], cores: int) -> cost.Topology:
    """The network of a run, as measured with plain sockets, with all hosts on the cores of one machine.

    Over loopback, which is not measured, it is the default for processes of JAX.
    """
    hosts, devices, seen = run["hosts"], run["devices"], run["network"].get("measured")
    within = (devices,) if devices > 1 else ()
    if seen is None:
        return cost.topology("ethernet", within, nodes=hosts)
    mbit = min(seen["mbit"], seen.get("mbit_together", seen["mbit"]))
    return cost.topology(
        *("ethernet", within),
        nodes=hosts,
        latency=1e-3 * seen["round_trip_ms"],
        bandwidth=mbit * 1e6 / 8 / devices,
        overhead=OVERHEAD * max(1.0, hosts * devices / cores),
    )


def automatic(keys: int, hosts: int, devices: int) -> str:
    """The strategy of `merge="auto"`, by the default network for processes of JAX."""
    shape = cost.Shape(1, 1, keys, HEADS, HEADS, WIDTH, dtype="float32")
    run = {"hosts": hosts, "devices": devices, "network": {}}
    return cost.choose_merge(shape, topology(run, 1))


def predict(result: dict[str, Any]) -> None:
    """Updates the model's figures in the rows of a result of `latency.py`."""
    for run in result["runs"]:
        network, heads = topology(run, result["machine"]["cores"]), result["heads"]
        shape = cost.Shape(
            *(1, 1, run["keys"], heads, heads, result["width"]), dtype=result["dtype"]
        )
        for row in run["rows"]:
            row["model"] = None
            method, _, merge = row["method"].partition(", ")
            if not merge:
                continue
            if method == "scatter":
                sent = tuple(SCATTERS[merge].scatter_transfers(shape.rows, shape, network))
            else:
                sent = cost.transfers(
                    method, run["auto"] if merge == "auto" else merge, shape, network
                )
            row["model"] = {
                "bytes": sum(x.bytes * x.count for x in sent),
                "rounds": sum(x.count for x in sent),
                "ms": round(1e3 * sum(x.count * modelled.seconds(x, network) for x in sent), 3),
            }


def points(result: dict[str, Any]) -> Iterator[Point]:
    """Every exchange in a result but `auto`, which repeats another one.

    An exchange is a step less the attention in it, which is measured alone: a device's to its own keys,
    and in a ring of keys one to each device's, after another.
    """
    for run in result["runs"]:
        rows = {row["method"]: row for row in run["rows"]}
        alone = rows[ALONE]["turns_ms"]
        for method, row in rows.items():
            if row["model"] is None or method.endswith("auto"):
                continue
            times = run["hosts"] * run["devices"] if method == KEYS else 1
            (low, high), (least, most) = _interval(row["turns_ms"]), _interval(alone)
            network = run["network"]
            yield Point(
                run["hosts"],
                run["devices"],
                network["mbit"],
                network["latency_ms"],
                run["keys"],
                method,
                statistics.median(row["turns_ms"]) - times * statistics.median(alone),
                low - times * most,
                high - times * least,
                row["model"]["ms"],
            )


def _interval(turns: Sequence[float]) -> tuple[float, float]:
    """A 95% confidence interval of the median, from ranks of a binomial."""
    ordered, count = sorted(turns), len(turns)
    rank, below = 0, 0.0
    while True:
        below += math.comb(count, rank) * 0.5**count
        if below > 0.025 or rank >= count // 2:
            break
        rank += 1
    first = max(rank - 1, 0)
    return ordered[first], ordered[count - 1 - first]


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
