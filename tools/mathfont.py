#!/usr/bin/env python3
"""Makes the font of the documentation's equations, a subset of another, and lists its characters.

    python tools/mathfont.py texgyretermes-math.otf

writes `docs/fonts/math.woff2` anew. Browsers draw MathML with a font that has a MATH table: without one sums stay small
and brackets do not grow; and few systems have one. TeX Gyre Termes Math 1.543 is in every TeX distribution.
"""

import sys
from functools import cache
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTFont

FONT = Path(__file__).resolve().parents[1] / "docs" / "fonts" / "math.woff2"
# A modified font needs another name by its licence.
FAMILY = "energy_attn Math"
# First and last code points of what equations are written with. Letters alone are drawn in italics: U+1D434 and
# U+1D6E2 on.
RANGES = (
    *((0x20, 0x7E), (0xA0, 0xA0), (0xAC, 0xB7), (0xD7, 0xD7), (0xF7, 0xF7), (0x2C6, 0x2C7)),
    *((0x2D9, 0x2DC), (0x302, 0x308), (0x391, 0x3D6), (0x3F5, 0x3F5), (0x2010, 0x2064)),
    *((0x210E, 0x2115), (0x211D, 0x211D), (0x2190, 0x2194), (0x21A6, 0x21A6), (0x21D2, 0x21D4)),
    *((0x2200, 0x222B), (0x2235, 0x22A5), (0x22C0, 0x22C5), (0x22EE, 0x22F1), (0x2308, 0x230B)),
    *((0x27E8, 0x27E9), (0x2A7D, 0x2A7E), (0x2AAF, 0x2AB0), (0x1D400, 0x1D467)),
    *((0x1D538, 0x1D550), (0x1D68A, 0x1D6A3), (0x1D6E2, 0x1D71B)),
)


def cut(source: Path) -> None:
    """Writes the part of a font that draws the characters in `RANGES`, sizes of operators and brackets included."""
    options = subset.Options(
        flavor="woff2", layout_features=["ssty"], hinting=False, drop_tables=["FFTM"]
    )
    font = subset.load_font(str(source), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=[c for first, last in RANGES for c in range(first, last + 1)])
    subsetter.subset(font)
    (script,) = font["GSUB"].table.ScriptList.ScriptRecord
    # browsers do not look up "math", the original tag: primes would be too small
    script.ScriptTag = "DFLT"
    names = {1: FAMILY, 2: "Regular", 3: FAMILY, 4: FAMILY, 6: FAMILY.replace(" ", "")}
    font["name"].names = [name for name in font["name"].names if name.nameID in (0, 13, 14)]
    for identifier, text in names.items():
        font["name"].setName(text, identifier, 3, 1, 0x409)
    FONT.parent.mkdir(exist_ok=True)
    subset.save_font(font, str(FONT), options)


@cache
def characters() -> frozenset[str]:
    """The characters of the font, and those that are never drawn: spaces and invisible operators."""
    invisible = {chr(c) for c in range(0x2061, 0x2065)} | {"\n", " ", "\xa0"}
    return frozenset(map(chr, TTFont(FONT).getBestCmap())) | invisible


if __name__ == "__main__":
    cut(Path(sys.argv[1]))
    print(f"{FONT}: {FONT.stat().st_size} bytes, {len(characters())} characters")
