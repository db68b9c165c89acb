"""`python -m energy_attn demo`: decoding over a mesh, on a real text, checked step by step.

A small byte-level Llama, trained on the sources of Python's standard library, reads a long prompt and
decodes from it with its key/value cache sharded over a 2 × 4 mesh; then it decodes the same on one
device, and every attention is computed again in float64.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from energy_attn.distributed import SequenceParallel, make_mesh

from ... import attention
from ...models import Llama, LlamaConfig, shard
from .._command import byte_llama, enough_devices, held_out_text, integer, refuse
from .._command import table as aligned
from ._decode import (
    WINDOW,
    Decoded,
    Parts,
    Sent,
    TimedLoop,
    compile_loop,
    decode,
    errors,
    expected,
    gathered,
    medians,
    one_device,
    parameters,
    parts,
    score,
    sent,
)

_MESH = (2, 4)
DEVICES = 8


class TableRow(NamedTuple):
    """A line of the table."""

    what: str  # the quantity
    measured: str  # its value
    beside: str = ""  # the expected value, or one to compare with
    holds: bool | None = None  # whether the value is the expected one; None: none is expected
    kernel: str = ""  # the kernels that ran; empty if the value does not depend on them


def table(lines: list[TableRow]) -> str:
    """The lines of the table, below its head."""
    lines = [TableRow("", "measured", "wanted, or to compare", kernel="kernel"), *lines]
    signs = {True: "✓", False: "✗", None: " "}
    cells = [(x.what, x.measured, signs[x.holds], x.kernel, x.beside) for x in lines]
    head, *rows = aligned(cells, right=[1])
    return "\n".join([head, "─" * max(map(len, (head, *rows))), *rows])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `demo`."""
    add = parser.add_argument
    add("--context", type=integer, default=8192, help="bytes of prompt (%(default)s)")
    add("--tokens", type=integer, default=96, help="bytes to decode (%(default)s)")
    add("--parts", action="store_true", help="time merges, attention, the rest and calls, too")
    add("--out", type=Path, default=Path("demo.png"), help="the picture (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns 0 if every equality holds, 1 if one does not, 2 if it cannot run."""
    try:
        text = held_out_text()
        _check(args, len(text))
        devices = enough_devices(DEVICES)
        model = byte_llama()
    except (OSError, ValueError, RuntimeError) as error:
        return refuse("demo", error)
    # by default, accelerators round the factors of float32 products
    with jax.default_device(devices[0]), jax.default_matmul_precision("highest"):
        return _run(args, text, devices, model)


def _run(args: argparse.Namespace, text: np.ndarray, devices: list[Any], model: Llama) -> int:
    # the prompt ends at the end of a line
    end = args.context + text[args.context :].tobytes().find(b"\n") + 1
    prompt = text[end - args.context : end]
    loss = score(model, prompt)
    print(
        f"{parameters(model):,} weights, trained on Python's standard library, read {args.context:,} "
        f"bytes of it that were held out\non {_machine(devices)}, as a 2 × 4 mesh ...",
        flush=True,
    )
    mesh = make_mesh(_MESH, devices=devices)
    sharded, parallel = shard(model, mesh), SequenceParallel(method="tree")
    with jax.set_mesh(mesh):
        tree = decode(sharded, prompt, args.tokens, parallel)
        longer, fetched = (
            sent(compile_loop(sharded, slots, args.tokens, parallel, attend), args.tokens)
            for slots, attend in ((2 * tree.slots, attention), (tree.slots, gathered))
        )
    print("decoding on one device, twice ...", flush=True)
    alone = decode(model, prompt, args.tokens)
    dense = decode(model, prompt, args.tokens, attend=one_device)
    timed = _durations(tree, alone, dense)
    if args.parts:
        print("and the parts of a step ...", flush=True)
        timed = [*timed, *_differences(parts(tree, alone, mesh, parallel))]

    print(f"\n{_passage(prompt, tree.tokens)}\n")
    lines = [
        TableRow(
            "loss on the prompt's end",
            f"{loss.far:.2f} nats",
            f"given its last {WINDOW}: {loss.near:.2f} nats",
            kernel=loss.kernels,
        ),
        *_equalities(tree, alone, dense, args.context),
        *_traffic(model.config, sent(tree.loop, args.tokens), longer, fetched, tree),
        *timed,
    ]
    print(table(lines), end="\n\n")
    energies = np.asarray(tree.traces.energy)[:, 0]
    print(draw(args.out, energies, tree.tokens, args.context) or f"picture: {args.out}")
    broken = [line.what for line in lines if line.holds is False]
    for what in broken:
        print(f"energy_attn demo: does not hold: {what}", file=sys.stderr)
    return 1 if broken else 0


def _check(args: argparse.Namespace, available: int) -> None:
    if not 2 * WINDOW <= args.context < available - WINDOW:
        limits = f"from {2 * WINDOW} to {available - WINDOW - 1}"
        raise ValueError(f"--context: wanted {limits} bytes, got {args.context}")
    if not 1 <= args.tokens <= available:
        raise ValueError(f"--tokens: wanted from 1 to {available}, got {args.tokens}")
    if not args.out.parent.is_dir():
        raise ValueError(f"--out: wanted a path in a folder that exists, got {args.out}")


def _machine(devices: list[Any]) -> str:
    if devices[0].platform == "cpu":
        return f"{DEVICES} simulated devices on {os.cpu_count()} CPU cores"
    return f"{DEVICES} devices: {devices[0].device_kind}"


def _passage(prompt: np.ndarray, decoded: np.ndarray) -> str:
    prompt_lines = readable(prompt[-400:]).split("\n", 1)[-1].split("\n")
    ruled = "\n".join(f"  │ {line}" for line in prompt_lines[:-1])
    decoded_lines = "\n".join(
        f"  ┃ {line}" for line in (prompt_lines[-1] + readable(decoded)).split("\n")
    )
    return f"  │ the prompt, its end\n  ┃ and what the model wrote\n\n{ruled}\n{decoded_lines}"


def _equalities(tree: Decoded, alone: Decoded, dense: Decoded, context: int) -> list[TableRow]:
    lines, count = [], len(tree.tokens)
    for name, other in (("dense decoding", dense), ("one device's", alone)):
        same = int((tree.tokens == other.tokens).sum())
        cells = f"{same} of {count}", "all", same == count
        lines.append(TableRow(f"bytes equal to {name}", *cells, tree.kernels))
    wrong = errors(tree.traces, tree.cache_content, context)
    for (name, unit), (error, allowed) in zip(
        (("energies", " nats"), ("outputs", "")), wrong, strict=True
    ):
        cells = f"{error:.1e}{unit}", f"at most {allowed:.1e}", bool(error <= allowed)
        lines.append(TableRow(f"{name}, largest error against float64", *cells, tree.kernels))
    return lines


def _traffic(
    config: LlamaConfig, step: Sent, longer: Sent, fetched: Sent, tree: Decoded
) -> list[TableRow]:
    operations, size = expected(config)
    layers = config.num_hidden_layers
    return [
        TableRow(
            "collectives a step",
            f"{step.operations} {'/'.join(step.kinds)}",
            f"{operations} = {layers} layers × 1",
            (step.kinds, step.operations) == (("all-gather",), operations),
        ),
        TableRow(
            "bytes handed to them",
            f"{step.bytes:,}",
            f"{size:,} = {layers} layers × B·T·N·(H + 1) × 4",
            step.bytes == size,
        ),
        TableRow(
            f"both for a cache of {2 * tree.slots:,} slots",
            f"{longer.operations}, {longer.bytes:,}",
            f"as for {tree.slots:,}",
            longer[:3] == step[:3],
        ),
        TableRow(
            "peak memory of decoding, on each device",
            f"{step.peak / 2**20:.2f} MiB",
            f"{fetched.peak / 2**20:.2f} MiB if keys and values were gathered,",
            kernel=tree.kernels,
        ),
        TableRow("", "", f"and {fetched.bytes * DEVICES:,} bytes would arrive"),
    ]


def _durations(tree: Decoded, alone: Decoded, dense: Decoded) -> list[TableRow]:
    runs = {"tree": tree, "alone": alone, "dense": dense}
    took = medians({name: TimedLoop(decoded, decoded.loop) for name, decoded in runs.items()})
    step = {name: f"{1e3 * seconds:.1f} ms" for name, seconds in took.items()}
    prompt = {name: f"{decoded.prefill_seconds:.1f} s" for name, decoded in runs.items()}
    compared = "{alone} on one device ({kernels}), {dense} with jax.nn's attention"
    simulated = [TableRow("", "", "(simulated devices share the cores: this is no speed-up)")]
    return [
        TableRow(
            "time a byte, in one loop, median",
            step["tree"],
            compared.format(**step, kernels=alone.kernels),
            kernel=tree.kernels,
        ),
        TableRow(
            "time for the prompt",
            prompt["tree"],
            compared.format(**prompt, kernels=alone.prefill_kernels),
            kernel=tree.prefill_kernels,
        ),
        *(simulated if jax.default_backend() == "cpu" else []),
    ]


def _differences(took: Parts) -> list[TableRow]:
    def ms(seconds: float) -> str:
        return f"{1e3 * seconds:.2f} ms"

    return [
        TableRow("a byte's difference from one device:", ""),
        TableRow("  the merges", ms(took.merging), "a step less one in which nothing is merged"),
        TableRow(
            "  attention to eight parts",
            ms(took.attending),
            "each device to its own, less all by one",
        ),
        TableRow("  the rest of the model", ms(took.repeating), "by every device, less by one"),
        TableRow(
            "a call for each byte adds", ms(took.calling), f"{ms(took.calling_one)} on one device"
        ),
    ]


def readable(text: np.ndarray | bytes) -> str:
    """Bytes as text; invalid UTF-8 as `\\xNN`."""
    return bytes(text).decode("utf-8", "backslashreplace")


_SHOWN = {"\n": "↵", "\t": "⇥", " ": "·"}
# A grey that reads on white and on black, and no background: pages are either.
_INK = "#7f7e7d"
_SETTINGS: dict[Any, Any] = {
    "axes.labelcolor": _INK,
    "savefig.transparent": True,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def _character(byte: int) -> str:
    text = chr(byte) if byte < 127 else "�"
    return _SHOWN.get(text, text if text.isprintable() else "�")


def draw(path: Path, energies: np.ndarray, text: np.ndarray, context: int) -> str | None:
    """Draws the energies below the decoded text."""
    try:
        from matplotlib import rc_context
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"

    with rc_context(_SETTINGS):
        layers, count, heads = energies.shape
        width, height = 1.6 + 0.135 * count, 1.2 + layers * (0.12 + 0.24 * heads)
        figure = Figure(figsize=(max(8.0, width), height), layout="constrained")
        panels = figure.subplots(layers, 1, sharex=True, squeeze=False)
        low, high = np.percentile(energies, [0.5, 99.5])
        colours = ScalarMappable(Normalize(low, high), "magma")
        for layer, panel in enumerate(panels[:, 0]):
            panel.imshow(colours.to_rgba(energies[layer].T), aspect="auto", interpolation="nearest")
            panel.set_yticks(range(heads), [f"{head}" for head in range(heads)], fontsize=8)
            panel.set_ylabel(f"layer {layer}\nhead", fontsize=9)
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
        bottom = panels[-1, 0]
        bottom.set_xticks(range(count), [_character(byte) for byte in bytes(text)])
        for label in bottom.get_xticklabels():
            label.set(family="monospace", fontsize=9)
        bottom.set_xlabel(f"decoded bytes, after {context:,} bytes of context", fontsize=9)
        figure.suptitle("Free energy of each head as it reads the text that it wrote", fontsize=12)
        bar = figure.colorbar(colours, ax=panels[:, 0], pad=0.01, aspect=40)
        bar.set_label("F = log Σ exp(scores), nats", fontsize=9)
        bar.ax.tick_params(labelsize=8)
        bar.outline.set_visible(False)
        figure.savefig(path, dpi=150)
    return None
