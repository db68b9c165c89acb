"""`python -m benchmarks [SUITE ...]`: compares with `jax.nn`, PyTorch and transformers.

Each suite prints a table, and writes `SUITE.json` and, where matplotlib is installed, `SUITE.svg`. Peers that are
not installed are left out, and named.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence

from energy_attn.kernels.internal import platform_here

from . import (
    attention,
    derivatives,
    energies,
    llama,
    loops,
    masks,
    observables,
    queue,
    reproducible,
    small,
    speculative,
    vocabulary,
    windows,
)
from .command import parser_of, write
from .picture import draw
from .runner import Case, run, title

SUITES: dict[str, tuple[Case, ...]] = {
    "cpu": attention.CPU,
    "observables": observables.CASES,
    "derivatives": derivatives.CASES,
    "energies": energies.CASES,
    "masks": masks.CASES,
    "small": small.CASES,
    "loops": loops.CASES,
    "sharded": loops.SHARDED,
    "second_order": loops.SECOND_ORDER,
    "llama": llama.CASES,
    "vocabulary": vocabulary.CASES,
    "speculative": speculative.CASES,
    "queue": queue.CASES,
    "windows": windows.CASES,
    "reproducible_cpu": reproducible.CPU,
    "reproducible_gpu": reproducible.GPU,
    "reproducible_decoder": reproducible.DECODER,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the suites, or that for the machine's processor."""
    parser = parser_of("benchmarks", __doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"some of {', '.join(SUITES)}")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="the cases with this in name, dtype or sizes"
    )
    args = parser.parse_args(arguments)
    for name in args.suites:
        if name not in SUITES:
            parser.error(f"SUITE: wanted some of {', '.join(SUITES)}, got {name!r}")
    if not {"sharded", "speculative", "windows"}.isdisjoint(args.suites):
        # these shard caches; the user's own number comes later and counts
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {flags}"
    names = args.suites or ["loops" if platform_here() == "cuda" else "cpu"]
    chosen = {name: [x for x in SUITES[name] if args.only in title(vars(x))] for name in names}
    for name, cases in chosen.items():
        if not cases:
            parser.error(f"--only: wanted a part of a case of {name}, got {args.only!r}")
    for name, cases in chosen.items():
        result = run(name, cases, args.repeats, args.shrink)
        path = args.out / f"{name}.json"
        write(path, result)
        if importlib.util.find_spec("matplotlib"):
            draw(result, path.with_suffix(".svg"))
            print(f"wrote {path.with_suffix('.svg')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
