"""`python -m energy_attn plan`: whether a context fits on a mesh, by which method, and what it takes."""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Sequence

from energy_attn.distributed import cost
from energy_attn.distributed import plan as planner
from energy_attn.distributed.internal import CHIPS, METHOD_OPTIONS

from ..models import LlamaConfig
from ..models.checkpoint._config import located
from ._ahead import Compiled, compiled
from ._arguments import count, numbers
from ._planned import LAYOUTS, Planned
from ._planned import Job as Job
from ._planned import planned as planned

_MOST = 2**14  # devices, of which tables list all pairs
_COLUMNS = "method", "layout", "fits", "memory", "sent", "transfers", "products", "exposed", "total"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `plan`."""
    parser.usage = f"{parser.prog} --chip CHIP --axes SIZES --tokens TOKENS --model DIR [options]"
    add = parser.add_argument
    add("--chip", required=True, choices=tuple(CHIPS), help="each device")
    add(
        "--axes",
        type=_axes,
        required=True,
        metavar="SIZES",
        help="the devices that share the context, slow axes first: 8, or 4,4,8 of a torus",
    )
    add("--nodes", type=count, help="nodes (TPU slices) of so many devices each, on a slow axis")
    add(
        "--tokens",
        type=count,
        required=True,
        help="of the context: 32768, 32K (of 1024) or 1M (of 1024²)",
    )
    add(
        "--model",
        required=True,
        help="folder of a checkpoint, or a config.json; demo: the library's own",
    )
    add("--batch", type=count, default=1, help="contexts (%(default)s)")
    add("--method", choices=METHOD_OPTIONS, help="default: all that can be")
    add("--layout", choices=LAYOUTS, help="of the tokens over the devices; default: all")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="(%(default)s)")
    add(
        "--gradients",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether the model is trained on the context, or reads it (%(default)s)",
    )
    add(
        "--tile", type=count, default=512, help="queries and keys of a kernel's block (%(default)s)"
    )
    add(
        "--efficiency",
        type=float,
        help="the part of the peak that products reach; default: the chip's",
    )
    add("--compile", action="store_true", help="compile the attention, too: for TPUs, with libtpu")
    add("--json", action="store_true", help="an object with all numbers in bytes and seconds")


def run(args: argparse.Namespace) -> int:
    """Prints a plan for each method and layout, the fastest first.

    Returns 0, or 2 for an error. Raises `BrokenPipeError` where nobody reads the table any more.
    """
    try:
        _run(args)
    except BrokenPipeError:
        raise
    except (OSError, TypeError, ValueError) as error:
        print(f"energy_attn plan: {error}", file=sys.stderr)
        return 2
    return 0


def _axes(text: str) -> tuple[int, ...]:
    expected = "sizes of mesh axes, as 8 or 4,4,8"
    sizes = numbers(text, ",", expected)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"wanted {expected}, got {text!r}")
    return sizes


def _run(args: argparse.Namespace) -> None:
    job = _job(args)
    plans, refused = _plans(job, args)
    if args.nodes is not None and args.compile:
        raise ValueError("--compile: wanted one slice, got --nodes")
    programs = [_program(job, args, plan) for plan in plans] if args.compile else []
    if args.json:
        rows = [{**x._asdict(), "seconds": x.seconds} for x in plans]
        for row, program in zip(rows, programs, strict=False):
            row["compiled_layer"] = program._asdict()
        found = {"weight_seconds": job.weight_seconds(), "plans": rows, "refused": refused}
        print(json.dumps(found, indent=2))
        return
    _print(job, args, plans, refused)
    for plan, program in zip(plans, programs, strict=False):
        _print_program(job, plan, program)


def _job(args: argparse.Namespace) -> Job:
    model = located(args.model)
    path = model / "config.json" if model.is_dir() else model
    try:
        config = LlamaConfig.from_json(path)
    except (TypeError, ValueError) as error:
        raise type(error)(f"--model: {error}") from error
    try:
        chip = planner.chip(args.chip, efficiency=args.efficiency)
    except ValueError as error:
        raise ValueError(f"--{error}") from error
    topology = cost.topology(chip.network, args.axes, nodes=args.nodes)
    options = args.tokens, args.batch, args.dtype, args.gradients, args.tile
    parts = topology.devices
    if parts > _MOST:
        raise ValueError(f"--axes: wanted at most {_MOST} devices, got {parts}")
    if args.tokens % parts:
        raise ValueError(f"--tokens: wanted a multiple of the {parts} devices, got {args.tokens}")
    return Job(config, chip, topology, *options)


def _plans(job: Job, args: argparse.Namespace) -> tuple[list[Planned], dict[str, str]]:
    """All plans, those that fit and are fast first, and why methods have none."""
    plans, refused = [], {}
    for method in [args.method] if args.method else METHOD_OPTIONS:
        # with whole sequences on each device all layouts are one
        layouts = ("contiguous",) if method == "ulysses" and args.layout is None else LAYOUTS
        for layout in [args.layout] if args.layout else layouts:
            try:
                plans.append(planned(job, method, layout))
            except ValueError as error:
                refused[method] = _reason(str(error))
    if not plans:
        option = "--method" if args.method else "--layout"
        raise ValueError(f"{option}: {'; '.join(refused.values())}")
    return sorted(plans, key=lambda x: (not x.fits, x.seconds)), refused


def _reason(error: str) -> str:
    """The first sentence of an error of the cost model, with the option to type in place of its argument."""
    name, _, rest = error.partition("; ")[0].partition(": ")
    if name == "gradient":
        return "wanted --no-gradients, got --gradients"
    return rest if name == "method" else f"{name}: {rest}"


def _print(
    job: Job, args: argparse.Namespace, plans: list[Planned], refused: dict[str, str]
) -> None:
    what = "forward and backward" if job.gradients else "forward"
    devices, layers = job.topology.devices, job.config.num_hidden_layers
    print(
        f"{job.batch} × {job.tokens} tokens on {devices} {args.chip}, {what}, all {layers} layers\n"
    )
    rows = [_COLUMNS, *(_cells(job, plan) for plan in plans)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    print()
    counted = ", ".join(f"{name} {_bytes(x)}" for name, x in plans[0].memory.items())
    missing = "the backward's buffers, " if job.gradients else ""
    lines = (
        f"memory of {plans[0].method}, of {_bytes(job.chip.memory)}: {counted}",
        f"not counted: {missing}what MLPs and logits hold, and the compiler's scratch",
        f"products with weights, beside attention's: {_seconds(job.weight_seconds())}; "
        f"at {job.chip.efficiency:.0%} of {job.chip.flops / 1e12:g} TFLOP/s",
        *(f"no {method}: {reason}" for method, reason in refused.items()),
    )
    for line in lines:
        print(textwrap.fill(line, 79, subsequent_indent="  "))


def _cells(job: Job, plan: Planned) -> Sequence[str]:
    share = sum(plan.memory.values()) / job.chip.memory
    seconds = plan.transfers, plan.products, plan.exposed, plan.seconds
    return (
        *(plan.method, plan.layout, "yes" if plan.fits else "no", f"{share:.0%}"),
        *(_bytes(plan.sent), *map(_seconds, seconds)),
    )


def _program(job: Job, args: argparse.Namespace, plan: Planned) -> Compiled:
    shape = next(iter(job.shapes(plan.layout)))
    return compiled(args.chip, args.axes, shape, plan.method, job.gradients)


def _print_program(job: Job, plan: Planned, program: Compiled) -> None:
    shape = next(iter(job.shapes(plan.layout)))
    sizes = plan.method, plan.merge, shape, job.topology
    sent = cost.volume(*sizes, gradient=job.gradients)
    exposed = ", ".join(f"{count} × {kind}" for kind, count in program.exposed.items() if count)
    line = (
        f"compiled, a layer of {plan.method}, {plan.layout}: sends {_bytes(program.sent)} "
        f"(model: {_bytes(sent)}), holds {_bytes(program.memory)} (model: "
        f"{_bytes(cost.memory(*sizes))}), with nothing beside: {exposed or 'none'}"
    )
    print(textwrap.fill(line, 79, subsequent_indent="  "))


def _seconds(x: float) -> str:
    if x < 0.1:
        return f"{1e3 * x:.3g} ms"
    return f"{x:.3g} s" if x < 1000 else f"{x:.0f} s"


def _bytes(count: float) -> str:
    power = min(int(math.log10(max(count, 1))) // 3, 4)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
