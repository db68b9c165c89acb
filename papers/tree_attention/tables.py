"""Tables 1 and 2 of the paper's later text on the available devices.

    python papers/tree_attention/tables.py --devices 8 --prompts 8192,16384,32768
    python papers/tree_attention/tables.py --processes 2,4 --prompts 8192,16384
    python papers/tree_attention/tables.py --aot h200,rtx4090

A prompt is read, and ten tokens are decoded from a cache that is sharded over all devices: by the tree, by the ring
of keys that the paper compares with, and by a ring of the queries' states. Times are means of ten repetitions with
their standard errors, without compilation and a first repetition. The paper's times and the cost model's predictions
for its machines are printed as well.

By default the devices are those that JAX finds; `--devices` simulates a number of them on the CPU. `--processes`
starts processes on this machine, with `--devices` devices each, which communicate by gloo over loopback. The model is
the library's model of bytes with 0.9 million weights, whose values do not change times.

`--aot` compiles the paper's models for other machines, and prints their memory and communication: for GPUs with CUDA's
compiler (see `make test-cuda`), for TPUs with libtpu.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _report import case_table, draw_tables, integers, machine, paper_table, run_table, write

TARGETS = ("h200", "rtx4090", "v5p", "v5e")
WORKER = Path(__file__).with_name("_tables_run.py")
SECONDS = 3600  # limit for each number of processes
LAUNCH = Path(__file__).parents[2] / "examples/cluster/launch.py"


def main() -> int:
    """Measures or compiles, prints tables, and writes JSON and a figure."""
    args = arguments()
    prepare(args)
    result = {"machine": machine(), **(compiled(args) if args.aot else measured(args))}
    write(args.out / f"{args.name}.json", result, None if args.aot else draw_tables)
    rows = [row for run in result.get("runs", ()) for row in run["rows"]]
    wrong = [x for row in rows for x in row["methods"].values() if not x["same_tokens"]]
    if wrong:
        print(f"tables: tokens differ from the tree's {len(wrong)} times", file=sys.stderr)
    return int(bool(wrong))


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="The paper's tables 1 and 2.")
    add = parser.add_argument
    add("--prompts", type=integers, default=[8192, 16384, 32768], help="lengths, in tokens")
    add("--devices", type=int, help="simulated devices, of each process")
    add("--processes", type=integers, help="numbers of processes on this machine")
    add("--aot", type=lambda text: text.split(","), help=f"compile for {', '.join(TARGETS)}")
    add("--out", type=Path, default=Path("tables"), help="folder for the results")
    add("--name", default="tables", help="name of the files")
    args = parser.parse_args()
    counts = {"prompts": args.prompts, "devices": [args.devices], "processes": args.processes}
    for name, values in counts.items():
        if any(x is not None and x < 1 for x in values or ()):
            parser.error(f"--{name}: wanted 1 or more, got {values}")
    for target in args.aot or ():
        if target not in TARGETS:
            parser.error(f"--aot: wanted some of {', '.join(TARGETS)}, got {target}")
    return args


def prepare(args: argparse.Namespace) -> None:
    """Sets environment variables before JAX and Equinox read them."""
    # the cache's check for room would wait for the device at each step
    os.environ.setdefault("EQX_ON_ERROR", "off")
    if args.aot:
        os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is run
    elif args.devices and not args.processes:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={args.devices}"
        os.environ["JAX_PLATFORMS"] = "cpu"


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the protocol on the devices of this process or in each group of processes."""
    from _tables_paper import ASSUMPTIONS, TOKENS, paper_rows
    from _tables_run import REPETITIONS, run

    runs = []
    for group_run in by_processes(args) if args.processes else [run(args.prompts)]:
        runs.append(group_run)
        print(run_table(group_run), flush=True)
    paper = paper_rows()
    print(paper_table(paper), *ASSUMPTIONS, sep="\n- ")
    return {
        "model": "bytes",
        "tokens": TOKENS,
        "repetitions": REPETITIONS,
        "runs": runs,
        "paper": paper,
        "assumptions": ASSUMPTIONS,
    }


def by_processes(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures with each number of processes; stops at the first failure."""
    for number in args.processes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "result.json")
            launch = [sys.executable, str(LAUNCH), "-n", str(number)]
            launch += ["--devices", str(args.devices or 1), "--timeout", str(SECONDS)]
            command = [*launch, "--", str(WORKER), json.dumps(args.prompts), str(path)]
            ended = subprocess.run(command, stdout=subprocess.DEVNULL)
            if ended.returncode:
                raise SystemExit(ended.returncode)
            yield json.loads(path.read_text())


def compiled(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles the paper's models for the selected targets."""
    from _tables_aot import CASES, TARGETS, compile_case

    cases = []
    for case in CASES:
        if case.target in args.aot:
            cases.append(compile_case(case, TARGETS[case.target]))
            print(case_table(cases[-1]), flush=True)
    return {"cases": cases}


if __name__ == "__main__":
    sys.exit(main())
