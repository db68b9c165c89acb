"""`python -m energy_attn info | demo | bench | launch`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

_ABOUT = "Attention as the gradient of a free energy."
_COMMANDS = {
    "info": "devices, implementations, and which would be used for what and why",
    "demo": "train a small decoder, decode over eight devices, compare with the dense answer",
    "bench": "times and memory beside jax.nn and PyTorch",
    "launch": "run a program as several processes on this machine, and end all when one fails",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    Each command is a module `_<command>` with `add_arguments(parser)` and `run(args)`, imported
    only when it is asked for.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("python -m energy_attn", description=_ABOUT)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    chosen = arguments[0] if arguments else None
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == chosen:
            if name == "demo" or "speculative" in arguments:  # they spread a cache
                _simulate_devices()
            module = importlib.import_module(f"energy_attn._{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    return args.run(args)


def _simulate_devices() -> None:
    """Asks for eight CPU devices, unless the user has asked for something else.

    The flag is read when JAX starts its CPU backend. On a machine with accelerators those stay the
    default devices.
    """
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}=8".strip()


if __name__ == "__main__":
    sys.exit(main())
