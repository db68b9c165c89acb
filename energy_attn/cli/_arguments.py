"""Arguments of commands, read from text."""

import argparse
import re


def numbers(text: str, separator: str, expected: str) -> tuple[int, ...]:
    """Integers between separators; raises `ArgumentTypeError` that says what was expected."""
    try:
        return tuple(int(part) for part in text.split(separator))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted {expected}, got {text!r}") from None


def count(text: str) -> int:
    """A number above 0, in units, of 1024 for K, or of 1024² for M; raises `ArgumentTypeError`."""
    found = re.fullmatch(r"([1-9]\d*)([KM]?)", text.upper())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"wanted a number above 0, as 32768, 32K or 1M, got {text!r}"
        )
    return int(found[1]) * 1024 ** ("", "K", "M").index(found[2])
