#!/usr/bin/env python3
"""MkDocs hooks: equations become MathML, and what readers would miss stops the build with the name of the page.

    python tools/site_hooks.py texgyretermes-math.otf CHARACTERS

adds characters to the font of the equations, `docs/fonts/math.woff2`. Browsers draw MathML with a font that has a MATH
table: without one sums stay small and brackets do not grow; and few systems have one. TeX Gyre Termes Math 1.543 is in
every TeX distribution.
"""

import html
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from fontTools import subset
from fontTools.ttLib import TTFont
from math_core import LatexError, LatexToMathML
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority

FONT = Path(__file__).resolve().parents[1] / "docs" / "fonts" / "math.woff2"
# A modified font needs another name by its licence.
FAMILY = "energy_attn Math"
# What pymdownx.arithmatex writes with `generic: true`.
EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">'
    r"(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<block>.*?)\\\])"
    r"</(?P=tag)>",
    re.DOTALL,
)
CONVERTER = LatexToMathML(fancy_error=False)
SIGNATURE = re.compile(r'<div class="doc-signature highlight">.*?<code>(.*?)</code>', re.DOTALL)
# The number of characters that fit on a page; more than `line_length` in mkdocs.yml, as long types cannot be broken.
LONGEST = 80
FETCHED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?https?:|<link\b[^>]*\brel=[\"']?stylesheet[^>]*https?:"
)


def on_page_content(content: str, *, page: Any, **_: Any) -> str:
    """Converts the equations of a page; stops at a signature that is not broken into lines.

    mkdocstrings breaks signatures with a formatter; without one it only warns.
    """
    name = page.file.src_uri
    for signature in SIGNATURE.findall(content):
        lines = html.unescape(_without_tags(signature)).splitlines()
        if (longest := max(map(len, lines), default=0)) > LONGEST:
            begin = f"{name}: a line of {longest} characters in the signature of {lines[0][:40]!r}"
            raise PluginError(f"{begin}; is ruff installed, which the extra `docs` names?")
    return EQUATION.sub(lambda equation: mathml(equation, name), content)


def mathml(equation: re.Match[str], page: str) -> str:
    """An equation as MathML. Raises `PluginError` for one that cannot be converted or that the font lacks."""
    block = equation["inline"] is None
    latex = html.unescape(equation["block"] if block else equation["inline"])
    try:
        converted = CONVERTER.convert_with_local_state(latex.strip(), displaystyle=block)
    except LatexError as error:
        raise PluginError(f"{page}: {latex!r}: {error}") from error
    if lacking := set(html.unescape(_without_tags(converted))) - characters():
        begin = f"{page}: {latex!r}: docs/fonts/math.woff2 lacks {sorted(lacking)}"
        raise PluginError(f"{begin}; tools/site_hooks.py adds characters")
    return f'<{equation["tag"]} class="arithmatex">{converted}</{equation["tag"]}>'


def _without_tags(content: str) -> str:
    return re.sub("<[^>]*>", "", content)


@event_priority(-200)  # after the theme's plugin, which makes a script of the index
def on_post_build(*, config: Any, **_: Any) -> None:
    """Checks that the site can be read and searched from a folder, without a server and without the network."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        if fetched := FETCHED.search(page.read_text(encoding="utf-8")):
            name = page.relative_to(site)
            raise PluginError(f"{name} is not complete without a network: {fetched[0]}")
    if not (site / "search" / "search_index.js").exists():
        raise PluginError("no search/search_index.js: pages read from a folder have no search")


@cache
def characters() -> frozenset[str]:
    """The characters of the font, and those that are never drawn: spaces and invisible operators."""
    invisible = {chr(c) for c in range(0x2061, 0x2065)} | {"\n", " ", "\xa0"}
    return frozenset(map(chr, TTFont(FONT).getBestCmap())) | invisible


def add_to_font(source: Path, new: str) -> None:
    """Writes the part of a font that draws its characters of today and new ones, in all sizes.

    Letters alone are drawn in italics: U+1D434 and U+1D6E2 on.
    """
    options = subset.Options(
        flavor="woff2", layout_features=["ssty"], hinting=False, drop_tables=["FFTM"]
    )
    font = subset.load_font(str(source), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=[*TTFont(FONT).getBestCmap(), *map(ord, new)])
    subsetter.subset(font)
    (script,) = font["GSUB"].table.ScriptList.ScriptRecord
    # browsers do not look up "math", the original tag: primes would be too small
    script.ScriptTag = "DFLT"
    names = {1: FAMILY, 2: "Regular", 3: FAMILY, 4: FAMILY, 6: FAMILY.replace(" ", "")}
    font["name"].names = [name for name in font["name"].names if name.nameID in (0, 13, 14)]
    for identifier, text in names.items():
        font["name"].setName(text, identifier, 3, 1, 0x409)
    subset.save_font(font, str(FONT), options)


if __name__ == "__main__":
    add_to_font(Path(sys.argv[1]), sys.argv[2])
    print(f"{FONT}: {FONT.stat().st_size} bytes, {len(characters())} characters")
