"""Measured exchanges of decode steps, compared with the current cost model."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import binom

from energy_attn.distributed import cost
from energy_attn.distributed.internal import STRATEGIES
from energy_attn.distributed.internal import network as modelled

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
# Committed results of `latency.py`: those to which the model's constants were fitted, and others.
FITTED = ("latency", "latency-devices")
UNSEEN = ("latency-scatter", "latency-10g-devices")
# Seconds of a core for one message of gloo's; the devices that share this machine's cores wait in turn.
OVERHEAD = 2.5e-4
# The model is to be right within this factor.
BAND = 1.5
SCATTERS = {"sums": STRATEGIES["allreduce"], "exchange": STRATEGIES["gather"]}


class Point(NamedTuple):
    """One exchange: the median time without attention, a 95% interval of it, and the model's time, in ms."""

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
    """The network of a run, with all hosts on the cores of one machine: as plain sockets measured it, else as named."""
    hosts, devices, network = run["hosts"], run["devices"], run["network"]
    named = {"round_trip_ms": 2 * network["latency_ms"], "mbit": network["mbit"]}
    seen = network.get("measured", named)
    mbit = min(seen["mbit"], seen.get("mbit_together", seen["mbit"]))
    return cost.topology(
        *("ethernet", (devices,) if devices > 1 else ()),
        nodes=hosts,
        latency=1e-3 * seen["round_trip_ms"],
        bandwidth=mbit * 1e6 / 8 / devices,
        overhead=OVERHEAD * max(1.0, hosts * devices / cores),
    )


def transfers(
    name: str, auto: str, shape: cost.Shape, network: cost.Topology
) -> tuple[modelled.Transfer, ...]:
    """Transfers of a method of `latency.py` by the model; none where the model does not know the method."""
    method, _, merge = name.partition(", ")
    if method == "scatter":
        return tuple(SCATTERS[merge].scatter_transfers(shape.rows, shape, network))
    merge = auto if merge == "auto" else merge
    return tuple(cost.transfers(method, merge, shape, network)) if merge else ()


def points(result: dict[str, Any]) -> Iterator[Point]:
    """Every exchange in a result of `latency.py` but `auto`, which repeats another one.

    An exchange is a step less the attention in it, which is measured alone: a device's to its own keys,
    and in a ring of keys one to each device's, after another.
    """
    for run in result["runs"]:
        network, heads = topology(run, result["machine"]["cores"]), result["heads"]
        sizes = 1, 1, run["keys"], heads, heads, result["width"]
        shape = cost.Shape(*sizes, dtype=result["dtype"])
        turns = {row["method"]: row["turns_ms"] for row in run["rows"]}
        alone = turns.pop("no exchange")
        for method, times in turns.items():
            sent = transfers(method, run["auto"], shape, network)
            if not sent or method.endswith("auto"):
                continue
            count = run["hosts"] * run["devices"] if method == "ring, keys" else 1
            (low, high), (least, most) = interval(times), interval(alone)
            yield Point(
                method,
                statistics.median(times) - count * statistics.median(alone),
                low - count * most,
                high - count * least,
                round(1e3 * sum(x.count * modelled.seconds(x, network) for x in sent), 3),
            )


def interval(turns: Sequence[float]) -> tuple[float, float]:
    """A 95% confidence interval of the median, from ranks of a binomial."""
    first = max(int(binom.ppf(0.025, len(turns), 0.5)) - 1, 0)
    return sorted(turns)[first], sorted(turns)[-1 - first]


def exchanges(names: Sequence[str]) -> list[Point]:
    """The exchanges of committed runs."""
    return [x for name in names for x in points(json.loads((FOLDER / f"{name}.json").read_text()))]
