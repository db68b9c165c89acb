"""`python -m energy_attn info | demo | generate | plan | reproducible`."""

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence

import jax

from . import __version__
from .cli._command import simulate_devices

_ABOUT = "Attention as the gradient of a free energy."
_COMMANDS = {
    "info": "devices, implementations, and which one is used for which call and why",
    "demo": "decode over eight devices with a small trained model, compare with the dense answer",
    "generate": "continue a text with a checkpoint, its context sharded over a mesh",
    "plan": "whether a context fits on a mesh, by which method, and what it takes",
    "reproducible": "whether a row has the same bits however it is computed here, and what it costs",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; without one, lists them.

    Each command is a module `cli.<command>` with `add_arguments(parser)` and `run(args)`, imported
    only when it is called.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("python -m energy_attn", description=_ABOUT)
    versions = f"energy_attn {__version__}, jax {jax.__version__}"
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(dest="command", metavar="command")
    chosen = arguments[0] if arguments else None
    for name, text in _COMMANDS.items():
        command = commands.add_parser(
            name, help=text, description=text, usage=f"{parser.prog} {name} [options]"
        )
        if name == chosen:
            if name in ("demo", "reproducible"):  # they shard
                simulate_devices()
            module = importlib.import_module(f"energy_attn.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    return args.run(args)


def _command() -> int:
    """`main`, with escapes for what standard output cannot encode, and silent once that is closed.

    A warning is one line, without its place in the source.
    """
    warnings.formatwarning = lambda message, *_, **__: f"energy_attn: {message}\n"
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return main()
        finally:  # argparse exits by an exception
            sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        # otherwise Python flushes the buffer at exit, and prints an error
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(_command())
