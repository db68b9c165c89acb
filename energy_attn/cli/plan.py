"""`python -m energy_attn plan`: whether a context fits on a mesh, and the time and memory of each method."""

import argparse
import dataclasses
import functools
import json
import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from energy_attn.distributed import cost
from energy_attn.distributed import plan as planner
from energy_attn.distributed.internal import CHIPS, METHOD_OPTIONS, Chip

from ..models import Llama, LlamaConfig
from ..models.checkpoint._config import located
from ..models.llama._experts import Experts
from ._ahead import Compiled, compiled
from ._command import count, refuse, sizes, table

_MOST = 2**14  # devices, of which tables list all pairs
_COLUMNS = "method", "layout", "fits", "memory", "sent", "transfers", "products", "exposed", "total"
LAYOUTS = "contiguous", "zigzag", "striped"
# The merges of methods that have a choice. A tree over sharded queries has two ways to scatter states.
MERGES = {"tree": ("allreduce", "gather"), "ring": ("keys",)}


@dataclasses.dataclass(frozen=True)
class Job:
    """A model, the tokens that it reads or is trained on, and the devices that share the tokens."""

    config: LlamaConfig
    chip: Chip
    topology: cost.Topology
    tokens: int  # in a row
    batch: int = 1
    dtype: str = "bfloat16"  # of weights and activations
    gradients: bool = True  # whether the model is trained
    tile: int = 1  # of the kernel, as for `plan.pairs`

    def shapes(self, layout: str) -> Counter[cost.Shape]:
        """The shapes of the layers' attention, and the number of layers of each."""
        config = self.config
        shape = cost.Shape(
            *(self.batch, self.tokens, self.tokens),
            *(config.num_attention_heads, config.num_key_value_heads),
            *(config.head_dim, config.value_dim, self.dtype),
            causal=True,
            queries_sharded=True,
            layout=layout,
        )
        windows = Counter(config.window(layer) for layer in range(config.num_hidden_layers))
        shapes = Counter[cost.Shape]()
        for window, layers in windows.items():
            # a window as long as the text is none
            reach = None if window is None or window >= self.tokens else (window - 1, 0)
            shapes[dataclasses.replace(shape, window=reach)] += layers
        return shapes

    def first_shape(self, layout: str) -> cost.Shape:
        """The attention of the first layer."""
        return next(iter(self.shapes(layout)))

    def weight_seconds(self) -> float:
        """Seconds for the products with weights: two operations a weight and token, six with gradients."""
        operations = (6 if self.gradients else 2) * weights(self.config, self.dtype).used
        rows = self.batch * self.tokens / self.topology.devices
        return operations * rows / (self.chip.efficiency * self.chip.flops)

    def memory(self) -> dict[str, int]:
        """Bytes on a device by their use, without the attention of a layer.

        Weights are split over all devices. With gradients, each has a gradient and two moments in float32, and the
        backward pass keeps the inputs of layers; without, a cache keeps their keys and values.
        """
        every = weights(self.config, self.dtype).all
        config, devices, size = self.config, self.topology.devices, jnp.dtype(self.dtype).itemsize
        rows = self.batch * -(-self.tokens // devices)
        if self.gradients:
            inputs = config.num_hidden_layers * rows * config.hidden_size * size
            state = (2 * size + 8) * every // devices
            return {"weights, gradients, moments": state, "inputs of layers": inputs}
        width = config.num_key_value_heads * (config.head_dim + config.value_dim)
        cache = config.num_hidden_layers * rows * width * size
        return {"weights": size * every // devices, "keys and values": cache}


class Weights(NamedTuple):
    """The number of all weights, and of the weights that a token is multiplied by."""

    all: int
    used: int


@functools.cache
def weights(config: LlamaConfig, dtype: DTypeLike) -> Weights:
    """Counts the weights of a decoder; a token uses some of the experts, and one row of an untied embedding."""
    model = jax.eval_shape(lambda key: Llama(config, dtype, key=key), jax.random.key(0))

    def count(tree: object) -> int:
        return sum(x.size for x in jax.tree.leaves(tree))

    every, idle = count(model), 0.0
    if not config.tie_word_embeddings:
        idle += count(model.embed_tokens)
    if (routed := config.experts) is not None:
        nodes = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, Experts))
        experts = sum(count(x) for x in nodes if isinstance(x, Experts))
        idle += experts * (1 - routed.num_experts_per_tok / routed.num_experts)
    return Weights(every, every - round(idle))


class Planned(NamedTuple):
    """Bytes on a device, and seconds, for the attention of all layers by one method in one layout."""

    method: str
    merge: str | None  # how partial states are merged, or what rotates
    layout: str
    fits: bool
    memory: dict[str, int]  # by its use
    sent: float
    products: float
    transfers: float
    exposed: float

    @property
    def seconds(self) -> float:
        """Seconds of products and of exposed transfers."""
        return self.products + self.exposed


def planned(job: Job, method: str, layout: str) -> Planned:
    """The plan of a method with the fastest of its merges; raises `ValueError` if the method cannot do the job."""
    shapes, topology = job.shapes(layout), job.topology
    plans = []
    for merge in MERGES.get(method, (None,)):
        times = [
            planner.step_time(
                method, merge, shape, topology, job.chip, tile=job.tile, gradient=job.gradients
            )
            for shape in shapes
        ]
        products, transfers, exposed = (
            sum(layers * x[i] for layers, x in zip(shapes.values(), times, strict=True))
            for i in range(3)
        )
        sent = sum(
            layers * cost.volume(method, merge, shape, topology, gradient=job.gradients)
            for shape, layers in shapes.items()
        )
        attention = max(cost.memory(method, merge, shape, topology) for shape in shapes)
        memory = {**job.memory(), "attention of a layer": attention}
        fits = sum(memory.values()) <= job.chip.memory
        plans.append(
            Planned(method, merge, layout, fits, memory, sent, products, transfers, exposed)
        )
    return min(plans, key=lambda x: x.seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `plan`."""
    parser.usage = f"{parser.prog} --chip CHIP --axes SIZES --tokens TOKENS --model DIR [options]"
    add = parser.add_argument
    needed = functools.partial(add, required=True)
    needed("--chip", choices=tuple(CHIPS), help="each device")
    axes = functools.partial(sizes, separator=",", expected="sizes of mesh axes, as 8 or 4,4,8")
    text = "the devices that share the context, slow axes first: 8, or 4,4,8 of a torus"
    needed("--axes", type=axes, metavar="SIZES", help=text)
    add("--nodes", type=count, help="nodes (TPU slices) of so many devices each, on a slow axis")
    needed("--tokens", type=count, help="of the context: 32768, 32K (of 1024) or 1M (of 1024²)")
    needed("--model", help="folder of a checkpoint, or a config.json; demo: the library's own")
    add("--batch", type=count, default=1, help="contexts (%(default)s)")
    add("--method", choices=METHOD_OPTIONS, help="default: all that can be")
    add("--layout", choices=LAYOUTS, help="of the tokens over the devices; default: all")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="(%(default)s)")
    text = "whether the model is trained on the context, or reads it (%(default)s)"
    add("--gradients", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--tile", type=count, default=512, help="queries and keys of a block (%(default)s)")
    text = "the part of the peak that products reach; default: the chip's"
    add("--efficiency", type=float, help=text)
    add("--compile", action="store_true", help="compile the attention, too: for TPUs, with libtpu")
    add("--json", action="store_true", help="an object with all numbers in bytes and seconds")


def run(args: argparse.Namespace) -> int:
    """Prints a plan for each method and layout, the fastest first.

    Returns 0, or 2 for an error. Raises `BrokenPipeError` if the reader of the table has gone.
    """
    try:
        _run(args)
    except BrokenPipeError:
        raise
    except (OSError, TypeError, ValueError) as error:
        return refuse("plan", error)
    return 0


def _run(args: argparse.Namespace) -> None:
    job = _job(args)
    plans, refused = _plans(job, args)
    if args.nodes is not None and args.compile:
        raise ValueError("--compile: wanted one slice, got --nodes")
    programs = [
        compiled(args.chip, args.axes, job.first_shape(plan.layout), plan.method, job.gradients)
        for plan in (plans if args.compile else ())
    ]
    if args.json:
        rows = [{**x._asdict(), "seconds": x.seconds} for x in plans]
        for row, program in zip(rows, programs, strict=False):
            row["compiled_layer"] = program._asdict()
        report = {"weight_seconds": job.weight_seconds(), "plans": rows, "refused": refused}
        print(json.dumps(report, indent=2))
        return
    _print(job, args, plans, refused)
    for plan, program in zip(plans, programs, strict=False):
        print(_filled(_compared(job, plan, program)))


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
    """All plans, those that fit first and the fastest first, and why other methods have none."""
    plans, refused = [], {}
    for method in [args.method] if args.method else METHOD_OPTIONS:
        # with whole sequences on each device, layouts do not differ
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
    """The first sentence of an error of the cost model, with the command's option for its argument."""
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
    print("\n".join(table([_COLUMNS, *(_cells(job, plan) for plan in plans)])), end="\n\n")
    counted = ", ".join(f"{name} {_bytes(x)}" for name, x in plans[0].memory.items())
    missing = "the backward's buffers, " if job.gradients else ""
    lines = (
        f"memory of {plans[0].method}, of {_bytes(job.chip.memory)}: {counted}",
        f"not counted: {missing}what MLPs and logits hold, and the compiler's scratch",
        f"products with weights, beside attention's: {_seconds(job.weight_seconds())}; "
        f"at {job.chip.efficiency:.0%} of {job.chip.flops / 1e12:g} TFLOP/s",
        *(f"no {method}: {reason}" for method, reason in refused.items()),
    )
    print("\n".join(map(_filled, lines)))


_filled = functools.partial(textwrap.fill, width=79, subsequent_indent="  ")


def _cells(job: Job, plan: Planned) -> Sequence[str]:
    share = sum(plan.memory.values()) / job.chip.memory
    seconds = plan.transfers, plan.products, plan.exposed, plan.seconds
    return (
        *(plan.method, plan.layout, "yes" if plan.fits else "no", f"{share:.0%}"),
        *(_bytes(plan.sent), *map(_seconds, seconds)),
    )


def _compared(job: Job, plan: Planned, program: Compiled) -> str:
    call = plan.method, plan.merge, job.first_shape(plan.layout), job.topology
    sent = cost.volume(*call, gradient=job.gradients)
    exposed = ", ".join(f"{count} × {kind}" for kind, count in program.exposed.items() if count)
    return (
        f"compiled, a layer of {plan.method}, {plan.layout}: sends {_bytes(program.sent)} "
        f"(model: {_bytes(sent)}), holds {_bytes(program.memory)} (model: "
        f"{_bytes(cost.memory(*call))}), with nothing beside: {exposed or 'none'}"
    )


def _seconds(x: float) -> str:
    if x < 0.1:
        return f"{1e3 * x:.3g} ms"
    return f"{x:.3g} s" if x < 1000 else f"{x:.0f} s"


def _bytes(count: float) -> str:
    power = min(int(math.log10(max(count, 1))) // 3, 4)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
