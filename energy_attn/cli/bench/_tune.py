"""The suite `tune`: which tiles of `pallas_gpu` are fastest on the GPU at hand, kernel by kernel."""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from energy_attn.kernels import GPUPlan, GPUTiles
from energy_attn.kernels.internal import platform_here

from .._tiles import OURS, TOLERANCE, Call, calls, cores_here, difference, program, trial_calls
from ._measure import machine, measure

LEAST_GAIN = 1.03  # how much faster tiles must be to be kept: less is noise


def run(args: argparse.Namespace) -> int:
    """Measures each call by all tiles, prints the winners, and writes `tune.json`.

    Returns 0, or 2 where there is no GPU of NVIDIA's and no dry run is asked for, or for a dtype or a width that
    the kernel declines.
    """
    here = platform_here()
    if here != "cuda" and not args.dry_run:
        print(
            f"bench: the suite tune measures a GPU of NVIDIA's, got {here}; --dry-run interprets short sequences",
            file=sys.stderr,
        )
        return 2
    trial, widths = args.dry_run, tuple(dict.fromkeys(args.width or ())) or None
    dtypes = args.dtype or ["bfloat16" if here == "cuda" else "float32"]
    found = [
        call
        for dtype in dict.fromkeys(dtypes)
        for call in (trial_calls(dtype, widths) if trial else calls(args.shrink, dtype, widths))
    ]
    for call in found:
        reason = declined(call)
        if reason is not None:
            asked = f"--dtype {call.dtype} --width {call.width}"
            print(f"bench: {asked}: pallas_gpu declines {call.label}: {reason}", file=sys.stderr)
            return 2
    chosen, rows = [], []
    for call in found:
        best, row = tune(call, args.repeats)
        rows.append(row)
        print(_line(row), flush=True)
        if best is not None:
            chosen.append(best)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "tune.json"
    result = {"machine": machine(), "times": rows, "dry_run": trial}
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {path}; its tiles: PallasGPU({GPUPlan(tuple(chosen))})")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite, which other suites do not have."""
    group = parser.add_argument_group("tune")
    group.add_argument(
        "--dtype",
        action="append",
        choices=("float16", "bfloat16", "float32", "float64"),
        help="of the calls that are tuned; may be repeated (default: bfloat16)",
    )
    group.add_argument(
        "--width",
        action="append",
        type=_width,
        help="of heads, likewise, for many rows and for few (default: 128 for both, and 64 for many)",
    )


def _width(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"wanted a number of at least 1, got {text!r}")
    return int(text)


def declined(call: Call) -> str | None:
    """Why `pallas_gpu` does not take a call, by its shapes; None: it does."""
    try:
        with jax.enable_x64(call.dtype == "float64"):
            jax.eval_shape(program(call, None), *call.shapes)
    except NotImplementedError as reason:
        return str(reason)
    return None


def tune(call: Call, repeats: int) -> tuple[GPUTiles | None, dict[str, Any]]:
    """The tiles that are fastest for a call, None if those that it has are; and all times.

    Tiles whose results differ from those of the library's own are not kept, however fast.
    """
    device = jax.devices()[0]
    arrays = call.arrays()
    found: dict[str, Callable[[], Any]] = {OURS: _side(call, arrays, None)}
    wanted = found[OURS]()
    tiles, absent = call.tiles(cores_here()), {}
    for name, given in tiles.items():
        side = _side(call, arrays, given)
        try:
            differs = difference(side(), wanted)
        except Exception as reason:  # the kernel declines them, or a compiler fails: a result
            absent[name] = f"{type(reason).__name__}: {reason}".splitlines()[0][:200]
            continue
        if differs <= TOLERANCE:
            found[name] = side
        else:
            absent[name] = f"differs by {differs:.2g} of the largest entry"
    seconds = {
        name: statistics.median(x) / call.steps for name, x in measure(found, repeats).items()
    }
    best = min(seconds, key=lambda name: seconds[name])
    gain = seconds[OURS] / seconds[best]
    row = {
        "call": call.label,
        "sizes": call._asdict() | {"candidates": len(call.candidates)},
        "dtype": call.dtype,
        "seconds": {name: float(f"{x:.4g}") for name, x in seconds.items()},
        "best": best,
        "times_faster": round(gain, 3),
        "absent": absent,
    }
    if best == OURS or gain < LEAST_GAIN:
        return None, row
    kept = dataclasses.replace(
        tiles[best],
        device=device.device_kind,
        dtype=call.dtype,
        width=call.width,
        value_width=call.width,
        call_rows=call.call_rows,
        score=False,
        few_keys=call.few_keys,
    )
    return kept, row


def _side(call: Call, arrays: list[Array], tiles: GPUTiles | None) -> Callable[[], Any]:
    run = jax.jit(program(call, tiles))
    return lambda: run(*arrays)


def _line(row: dict[str, Any]) -> str:
    times, best = row["seconds"], row["best"]
    kept = "" if row["times_faster"] >= LEAST_GAIN else ", not kept"
    return (
        f"{row['call']:53} {1e6 * times[OURS]:10.1f} us; {row['times_faster']:.2f}× faster with {best}{kept}; "
        f"{len(row['absent'])} of {row['sizes']['candidates']} others did not run"
    )
