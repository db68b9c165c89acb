"""`python -m benchmarks.network`: launch, latency and bandwidth of each axis of a mesh, fitted to collectives.

It prints by which factor each time is off the fit, and the fitted `cost.Topology`, for
`SequenceParallel(topology=...)`; all is written to `network.json`. In a job of several processes all of them run it.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from energy_attn.distributed import cost, initialize, make_mesh
from energy_attn.distributed.internal import network as modelled

from .command import parser_of, write
from .runner import machine, seconds_of

# Payloads of a device, in bytes, and how many collectives one program has, each waiting for the last.
SIZES = {4096: 8, 1 << 18: 2, 1 << 22: 2}
# A collective that takes long is timed fewer times.
SECONDS, LEAST = 1.0, 3


class Timing(NamedTuple):
    """A collective along one axis: its payload in bytes, and the median seconds of one."""

    axis: str
    kind: modelled.Kind
    bytes: int
    seconds: float


def _collectives(axis: str, devices: int) -> dict[modelled.Kind, Callable[[int, Array], Array]]:
    """Collectives of each kind for the body of a loop: `[1, N]` to `[1, N]`, a gather to `[devices, N]`."""
    following = [(i, (i + 1) % devices) for i in range(devices)]
    return {
        "collective-permute": lambda _, x: lax.ppermute(x, axis, following),
        "all-gather": lambda i, x: lax.all_gather(x[i % devices], axis),
        "all-reduce": lambda _, x: lax.pmean(x, axis),
        "all-to-all": lambda _, x: lax.all_to_all(
            x.reshape(devices, -1), axis, 0, 0, tiled=True
        ).reshape(1, -1),
    }


def measure(mesh: Mesh, repeats: int, shrink: int = 1) -> list[Timing]:
    """Times small and large collectives along each axis of several devices."""
    timings = []
    for axis, devices in mesh.shape.items():
        if devices == 1:
            continue
        for kind, collective in _collectives(axis, devices).items():
            for size, times in SIZES.items():
                length = -(-size // shrink // (4 * devices)) * devices  # an equal part for each
                shape = (devices if kind == "all-gather" else 1, length)
                each = _seconds(mesh, collective, shape, times, repeats)
                timings.append(Timing(axis, kind, 4 * length, each))
    return timings


def _seconds(
    mesh: Mesh,
    collective: Callable[[int, Array], Array],
    shape: tuple[int, int],
    times: int,
    repeats: int,
) -> float:
    """Seconds of one float32 collective on the slowest device."""
    everywhere = P(mesh.axis_names)

    def repeated(x: Array) -> Array:
        return lax.fori_loop(0, times, collective, x)

    specs: Any = {"mesh": mesh, "in_specs": everywhere, "out_specs": everywhere}
    x = jax.make_array_from_callback(
        (mesh.size * shape[0], shape[1]),
        NamedSharding(mesh, everywhere),
        lambda _: np.ones(shape, jnp.float32),
    )
    run = functools.partial(jax.jit(jax.shard_map(repeated, **specs, check_vma=False)), x)
    jax.block_until_ready(run())  # compiles, and opens connections
    first = seconds_of(run)
    # all processes have to run it equally often
    first = float(multihost_utils.broadcast_one_to_all(np.float32(first)))
    number = int(np.clip(SECONDS / first, min(LEAST, repeats), repeats))
    median = statistics.median(seconds_of(run) for _ in range(number)) / times
    return float(np.max(multihost_utils.process_allgather(np.float32(median))))


def fit(timings: Sequence[Timing], axes: Sequence[str], usual: cost.Topology) -> cost.Topology:
    """The launch and overhead of a topology, and the latencies and bandwidths of its links, closest to timings.

    The model's seconds are linear in them. The fit minimises a robust sum of squared logarithms of measured
    over predicted, as other programs may disturb some timings.
    """
    count = 2 + 2 * sum(link.devices > 1 for link in usual.links)
    units = [_network(usual, row) for row in np.eye(count)]
    matrix = np.array([[_modelled(timing, axes, unit) for unit in units] for timing in timings])
    taken = np.array([timing.seconds for timing in timings])
    begin, _ = scipy.optimize.nnls(matrix / taken[:, None], np.ones_like(taken))
    fitted = scipy.optimize.least_squares(
        lambda logarithms: np.log(matrix @ np.exp(logarithms) / taken),
        np.log(np.maximum(begin, 1e-12)),
        loss="soft_l1",
    )
    return _network(usual, np.exp(fitted.x))


def _modelled(timing: Timing, axes: Sequence[str], network: cost.Topology) -> float:
    """The seconds of a collective by the model."""
    transfer = modelled.Transfer(timing.kind, timing.bytes, (axes.index(timing.axis),))
    return modelled.seconds(transfer, network)


def _network(usual: cost.Topology, seconds: np.ndarray) -> cost.Topology:
    """The network with a launch, an overhead, and for each link of several devices a latency and a byte's seconds."""
    launch, overhead, *pairs = (_rounded(x) for x in seconds)
    rest = iter(pairs)
    links = tuple(
        dataclasses.replace(
            link, latency=next(rest), bandwidth=_rounded(1 / max(next(rest), 1e-15))
        )
        if link.devices > 1
        else link
        for link in usual.links
    )
    return dataclasses.replace(usual, links=links, launch=launch, overhead=overhead)


def _rounded(x: float) -> float:
    return float(f"{x:.4g}")


def named_sizes(text: str) -> dict[str, int]:
    """The sizes of `node=2,device=4` by name."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {name.strip(): int(size) for name, size in pairs}
    except ValueError as reason:
        raise argparse.ArgumentTypeError(f"wanted NAME=SIZE,..., got {text!r}") from reason


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures a mesh of the devices, prints the fit, and writes `network.json` from the first process."""
    parser = parser_of("benchmarks.network", __doc__)
    parser.add_argument(
        "--mesh",
        type=named_sizes,
        metavar="NAME=SIZE,...",
        help="the mesh, slow axes first; default: node and device, by processes or slices",
    )
    args = parser.parse_args(arguments)
    initialize()
    sizes = args.mesh
    mesh = make_mesh(tuple(sizes.values()), tuple(sizes)) if sizes else make_mesh()
    if mesh.size == 1:
        parser.error("--mesh: wanted two or more devices, got one")
    timings = measure(mesh, args.repeats, args.shrink)
    usual = cost.topology(mesh)
    fitted = fit(timings, mesh.axis_names, usual)
    rows = [
        timing._asdict()
        | {
            "fitted": _rounded(_modelled(timing, mesh.axis_names, fitted)),
            "seconds": _rounded(timing.seconds),
        }
        for timing in timings
    ]
    if jax.process_index() == 0:
        worst = max(max(x["seconds"] / x["fitted"], x["fitted"] / x["seconds"]) for x in rows)
        for row in rows:
            took, by_fit = 1e3 * row["seconds"], 1e3 * row["fitted"]
            print(
                f"{row['axis']:10} {row['kind']:18} {row['bytes']:9} B {took:9.3f} ms, fitted {by_fit:9.3f}"
            )
        print(f"every time within a factor of {worst:.2f} of the fit")
        result = {
            "machine": machine(),
            "worst_factor": round(worst, 2),
            "topology": dataclasses.asdict(fitted),
            "times": rows,
        }
        write(args.out / "network.json", result)
        print(f"measured: {fitted}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
