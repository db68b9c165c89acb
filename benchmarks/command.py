"""Helpers of the commands of this folder: options, and files of results."""

import argparse
import json
import re
from pathlib import Path


def at_least_one(text: str) -> int:
    """Parses a number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"wanted a number of at least 1, got {text!r}")
    return int(text)


def parser_of(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of a command, described by its docstring, with the options of every command that measures."""
    about = (doc or "").partition(": ")[2]
    parser = argparse.ArgumentParser(f"python -m {module}", description=about)
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench"), help="folder for the results (%(default)s)")
    add("--repeats", type=at_least_one, default=9, help="timings of each side (%(default)s)")
    add("--shrink", type=at_least_one, default=1, help="divisor of sequence lengths, for a trial")
    return parser


def text_of(result: object) -> str:
    """JSON, with a line for each list or object of plain values."""

    def one_line(match: re.Match[str]) -> str:
        return match[1] + re.sub(r"\n\s*", " ", match[2]) + match[3]

    nested = json.dumps(result, indent=2)
    return re.sub(r"([\[{])\n\s*([^][{}]+?)\n\s*([\]}])", one_line, nested) + "\n"


def write(path: Path, result: object) -> None:
    """Writes results, into a folder that is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(result))
    print(f"wrote {path}")
