"""The paper's figure 3 at a small scale: decode steps over hosts, by every way to exchange partial results.

    python examples/cluster/launch.py -n 4 -- -m papers.tree_attention.latency
    sudo papers/tree_attention/hosts.sh 4 1 1000 0.2 -m papers.tree_attention.latency --mbit 1000 --latency-ms 0.2

Every process of a job runs it, as on a cluster: over loopback by `launch.py`, over emulated links by `hosts.sh`. A
decode step in float32 with keys sharded over all devices is timed by each merge strategy of the tree, by the three
all-reduces of the paper's listing, by scatters of states, and by rings in which queries or keys travel. Every answer is
compared with float64. `compare.py` compares times with the cost model.
"""

import argparse
import collections
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import (
    collectives,
    cost,
    initialize,
    make_mesh,
    methods,
    place,
    sharded_attention,
)
from energy_attn.distributed.internal import STRATEGIES
from energy_attn.kernels import AttentionState, local_attention
from tests.support import problems, reference

from ._results import add

HEADS, WIDTH = 16, 64
TOLERANCE = 2e-6  # of an answer in float32: sixteen roundings of a mean of normal values
ALONE = "no exchange"
STEPS = 4  # timed steps of a turn


def exchanges(axes: tuple[str, ...], devices: int) -> dict[str, Callable[..., Any]]:
    """Every method by name, from query, key and value of a device to `out` of the query.

    A scatter of states leaves each device its part of the heads, which is all that it needs where the weights
    are sharded by head over the same devices; it is left out where these do not divide the heads.
    """

    def three_reductions(query: Any, key: Any, value: Any) -> Any:
        out, lse = local_attention(query, key, value)
        weight = jnp.exp(lse - lax.pmax(lse, axes))
        numerator = lax.psum(out * weight[..., None], axes)
        return numerator / lax.psum(weight, axes)[..., None]

    def over(method: methods.Tree | methods.Ring) -> Callable[..., Any]:
        options: dict[str, Any] = {"axis_name": axes, "method": method, "queries_sharded": False}
        return lambda *arrays: sharded_attention(*arrays, **options).out

    def scatter(strategy: str) -> Callable[..., Any]:
        def by_device(x: Any) -> Any:
            parts = x.reshape(*x.shape[:2], devices, HEADS // devices, *x.shape[3:])
            return jnp.moveaxis(parts, 2, 0)

        def scattered(*arrays: Any) -> Any:
            state = AttentionState(*map(by_device, local_attention(*arrays)))
            return STRATEGIES[strategy].scatter(state, axes).out

        return scattered

    merges = ["allreduce", "gather", "butterfly", "halving"]
    merges += [*["hierarchical"] * (len(axes) > 1), "auto"]
    scatters = {"scatter, sums": "allreduce", "scatter, exchange": "gather"}
    return {
        ALONE: lambda *arrays: local_attention(*arrays).out,
        "pmax + psum + psum": three_reductions,
        **{f"tree, {merge}": over(methods.Tree(merge)) for merge in merges},
        **{name: scatter(x) for name, x in scatters.items() if HEADS % devices == 0},
        "ring, queries": over(methods.Ring("queries")),
        "ring, keys": over(methods.Ring("keys")),
    }


def normal(length: int, *seed: int) -> np.ndarray:
    """Standard normal numbers, `[1, length, N, H]` in float32."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((1, length, HEADS, WIDTH), dtype=np.float32)


def shard(keys: int, host: int, hosts: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of one host."""
    return normal(keys // hosts, keys, host, 0), normal(keys // hosts, keys, host, 1)


def answer(keys: int, hosts: int) -> np.ndarray:
    """The output `[N, H]` in float64 by the judge of the tests: computed by the first process, sent to all."""
    out = np.zeros((HEADS, WIDTH))
    if jax.process_index() == 0:
        shards = [shard(keys, host, hosts) for host in range(hosts)]
        arrays = normal(1, keys), *(np.concatenate(x, axis=1) for x in zip(*shards, strict=True))
        whole = problems.Problem("latency", *(x.astype(np.float64) for x in arrays))
        out = reference.dense(whole)[0][0, 0]
    words = multihost_utils.broadcast_one_to_all(out.view(np.uint32))  # JAX may have no float64
    return np.asarray(words).view(np.float64)


class Side:
    """A compiled method, and what this process has measured of it."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.milliseconds: list[float] = []
        self.error = 0.0

    def turn(self, arrays: Sequence[Any], expected: np.ndarray | None) -> None:
        """Runs a step that does not count, then some that do; checks the answer of each."""
        jax.block_until_ready(self.program(*arrays))
        outs, start = [], time.perf_counter()
        for _ in range(STEPS):  # decoding is one step after another
            outs.append(jax.block_until_ready(self.program(*arrays)))
        self.milliseconds.append(1e3 * (time.perf_counter() - start) / STEPS)
        if expected is not None:
            for part in (part for out in outs for part in out.addressable_shards):
                out = np.asarray(part.data, np.float64)[0, 0, 0]
                heads = expected.reshape(-1, *out.shape)  # a part of them after a scatter
                error = abs(out - heads[(part.index[0].start or 0) % len(heads)]).max()
                self.error = max(self.error, float(error))

    def row(self, method: str) -> dict[str, Any]:
        """Measurements over all hosts, and what the program sends."""
        measured = np.array([*self.milliseconds, self.error])
        by_host = np.asarray(multihost_utils.process_allgather(measured)).reshape(-1, measured.size)
        sent, kinds = 0, collections.Counter()
        for collective in collectives(self.program):
            kinds[collective.kind] += collective.count or 0
            sent += collective.bytes * (collective.count or 0)
        return {
            "method": method,
            **over_hosts(by_host[:, :-1]),
            "bytes": sent,
            "rounds": sum(kinds.values()),
            "collectives": dict(kinds),
            "error": float(by_host[:, -1].max()),
        }


def over_hosts(milliseconds: np.ndarray) -> dict[str, Any]:
    """Times of turns `[hosts, turns]`: a step ends when the last host has its answer."""
    turns = [round(float(x), 2) for x in milliseconds.max(0)]
    median = round(statistics.median(turns), 2)
    return {"median_ms": median, "min_ms": min(turns), "max_ms": max(turns), "turns_ms": turns}


def measure(keys: int, mesh: Mesh, turns: int) -> dict[str, Any]:
    """Times every method on `keys` keys, in turns, so that disturbances affect all."""
    host, hosts, axes = jax.process_index(), jax.process_count(), mesh.axis_names
    expected = answer(keys, hosts)
    query = place(normal(1, keys), P(), replicated=True)
    arrays = query, *place(shard(keys, host, hosts), P(None, axes))
    sides = {}
    for name, method in exchanges(axes, mesh.size).items():
        # an axis for the devices: each has its own answer, and each is checked
        mapped = jax.shard_map(
            lambda *arrays, method=method: method(*arrays)[None],
            in_specs=(P(), P(None, axes), P(None, axes)),
            out_specs=P(axes),
        )
        sides[name] = Side(jax.jit(mapped).lower(*arrays).compile())
    for turn in range(turns + 1):
        for name, side in sides.items():
            side.turn(arrays, None if name == ALONE else expected)
            if turn == 0:  # opens connections
                side.milliseconds.clear()
    shape = cost.Shape(1, 1, keys, HEADS, HEADS, WIDTH, dtype="float32")
    return {
        "hosts": hosts,
        "devices": jax.local_device_count(),
        "keys": keys,
        "auto": cost.choose_merge(shape, cost.topology(mesh)),
        "tolerance": TOLERANCE,
        "rows": [side.row(name) for name, side in sides.items()],
    }


def main() -> int:
    """Measures, prints medians, and adds runs to a file; returns 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description="Decode steps over the hosts of a job.")
    option = parser.add_argument
    option("--keys", type=int, nargs="+", default=[2048, 8192, 32768], help="their numbers")
    option("--mbit", type=float, help="rate of each host's link; without it, loopback")
    option("--latency-ms", type=float, default=0.0, help="from host to host, one way")
    option("--turns", type=int, default=30, help="timed turns of each method")
    option("--out", type=Path, default=Path("latency.json"), help="the file of results")
    args = parser.parse_args()
    initialize()
    hosts, devices = jax.process_count(), jax.local_device_count()
    if any(keys < 1 or keys % (hosts * devices) for keys in args.keys):
        parser.error(f"--keys: wanted multiples of {hosts * devices} devices, got {args.keys}")
    axes = {"node": hosts} | ({"device": devices} if devices > 1 else {})
    mesh = make_mesh(tuple(axes.values()), tuple(axes))
    network: dict[str, Any] = {"kind": "loopback"}
    if args.mbit:
        network = {"kind": "network", "mbit": args.mbit, "latency_ms": args.latency_ms}
    with jax.set_mesh(mesh):
        runs = [{"network": network, **measure(keys, mesh, args.turns)} for keys in args.keys]
    if jax.process_index() == 0:
        about = {"heads": HEADS, "width": WIDTH, "dtype": "float32", "steps_per_turn": STEPS}
        add(args.out, "runs", runs, ("network", "hosts", "devices", "keys"), **about)
        for run in runs:
            medians = {row["method"]: row["median_ms"] for row in run["rows"]}
            print(f"{hosts} hosts × {devices}, S = {run['keys']}, ms: {medians}")
    worst = max(row["error"] for run in runs for row in run["rows"])
    if worst > TOLERANCE:
        print(f"latency: an answer differs from float64 by {worst}", file=sys.stderr)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
