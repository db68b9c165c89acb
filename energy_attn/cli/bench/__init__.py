"""`python -m energy_attn bench`: times and memory beside `jax.nn`, cuDNN, flash-attn-jax, PyTorch, transformers.

All sides run in one process, compiled and warmed up, and take turns; a figure is a ratio of
medians. The results are a JSON file and a plot, which needs the extra `bench`. Peers that are not
installed are left out, and named.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from energy_attn.kernels.internal import platform_here

from .. import first_light
from ._cases import JAX_NN, ONE_GRADIENT, ONE_PASS, OURS, Case, Run, Sizes, numbers
from ._derivatives import DERIVATIVES
from ._energies import BACKWARD, ENERGIES
from ._generation import CONTINUATIONS, Continuation
from ._llama import PASSES, Pass
from ._masks import CAUSAL, MASKS, MaskCase
from ._measure import Traffic, machine, measure, traffic
from ._network import named_sizes
from ._network import run as run_network
from ._observables import JOBS
from ._plot import plot
from ._program import compilation, memory
from ._speculative import DECODE, TREE_JOBS, TreeJob
from ._tune import add_arguments as add_tune_arguments
from ._tune import run as run_tune

_HEADS = {"heads": 16, "kv_heads": 16, "width": 64}
_LLAMA = {"heads": 32, "kv_heads": 8, "width": 128}
_PAPER = {"heads": 16, "kv_heads": 16, "width": 128}
SUITES: dict[str, tuple[Case | TreeJob | Continuation | Pass | MaskCase, ...]] = {
    "cpu": (
        Case("prefill", Sizes(1, 2048, 2048, **_HEADS), "float32"),
        Case("prefill", Sizes(1, 2048, 2048, **_HEADS), "bfloat16"),
        Case("decode", Sizes(1, 1, 65536, **_HEADS), "float32"),
        Case("decode", Sizes(1, 1, 65536, **_HEADS), "bfloat16"),
        Case("decode", Sizes(1, 1, 262144, **_HEADS), "float32"),
        Case("decode", Sizes(1, 1, 262144, **_HEADS), "bfloat16"),
        Case("forward + backward", Sizes(1, 2048, 2048, **_HEADS), "float32", backward=True),
        Case("jax.grad of F", Sizes(1, 2048, 2048, **_HEADS), "float32", bare=True),
    ),
    "gpu": (
        *(
            Case("prefill", Sizes(1, 1024 * k, 1024 * k, **_PAPER), "bfloat16", causal=True)
            for k in (4, 8, 16, 32)
        ),
        *(
            Case("decode", Sizes(1, 1, 1024 * k, **_LLAMA), "bfloat16")
            for k in (64, 256, 1024, 4096)
        ),
        *(
            Case(
                "forward + backward",
                Sizes(1, 1024 * k, 1024 * k, **_PAPER),
                "bfloat16",
                backward=True,
                causal=True,
            )
            for k in (4, 8, 16)
        ),
        Case("jax.grad of F", Sizes(1, 8192, 8192, **_PAPER), "bfloat16", causal=True, bare=True),
        Case("jax.grad of F", Sizes(1, 1, 262144, **_LLAMA), "bfloat16", bare=True),
    ),
    "observables": tuple(Case(name, Sizes(1, 2048, 2048, **_HEADS), "float32") for name in JOBS),
    "derivatives": tuple(
        Case(name, Sizes(1, 2048, 2048, **_HEADS), "float32") for name in DERIVATIVES
    ),
    "energies": tuple(
        Case(name, Sizes(1, 2048, 2048, **_HEADS), "float32", backward=name.endswith(BACKWARD))
        for name in ENERGIES
    ),
    "speculative": (*TREE_JOBS, *CONTINUATIONS),
    "llama": PASSES,
    "masks": MASKS,
}
NETWORK = "network"  # measures the mesh at hand, and compares nothing
FIRST_LIGHT = "first-light"  # checks and measures the kernels for GPUs, each by its name
TUNE = "tune"  # measures the tiles of `pallas_gpu`
# the options that only some suites have
OPTIONS = {
    NETWORK: ("mesh",),
    FIRST_LIGHT: first_light.OPTIONS,
    TUNE: ("dry_run", "dtype", "width"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    parser.add_argument(
        "--suite",
        choices=(*SUITES, NETWORK, FIRST_LIGHT, TUNE),
        help="for CPUs or GPUs, observables, derivatives, energies, trees, a decoder, masks, the network of a mesh, "
        "every kernel on a GPU that none has run on, or the tiles of pallas_gpu; default: the machine's",
    )
    parser.add_argument(
        "--mesh",
        type=named_sizes,
        metavar="NAME=SIZE,...",
        help="the mesh whose network is measured, slow axes first; default: node and device, by processes or slices",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench"), help="folder for the results (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=9, help="timings of each side (%(default)s)")
    parser.add_argument(
        "--shrink", type=int, default=1, help="divisor of sequence lengths, for a trial"
    )
    first_light.add_arguments(parser)
    add_tune_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures every case, prints a table, and writes `<suite>.json` and `<suite>.svg`.

    The suite `network` writes `topology.json`; `tune` and `first-light` write no plot. Returns 0, or 2 for a
    wrong option, or without matplotlib.
    """
    if args.repeats < 1 or args.shrink < 1:
        print("bench: --repeats and --shrink want numbers of at least 1", file=sys.stderr)
        return 2
    for name in sorted({name for names in OPTIONS.values() for name in names}):
        suites = [suite for suite, names in OPTIONS.items() if name in names]
        if getattr(args, name) not in (None, False) and args.suite not in suites:
            option = f"--{name.replace('_', '-')}"
            print(f"bench: {option} is for --suite {' or '.join(suites)}", file=sys.stderr)
            return 2
    if args.suite == NETWORK:
        return run_network(args)
    if args.suite == FIRST_LIGHT:
        return first_light.run(args)
    if args.suite == TUNE:
        return run_tune(args)
    if importlib.util.find_spec("matplotlib") is None:
        print(
            "bench: matplotlib is not installed; the extra `bench` brings it: pip install '.[bench]'",
            file=sys.stderr,
        )
        return 2
    platform = platform_here()
    suite = args.suite or ("gpu" if platform == "cuda" else "cpu")
    memory_traffic = traffic(platform, max((2**30) // args.shrink, 2**16))
    found = measure({"memory": memory_traffic.run}, args.repeats)
    rate = memory_traffic.rate(found["memory"])
    print(f"memory: {rate / 1e9:.1f} GB/s ({memory_traffic.name})")
    rows = []
    for case in SUITES[suite]:
        case = case.shrunk(args.shrink)
        found, absent = case.sides(platform)
        rows.append(_row(case, found, absent, args.repeats, memory_traffic))
        print(_line(rows[-1]), flush=True)
    of_memory = memory(args.shrink)
    share = of_memory["bytes"][OURS] / of_memory["bytes"][JAX_NN]
    print(
        f"{'temporary memory':20} {of_memory['dtype']:9} {'':15}"
        f"{of_memory['bytes'][OURS] / 2**20:8.0f} MiB  {100 * share:.2f}% of {JAX_NN}'s"
    )
    result = {
        "machine": machine(),
        "suite": suite,
        "repeats": args.repeats,
        "bandwidth": {"GB_per_s": round(rate / 1e9, 2), "measured_by": memory_traffic.name},
        "times": rows,
        "memory": of_memory,
    }
    if suite == "cpu":
        result["compilation"] = compilation(args.shrink, args.repeats)
        for row in result["compilation"]:
            sides = "  ".join(f"{x:.2f} s {name}" for name, x in row["median_s"].items())
            causal = "causal" if row["causal"] else ""
            print(f"{'compilation':20} {row['layers']:2} layers {causal:7} {sides}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{suite}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {args.out / suite}.json")
    plot(result, args.out / f"{suite}.svg")
    print(f"wrote {args.out / suite}.svg")
    return 0


def _row(
    case: Case | TreeJob | Continuation | Pass | MaskCase,
    found: dict[str, Run],
    absent: dict[str, str],
    repeats: int,
    memory_traffic: Traffic,
) -> dict[str, Any]:
    differences = _differences(found)
    # in turn with what is a share of it: machines change their speed
    beside = {"memory": memory_traffic.run} if case.name == "decode" else {}
    seconds = measure(found | beside, repeats)
    of_memory = seconds.pop("memory", None)
    medians = {name: statistics.median(runs) for name, runs in seconds.items()}
    row = {
        "name": case.name,
        **case.about(),
        "sizes": case.sizes,
        "median_ms": {name: _ms(x) for name, x in medians.items()},
        "runs_ms": {name: list(map(_ms, runs)) for name, runs in seconds.items()},
        "times_faster": {
            name: round(x / medians[OURS], 2) for name, x in medians.items() if name != OURS
        },
        "largest_difference": differences,
        "absent": absent,
    }
    if isinstance(case, Case) and of_memory is not None:  # keys and values are read once
        rate = memory_traffic.rate(of_memory)
        row["GB_per_s"] = round(rate / 1e9, 2)
        row["of_bandwidth"] = {
            name: round(case.key_bytes / x / rate, 2) for name, x in medians.items()
        }
    return row


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")


def _differences(found: dict[str, Run]) -> dict[str, float]:
    """For each peer, the largest difference of its results from ours, relative to the largest entry."""
    ours = numbers(found[OURS]())

    def difference(name: str) -> float:
        theirs = numbers(found[name]())
        pairs = zip(ours, theirs, strict=True)
        largest = max(np.abs(a - b).max() / np.abs(a).max() for a, b in pairs)
        return float(f"{largest:.2g}")

    of_ours = (OURS, ONE_PASS, ONE_GRADIENT, DECODE, CAUSAL)
    return {name: difference(name) for name in found if name not in of_ours}


def _line(row: dict[str, Any]) -> str:
    against = "  ".join(f"{x:.2f}× faster than {name}" for name, x in row["times_faster"].items())
    of = f"  {row['of_bandwidth'][OURS]:.2f} of the bandwidth" if "of_bandwidth" in row else ""
    return (
        f"{row['name']:20} {row['dtype']:9} {row['sizes']:17} {row['median_ms'][OURS]:8.4g} ms  "
        f"{against}{of}"
    )
