"""`python -m benchmarks.tune`: finds the fastest tiles of each kernel of `pallas_gpu` on the attached GPU.

It prints the tiles that are faster than the library's own, and writes all times to `tune.json`.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax

from energy_attn.kernels.internal import GPUTiles, platform_here

from .command import at_least_one, parser_of, write
from .runner import OURS, Case, Run, Sides, compare, line, machine
from .tiles import TOLERANCE, Call, calls, cores_here, program, trial_calls

LEAST_GAIN = 1.03  # how much faster tiles must be to be kept: less is noise
DTYPES = "float16", "bfloat16", "float32", "float64"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures each call by all tiles, prints the winners, and writes `tune.json`."""
    parser = parser_of("benchmarks.tune", __doc__)
    add = parser.add_argument
    add("--dry-run", action="store_true", help="interpret short sequences")
    add(
        "--dtype",
        choices=DTYPES,
        action="append",
        help="of the calls that are tuned; may be repeated (default: bfloat16)",
    )
    add(
        "--width",
        type=at_least_one,
        action="append",
        help="of heads, likewise, for many rows and for few (default: 128 for both, and 64 for many)",
    )
    args = parser.parse_args(arguments)
    platform = platform_here()
    if platform != "cuda" and not args.dry_run:
        parser.error(
            f"wanted a GPU of NVIDIA's, got {platform}; --dry-run interprets short sequences"
        )
    widths = tuple(dict.fromkeys(args.width or ())) or None
    dtypes = dict.fromkeys(args.dtype or ["bfloat16" if platform == "cuda" else "float32"])
    tuned_calls = [
        call
        for dtype in dtypes
        for call in (
            trial_calls(dtype, widths) if args.dry_run else calls(args.shrink, dtype, widths)
        )
    ]
    for call in tuned_calls:
        if reason := declined(call):
            options = f"--dtype {call.dtype} --width {call.width}"
            parser.error(f"{options}: pallas_gpu declines {call.label}: {reason}")
    chosen, rows = [], []
    for call in tuned_calls:
        best, row = tune(call, args.repeats)
        rows.append(row)
        verdict = "kept" if best is not None else "not kept"
        out = f"{len(row['absent'])} of {len(call.candidates)} did not run"
        print(f"{line(row)}; best: {row['best']}, {verdict}; {out}", flush=True)
        chosen += [(call.label, best)] if best is not None else []
    result = {"machine": machine(), "times": rows, "dry_run": args.dry_run}
    write(args.out / "tune.json", result)
    for label, tiles in chosen:
        print(f"{label}: {tiles}")
    return 0


def declined(call: Call) -> str | None:
    """The reason why `pallas_gpu` declines a call; None if it takes it."""
    try:
        with jax.enable_x64(call.dtype == "float64"):
            jax.eval_shape(lambda: program(call, None)(*call.arrays()))
    except NotImplementedError as reason:
        return str(reason)
    return None


def compared(call: Call) -> Case:
    """Compares the library's tiles with all candidates."""

    def sides(**_: object) -> Sides:
        arrays = call.arrays()
        choices: dict[str, GPUTiles | None] = {OURS: None, **call.tiles(cores_here())}

        def run(tiles: GPUTiles | None) -> Run:
            return functools.partial(jax.jit(program(call, tiles)), *arrays)

        return {name: functools.partial(run, tiles) for name, tiles in choices.items()}

    return Case(call.label, call.dtype, call.shape | {"steps": call.steps}, sides)


def tune(call: Call, repeats: int) -> tuple[GPUTiles | None, dict[str, Any]]:
    """The fastest tiles of a call, None if these are the library's own; and all times.

    Tiles whose results differ from those of the library's own are not kept, however fast.
    """
    row = compare(compared(call), repeats)
    differs, times = row["largest_difference"], row["times_faster"]
    right = [name for name in times if differs[name] <= TOLERANCE]
    best = min(right, key=lambda name: row["median_ms"][name], default=OURS)
    row["best"] = best
    if best == OURS or row["median_ms"][OURS] < LEAST_GAIN * row["median_ms"][best]:
        return None, row
    return call.tiles(cores_here())[best], row


if __name__ == "__main__":
    sys.exit(main())
