"""`python -m energy_attn reproducible`: what it says of bits and costs, and that the page quotes what was measured."""

import json

import pytest

from energy_attn.cli.reproducible import EqualBits, _table
from tests.support.complaints import complaint
from tests.support.flags import ROOT, spawn


def test_page():
    """Figures of the page that are not those that are committed."""
    found = json.loads((ROOT / "docs" / "benchmarks" / "reproducible.json").read_text())
    page = (ROOT / "docs" / "reproducible.md").read_text()
    assert _table([EqualBits(**x) for x in found["bits"]]) in page
    for cost in found["costs"]:
        times = f"{cost['reproducible'] / cost['plain']:6.2f}   ({1e3 * cost['plain']:.2f} ms)"
        assert f"{cost['program']:<36} {times}" in page


def test_wrong_folder(capsys):
    """A file that cannot be written, found out when all is done."""
    said = complaint(["reproducible", "--json", "/nowhere/at/all.json"], capsys)
    assert "--json wanted a path in a folder that exists" in said


@pytest.mark.full
def test_all_bits(tmp_path):
    """A way to compute rows that has other bits; a file without what was printed."""
    path = tmp_path / "found.json"
    said = spawn("-m", "energy_attn", "reproducible", "--json", path, devices=4)
    found = json.loads(path.read_text())
    assert f"format {found['format']}," in said
    assert said.count("✓ all bits") == len(found["bits"]) > 10
    assert all(x["reproducible"] == 1 for x in found["bits"])
