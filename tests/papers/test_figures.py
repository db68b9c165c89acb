"""The figures of papers/tree_attention that are committed."""

from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from papers.tree_attention import figures


@pytest.mark.full
def test_committed_figures(tmp_path):
    """A figure of other results than the committed files."""
    figures.main(tmp_path)
    drawn = sorted(tmp_path.rglob("*.svg"))
    assert len(drawn) == 4
    for path in drawn:
        committed = Path(figures.DOCS, path.relative_to(tmp_path)).read_text(encoding="utf-8")
        if f"Matplotlib v{version('matplotlib')}" in committed:  # others place letters elsewhere
            assert path.read_text(encoding="utf-8") == committed, path.name
