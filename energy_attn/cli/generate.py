"""`python -m energy_attn generate`: continues a text with a checkpoint, over a mesh."""

import argparse
import contextlib
import io
import json
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.distributed.internal import METHOD_OPTIONS

from ..models import (
    AbstractDrafter,
    ModelDrafter,
    PromptLookup,
    Tokenizer,
    generate,
    load,
)
from ..models._tokenizer import special_ids
from ..models._vocabulary import TextStream
from ..models.generation._generate import Generation
from ..models.generation._prompts import tokens_of
from ._command import enough_devices, integer, numbers, refuse, simulate_devices, sizes

_EXAMPLE = '--prompt "if __name__ == " --stop ":"'  # the demo model answers it
_SAMPLING = "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `generate`."""
    parser.usage = f"{parser.prog} --model DIR (--prompt TEXT | --prompt-file FILE) [options]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"example:\n  {parser.prog} --model demo {_EXAMPLE}"
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="folder: config.json, *.safetensors, tokenizer.json; demo: the library's own, which writes Python",
    )
    group = parser.add_mutually_exclusive_group(required=True)
    prompt = partial(group.add_argument, action="append")
    flag, number = partial(add, action="store_true"), partial(add, type=float)
    prompt("--prompt", help="the text to continue; -: standard input; may be repeated")
    text = "a file with the text, in UTF-8; -: standard input; may be repeated"
    prompt("--prompt-file", type=Path, help=text)
    flag("--chat", help="the text is what a user says: answer, by the chat template")
    add("--system", help="what the model is told before the user speaks, with --chat")
    mesh = partial(sizes, separator="x", expected="8 or 2x4, or other sizes", counts=(1, 2))
    add("--mesh", type=mesh, default=(), help="devices to shard the context over: 8, or 2x4")
    add("--tensor", type=integer, default=1, help="devices to split the weights over (%(default)s)")
    methods = "auto", *METHOD_OPTIONS
    add("--method", default="auto", choices=methods, help="to read the prompt by (%(default)s)")
    add("--max-new-tokens", type=integer, default=128, help="tokens to generate (%(default)s)")
    number("--temperature", default=0.0, help="0: the likeliest token (%(default)s)")
    add("--top-k", type=integer, help="draw from this number of likeliest tokens")
    number("--top-p", help="draw from the likeliest tokens whose probabilities add up to this")
    number("--min-p", help="draw from tokens this times as likely as the likeliest")
    text = "divide or multiply logits of tokens in the prompt or the text: 1.1"
    number("--repetition-penalty", help=text)
    number("--presence-penalty", help="subtract from logits of tokens in the text: 0.5")
    add("--stop", action="append", help="a string that ends the text; may be repeated")
    tokens = partial(numbers, separator=",", expected="tokens by number, 2 or 2,7")
    text = "tokens that end the text, 2 or 2,7; default: those of the files"
    add("--eos", type=tokens, help=text)
    flag("--json", help="a line for each prompt: prompt, text, tokens, logprobs, finish_reason")
    add("--seed", type=integer, default=0, help="of the draws (%(default)s)")
    add("--dtype", help="of weights and cache: bfloat16, float32; default: that of the files")
    add("--chunk-size", type=integer, default=1024, help="tokens read at a time (%(default)s)")
    flag("--speculative", help="draft by lookup in the text")
    add("--draft-model", type=Path, help="draft by the smaller model in this folder")


def run(args: argparse.Namespace) -> int:
    """Writes the text to standard output and a summary to standard error; returns 0, or 2 for an error."""
    count = math.prod(args.mesh) * args.tensor
    if count > 1:
        simulate_devices(count)
    try:
        _check(args)
        return _run(args, count)
    except BrokenPipeError:
        raise
    except (OSError, TypeError, ValueError, NotImplementedError, ImportError) as error:
        return refuse("generate", error)
    except JaxRuntimeError as error:  # no memory
        return refuse("generate", str(error).partition("\n")[0])


def _check(args: argparse.Namespace) -> None:
    if any(token < 0 for token in args.eos or ()):
        raise ValueError(f"--eos: wanted tokens of at least 0, got {min(args.eos)}")
    if args.tensor < 1:
        raise ValueError(f"--tensor: wanted at least 1, got {args.tensor}")
    if args.speculative and args.draft_model is not None:
        raise ValueError("--speculative: wanted it or --draft-model, got both")
    if args.system is not None and not args.chat:
        raise ValueError("--system: wanted --chat beside it, got none")


def _run(args: argparse.Namespace, count: int) -> int:
    if args.prompt is None:
        prompts = [_text(file, "--prompt-file") for file in args.prompt_file]
    else:
        prompts = [_text(Path(x), "--prompt") if x == "-" else x for x in args.prompt]
    sequence = ("node", "device")[2 - len(args.mesh) :]
    mesh = None
    if count > 1:
        names, sizes = (*sequence, "tensor"), (*args.mesh, args.tensor)
        try:
            mesh = make_mesh(sizes, names, devices=enough_devices(count))
        except ValueError as error:
            raise ValueError(f"--{'mesh' if args.mesh else 'tensor'}: {error}") from error
    parallel = SequenceParallel(sequence, method=args.method) if mesh and sequence else None
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        model = load(args.model, mesh=mesh, dtype=args.dtype)
        tokenizer = Tokenizer.load(args.model)
        rows = [_tokens_of(args, prompt, tokenizer) for prompt in prompts]
        drafter: AbstractDrafter | None = PromptLookup() if args.speculative else None
        if args.draft_model is not None:
            drafter = ModelDrafter(load(args.draft_model, mesh=mesh, dtype=args.dtype))
        is_shown, times = len(prompts) == 1 and not args.json, [time.perf_counter()]

        def watch(texts: list[str]) -> None:
            times.append(time.perf_counter())
            if is_shown:
                sys.stdout.write(texts[0])
                sys.stdout.flush()

        generation = generate(
            model,
            rows,
            args.max_new_tokens,
            tokenizer=tokenizer,
            parallel=parallel,
            **{name: getattr(args, name) for name in _SAMPLING},
            eos_token_id=args.eos,
            stop=args.stop,
            key=jax.random.key(args.seed),
            drafter=drafter,
            return_logprobs=args.json,
            stream=watch,
            progress=None,
            chunk_size=args.chunk_size,
        )
    if args.json:
        ends = model.config.eos_token_id if args.eos is None else args.eos
        ends = (*ends, *special_ids(tokenizer, args.stop or ()))
        streams = [tokenizer.stream(row, stop=args.stop or ()) for row in rows]
        _write_json(prompts, generation, streams, ends)
    elif len(prompts) > 1:
        between = "\n" if args.chat else ""
        texts = zip(prompts, generation.texts or (), strict=True)
        print("\n---\n".join(f"{prompt}{between}{text}" for prompt, text in texts))
    else:
        print()
    print(_summary(times, generation, sum(map(len, rows))), file=sys.stderr)
    return 0


def _text(file: Path, option: str) -> str:
    is_stdin = str(file) == "-"
    try:
        data = sys.stdin.buffer.read() if is_stdin else file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{option}: wanted a file of text, got {file}: {error.strerror}"
        ) from error
    try:
        # line ends become those of Python
        return io.TextIOWrapper(io.BytesIO(data), "utf-8").read()
    except UnicodeDecodeError as error:
        name = "standard input" if is_stdin else file
        raise ValueError(f"{option}: wanted text in UTF-8, got {name}: {error}") from error


def _tokens_of(args: argparse.Namespace, prompt: str, tokenizer: Tokenizer) -> list[int]:
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    chat = [*system, {"role": "user", "content": prompt}]
    tokens = tokens_of(chat if args.chat else prompt, tokenizer)
    if not tokens:
        option = "--prompt-file" if args.prompt is None else "--prompt"
        raise ValueError(
            f"{option}: wanted text, as this tokenizer begins one with no token, got {prompt!r}"
        )
    return tokens


def _write_json(
    prompts: Sequence[str],
    generation: Generation,
    streams: Sequence[TextStream],
    ends: Sequence[int],
) -> None:
    rows = zip(
        *(prompts, generation.texts or (), generation.tokens.tolist()),
        *(generation.lengths.tolist(), np.asarray(generation.logprobs).tolist(), streams),
        strict=True,
    )
    for prompt, text, tokens, length, logprobs, stream in rows:
        tokens = tokens[:length]
        stream.write(tokens)
        is_ended = stream.stopped or tokens[-1] in ends
        line = {"prompt": prompt, "text": text, "tokens": tokens, "logprobs": logprobs[:length]}
        print(json.dumps(line | {"finish_reason": "stop" if is_ended else "length"}))


def _summary(times: Sequence[float], generation: Generation, prompt: int) -> str:
    text = f"{prompt:,} tokens read and the first written in {times[1] - times[0]:.1f} s, compilation included"
    # the time before the second pass includes compilation
    passes, seconds = len(times) - 2, times[-1] - times[min(2, len(times) - 1)]
    if passes > 1:
        written = int((generation.lengths - 1).sum()) * (passes - 1) / passes
        text += f"; then {written / seconds:,.1f} tokens a second"
    if int(generation.drafted.sum()):
        text += (
            f", {float(generation.tokens_per_pass):.2f} a pass, "
            f"{float(generation.acceptance_rate):.0%} of the drafted tokens accepted"
        )
    return text
