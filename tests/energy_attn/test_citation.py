"""What `citation()` says agrees with what the repository says of itself."""

import re
from pathlib import Path

import energy_attn as ea

ROOT = Path(__file__).resolve().parents[2]


def test_entries_are_bibtex():
    """A brace lost in formatting makes the whole bibliography unreadable."""
    text = ea.citation()
    assert re.findall(r"^@(\w+)\{(\w+),$", text, re.MULTILINE) == [
        ("software", "energy_attn"),
        ("article", "shyam2024tree"),
    ]
    for entry in text.split("\n\n"):
        depth = 0
        for character in entry:
            depth += {"{": 1, "}": -1}.get(character, 0)
            assert depth >= 0
        assert depth == 0 and entry.endswith("\n}")


def test_agrees_with_the_repository():
    """A version or a title that is written twice drifts apart."""
    text, cff = ea.citation(), (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version = {{{ea.__version__}}}" in text
    assert set(re.findall(r"^version: (.+)$", cff, re.MULTILINE)) <= {ea.__version__}
    for said in ("attention as the gradient of a free energy", "2408.04093"):
        assert said in text.lower() and said in cff.lower()
