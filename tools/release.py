#!/usr/bin/env python3
"""Prepare a checkout for the package index: `tools/release.py v0.1.0 ADDRESS`, before `python -m build`.

`tools/release.py --names` writes the public names into tests/repository/released.txt: names that are not in it need an
entry in CHANGELOG.md.

It exits with an error unless the tag is the version of pyproject.toml and the newest one of CHANGELOG.md. README.md
becomes the long description: an index shows it by itself, so that links into the repository, whose address is given,
have to be absolute, and it has no equations.
"""

import re
import sys
import tomllib
from pathlib import Path

import check_structure

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def version(root: Path = ROOT) -> str:
    """The version of the project."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]


def newest(root: Path = ROOT) -> str:
    """The newest version in the changelog, whose heading has the day of its release."""
    log = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(r"^## (\d\S*) - \d{4}-\d{2}-\d{2}$", log, re.MULTILINE)
    return found[1] if found else "none"


def long_description(readme: str, address: str, tag: str) -> str:
    """A README whose links lead to the files of a tag at `address`, with equations as their source."""

    def absolute(link: re.Match[str]) -> str:
        image, text, path = link.groups()
        return f"{image}[{text}]({address}/{'raw' if image else 'blob'}/{tag}/{path})"

    shown = LINK.sub(absolute, readme)
    return re.sub(r"^\$\$(.*?)\$\$$", r"```latex\n\1\n```", shown, flags=re.MULTILINE | re.DOTALL)


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Checks the tag and rewrites README.md; returns 0, or 1 for a tag of another version."""
    if arguments == ["--names"]:
        names = sorted({name for _, name in check_structure.exports(root)})
        (root / "tests/repository/released.txt").write_text("\n".join([*names, ""]))
        return 0
    tag, address = arguments
    for name, found in {"pyproject.toml": version(root), "CHANGELOG.md": newest(root)}.items():
        if tag != f"v{found}":
            print(
                f"release.py: the tag is {tag}, the version of {name} is {found}", file=sys.stderr
            )
            return 1
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(long_description(text, address.rstrip("/"), tag), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
