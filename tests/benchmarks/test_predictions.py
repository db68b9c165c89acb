"""Published steps beside predictions: the page, its data, and what the model says today."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import predictions
from energy_attn.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "predictions.md").read_text(encoding="utf-8")
FOUND = json.loads(predictions.RESULT.read_text(encoding="utf-8"))


def test_the_page_has_the_predictions():
    """A table that is older than its data, a row or a miss that is left out."""
    shown = PAGE.partition("<!-- python -m benchmarks.predictions -->\n")[2].partition(
        "<!-- end -->"
    )[0]
    assert shown.strip() == predictions.table(FOUND)
    rows = re.findall(r"^\| llama.*\|$", shown, re.MULTILINE)
    assert len(rows) == len(predictions.ROWS) >= 20
    misses = [x for x in FOUND["rows"] if not 1 / 1.25 <= x["published"] / x["predicted"] <= 1.25]
    assert sum("**" in x for x in rows) == len(misses) > 0
    for source in FOUND["sources"].values():
        assert re.fullmatch(r"202\d-\d\d-\d\d", source["date"]) and source["url"] in shown


def test_the_data_is_the_models():
    """Predictions of an older model, or a published number that was changed by hand."""
    today = predictions.compute()
    assert today["sources"] == FOUND["sources"]
    for now, then in zip(
        today["rows"] + today["growth"], FOUND["rows"] + FOUND["growth"], strict=True
    ):
        numbers = {key for key, x in then.items() if isinstance(x, float)}
        assert {key: now[key] for key in numbers} == pytest.approx(
            {key: then[key] for key in numbers}, rel=1e-2
        )
        assert {key: now[key] for key in now.keys() - numbers} == {
            key: then[key] for key in then.keys() - numbers
        }
    published = [x["published"] for x in FOUND["rows"] if x["source"] == "ulysses"]
    assert published == [8.9, 8.83, 16.38, 16.38]


def test_the_sum():
    """A step without one of its parts, or a ratio upside down."""
    for row in FOUND["rows"]:
        seconds = row["weights"] + row["attention"] + row["exposed"]
        assert row["predicted"] == pytest.approx(seconds, rel=1e-2, abs=2e-4)
        assert row["ratio"] == pytest.approx(row["published"] / row["predicted"], rel=1e-2)
        assert 0 <= row["exposed"] <= row["transfers"] + 1e-4


def test_the_page_has_the_plan(tmp_path, capsys):
    """A table that the command no longer prints."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(predictions.MODELS["llama3-8b"].to_json()))
    command = "plan --chip v5p --axes 4,4,8 --tokens 1M --model".split()
    assert main([*command, str(config)]) == 0
    shown = PAGE.partition("```text\n")[2].partition("\n```")[0]
    assert capsys.readouterr().out.strip() == shown
