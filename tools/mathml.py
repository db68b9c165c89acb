"""MkDocs hook: converts the equations that arithmatex marked to MathML, which needs no script.

An equation that cannot be converted, or has a character that the equations' font lacks, stops the build with an error
that names the page.
"""

import html
import re
from typing import Any

import mathfont
from math_core import LatexError, LatexToMathML
from mkdocs.exceptions import PluginError

# What pymdownx.arithmatex writes with `generic: true`.
EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">'
    r"(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<block>.*?)\\\])"
    r"</(?P=tag)>",
    re.DOTALL,
)
CONVERTER = LatexToMathML(fancy_error=False)


def on_page_content(content: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs with the HTML of a page's Markdown, docstrings included."""

    def to_mathml(equation: re.Match[str]) -> str:
        block = equation["inline"] is None
        latex = html.unescape(equation["block"] if block else equation["inline"])
        try:
            mathml = CONVERTER.convert_with_local_state(latex.strip(), displaystyle=block)
        except LatexError as error:
            raise PluginError(f"{page.file.src_uri}: {latex!r}: {error}") from error
        drawn = html.unescape(re.sub("<[^>]*>", "", mathml))
        if lacking := set(drawn) - mathfont.characters():
            raise PluginError(
                f"{page.file.src_uri}: {latex!r}: docs/fonts/math.woff2 lacks {sorted(lacking)}; "
                "tools/mathfont.py says what it has"
            )
        return f'<{equation["tag"]} class="arithmatex">{mathml}</{equation["tag"]}>'

    return EQUATION.sub(to_mathml, content)
