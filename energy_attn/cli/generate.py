"""`python -m energy_attn generate`: continues a text with a checkpoint, over a mesh."""

import argparse
import contextlib
import io
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.distributed.internal import METHODS

from ..models import AbstractDrafter, Generation, ModelDrafter, PromptLookup, generate, load
from ._byte_llama import FOLDER
from ._devices import enough_devices, simulate_devices
from ._tokenizer import AbstractTokenizer, tokenizer_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `generate`."""
    add = parser.add_argument
    add(
        "--model",
        type=_model,
        required=True,
        help="folder: config.json, *.safetensors, tokenizer.json; demo: the library's own, which writes Python",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the text to continue")
    prompt.add_argument(
        "--prompt-file", type=Path, help="a file with the text, in UTF-8; -: standard input"
    )
    add("--mesh", type=_mesh, default=(), help="devices to shard the context over: 8, or 2x4")
    add("--tensor", type=int, default=1, help="devices to split the weights over (%(default)s)")
    methods = "auto", *METHODS
    add("--method", default="auto", choices=methods, help="to read the prompt by (%(default)s)")
    add("--max-new-tokens", type=int, default=128, help="tokens to generate (%(default)s)")
    add("--temperature", type=float, default=0.0, help="0: the likeliest token (%(default)s)")
    add("--top-k", type=int, help="draw from this number of likeliest tokens")
    add(
        "--top-p",
        type=float,
        help="draw from the likeliest tokens whose probabilities add up to this",
    )
    add(
        "--stop",
        type=_tokens,
        help="tokens that end the text, 2 or 2,7; default: those of the files",
    )
    add("--seed", type=int, default=0, help="of the draws (%(default)s)")
    add("--dtype", help="of weights and cache: bfloat16, float32; default: that of the files")
    add("--chunk-size", type=int, default=1024, help="tokens read at a time (%(default)s)")
    add("--speculative", action="store_true", help="draft by lookup in the text")
    add("--draft-model", type=Path, help="draft by the smaller model in this folder")


def run(args: argparse.Namespace) -> int:
    """Writes the text to standard output as it comes, and a summary to standard error.

    Returns 0, or 2 for an error. Raises `BrokenPipeError` where nobody reads the text any more.
    """
    count = math.prod(args.mesh) * args.tensor
    if count > 1:
        simulate_devices(count)
    try:
        _check(args)
        return _run(args, count)
    except BrokenPipeError:
        raise
    except (OSError, TypeError, ValueError, NotImplementedError, ImportError) as error:
        print(f"energy_attn generate: {error}", file=sys.stderr)
        return 2


def _model(text: str) -> Path:
    return FOLDER if text == "demo" and not Path(text).exists() else Path(text)


def _mesh(text: str) -> tuple[int, ...]:
    expected = "8 or 2x4, or other sizes"
    sizes = _numbers(text.lower(), "x", expected)
    if len(sizes) > 2 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"wanted {expected}, got {text!r}")
    return sizes


def _tokens(text: str) -> tuple[int, ...]:
    return _numbers(text, ",", "tokens by number, 2 or 2,7")


def _numbers(text: str, separator: str, expected: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(separator))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted {expected}, got {text!r}") from None


def _check(args: argparse.Namespace) -> None:
    if args.tensor < 1:
        raise ValueError(f"--tensor: wanted at least 1, got {args.tensor}")
    if args.speculative and args.draft_model is not None:
        raise ValueError("--speculative: wanted it or --draft-model, got both")


def _run(args: argparse.Namespace, count: int) -> int:
    prompt = _text(args.prompt_file) if args.prompt is None else args.prompt
    sequence = ("node", "device")[2 - len(args.mesh) :]
    mesh = None
    if count > 1:
        names, sizes = (*sequence, "tensor"), (*args.mesh, args.tensor)
        mesh = make_mesh(sizes, names, devices=enough_devices(count))
    parallel = SequenceParallel(sequence, method=args.method) if mesh and sequence else None
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        model = load(args.model, mesh=mesh, dtype=args.dtype)
        tokenizer = tokenizer_of(args.model, model.config.vocab_size)
        tokens = tokenizer.encode(prompt)
        if not tokens:
            option = "--prompt-file" if args.prompt is None else "--prompt"
            raise ValueError(
                f"{option}: wanted text, as this tokenizer begins one with no token, got {prompt!r}"
            )
        drafter = _drafter(args, mesh)
        writer = _Writer(tokenizer)
        generation = generate(
            model,
            [tokens],
            args.max_new_tokens,
            parallel=parallel,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            eos_token_id=args.stop,
            key=jax.random.key(args.seed),
            drafter=drafter,
            stream=writer,
            progress=None,
            chunk_size=args.chunk_size,
        )
    writer.end()
    print(_summary(writer, generation, len(tokens)), file=sys.stderr)
    return 0


def _text(file: Path) -> str:
    """The text in a file, or in standard input."""
    is_stdin = str(file) == "-"
    data = sys.stdin.buffer.read() if is_stdin else file.read_bytes()
    try:
        # line ends become those of Python
        return io.TextIOWrapper(io.BytesIO(data), "utf-8").read()
    except UnicodeDecodeError as error:
        name = "standard input" if is_stdin else file
        raise ValueError(f"--prompt-file: wanted text in UTF-8, got {name}: {error}") from error


def _drafter(args: argparse.Namespace, mesh: Mesh | None) -> AbstractDrafter | None:
    if args.speculative:
        return PromptLookup()
    if args.draft_model is not None:
        return ModelDrafter(load(args.draft_model, mesh=mesh, dtype=args.dtype))
    return None


class _Writer:
    """Writes tokens as text when they come, and records the times."""

    times: list[float]
    counts: list[int]

    def __init__(self, tokenizer: AbstractTokenizer) -> None:
        self.times, self.counts = [time.perf_counter()], [0]
        self._write: Callable[[list[int]], str] = tokenizer.writer()

    def __call__(self, tokens: np.ndarray) -> None:
        row = [int(token) for token in tokens[0] if token >= 0]
        self.times.append(time.perf_counter())
        self.counts.append(len(row))
        sys.stdout.write(self._write(row))
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the line."""
        sys.stdout.write("\n")


def _summary(writer: _Writer, generation: Generation, prompt: int) -> str:
    first = writer.times[1] - writer.times[0]
    text = f"{prompt:,} tokens read and the first written in {first:.1f} s, compilation included"
    # the time before the second pass includes compilation
    remaining, seconds = (
        sum(writer.counts[3:]),
        writer.times[-1] - writer.times[min(2, len(writer.times) - 1)],
    )
    if remaining:
        text += f"; then {remaining / seconds:,.1f} tokens a second"
    if int(generation.drafted.sum()):
        text += (
            f", {float(generation.tokens_per_pass):.2f} a pass, "
            f"{float(generation.acceptance_rate):.0%} of the drafted tokens accepted"
        )
    return text
