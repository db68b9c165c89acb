"""`python -m energy_attn demo`: decoding over a mesh, on a real text, checked step by step.

A small byte-level Llama, trained on the sources of Python's standard library, reads a long prompt and
decodes from it with its key/value cache sharded over a 2 × 4 mesh; then it decodes the same on one
device, and every attention is computed again in float64.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from energy_attn.distributed import SequenceParallel, make_mesh

from ... import attention
from ...models import Llama, LlamaConfig, shard
from .._arguments import enough_devices, integer
from .._byte_llama import byte_llama, held_out_text
from ._checks import WINDOW, errors, expected, parameters, score
from ._decode import Decoded, Sent, compile_loop, decode, gathered, one_device, sent
from ._report import TableRow, draw, readable, table
from ._times import Parts, TimedLoop, medians, parts

_MESH = (2, 4)
DEVICES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `demo`."""
    parser.add_argument(
        "--context", type=integer, default=8192, help="bytes of prompt (%(default)s)"
    )
    parser.add_argument("--tokens", type=integer, default=96, help="bytes to decode (%(default)s)")
    parser.add_argument(
        "--parts", action="store_true", help="time merges, attention, the rest and calls, too"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo.png"), help="the picture (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns 0 if every equality holds, 1 if one does not, 2 if it cannot run."""
    try:
        text = held_out_text()
        _check(args, len(text))
        devices = enough_devices(DEVICES)
        model = byte_llama()
    except (OSError, ValueError, RuntimeError) as error:
        print(f"energy_attn demo: {error}", file=sys.stderr)
        return 2
    # By default accelerators round the factors of float32 products.
    with jax.default_device(devices[0]), jax.default_matmul_precision("highest"):
        return _run(args, text, devices, model)


def _run(args: argparse.Namespace, text: np.ndarray, devices: list[Any], model: Llama) -> int:
    # The prompt ends at the end of a line.
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
    wrong = errors(tree.traces, tree.cache_content, context)
    count = len(tree.tokens)
    same = [int((tree.tokens == other.tokens).sum()) for other in (dense, alone)]
    lines = [
        TableRow("bytes equal to dense decoding", f"{same[0]} of {count}", "all", same[0] == count),
        TableRow("bytes equal to one device's", f"{same[1]} of {count}", "all", same[1] == count),
        TableRow(
            "energies, largest error against float64",
            f"{wrong.energy:.1e} nats",
            f"at most {wrong.energy_allowed:.1e}",
            bool(wrong.energy <= wrong.energy_allowed),
        ),
        TableRow(
            "outputs, largest error against float64",
            f"{wrong.out:.1e}",
            f"at most {wrong.out_allowed:.1e}",
            bool(wrong.out <= wrong.out_allowed),
        ),
    ]
    return [line._replace(kernel=tree.kernels) for line in lines]


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
