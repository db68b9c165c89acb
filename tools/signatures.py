"""MkDocs hook: a signature that is not broken into lines stops the build, and says on which page it stands.

mkdocstrings breaks them with a formatter. Where it finds none it says so, and goes on with lines of thousands of
pixels.
"""

import html
import re
from typing import Any

from mkdocs.exceptions import PluginError

SIGNATURE = re.compile(r'<div class="doc-signature highlight">.*?<code>(.*?)</code>', re.DOTALL)
# As many characters fit on a page. `line_length` in mkdocs.yml is less; but a name with a long type cannot be broken.
LONGEST = 80


def on_page_content(content: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs with the HTML of a page, docstrings included."""
    for signature in SIGNATURE.findall(content):
        lines = html.unescape(re.sub("<[^>]*>", "", signature)).splitlines()
        for line in lines:
            if len(line) > LONGEST:
                raise PluginError(
                    f"{page.file.src_uri}: a line of {len(line)} characters in the signature of {lines[0][:40]!r}; "
                    "is ruff installed, which the extra `docs` names?"
                )
    return content
