"""Questions about documents, and eviction from a cache: what the scripts measure, and what their pages say of it."""

import functools
import importlib
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.cli.demo import byte_llama

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
attribution = importlib.import_module("attribution")
eviction = importlib.import_module("eviction")


def report(name):
    return json.loads((ROOT / "docs" / name / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model():
    return byte_llama()


def test_questions():
    """An answer that is in no document or in another one, or whose first byte is counted elsewhere."""
    for seed in range(8):
        text, number, start, chosen = attribution.text_of(seed)
        answer = text[start:].tobytes()
        documents = [text[number == i].tobytes() for i in range(attribution.DOCUMENTS)]
        assert [answer in x for x in documents] == [i == chosen for i in range(len(documents))]
        question = text[number < 0].tobytes().decode()
        name = re.search(r"self\.(\w{6})\.", question)
        assert name is not None and f"self.{name[1]}.".encode() in documents[chosen]
        assert len(answer) == attribution.SIZE and question.endswith(answer.decode())


def test_removals(model, user_settings):
    """A document that is hidden from some layers only, or another one: beside a mask of the user's."""
    text, number, start, _ = attribution.text_of(0)
    tokens, numbers = jnp.asarray(text, jnp.int32), jnp.asarray(number[:-1])
    hidden = 3
    attend = functools.partial(ea.attention, mask=(numbers != hidden)[None, None, None])
    whole = attribution.log_probability(model, tokens, start)
    without = attribution.log_probability(model, tokens, start, attend=attend)
    at = jax.jit(attribution.removals)(model, numbers, tokens, jnp.asarray(start))
    np.testing.assert_allclose(at[hidden], whole - without, rtol=1e-4, atol=1e-4)


def test_losses(model, user_settings, monkeypatch):
    """A cache that keeps all and reads otherwise; or one that loses what it was to keep."""
    monkeypatch.setattr(eviction, "KEPT", (64, 16))
    tokens = eviction.questions()[:2]
    found = eviction.losses(model, tokens, attribution.SIZE)
    text, _, start, _ = attribution.text_of(0)
    each = [
        attribution.log_probability(model, x, jnp.asarray(start)) / attribution.SIZE for x in tokens
    ]
    np.testing.assert_allclose(found["whole"], -np.mean(each), atol=2e-4)
    # with 16 tokens kept, all of them the newest ones, both ways keep the same
    newest, by_importance = found["newest"], found["read by all"]
    np.testing.assert_allclose(newest[1], by_importance[1], atol=2e-4)
    assert newest[0] != by_importance[0]


def test_what_the_pages_say():
    """A sentence that the numbers do not bear out."""
    answers, losses = report("attribution"), report("eviction")
    named, points = answers["named"], answers["points"]
    assert named["gradient"] >= named["removals"] and named["gradient"] < answers["questions"]
    assert np.median(points) > answers["documents"]
    change = np.maximum(1, np.abs(answers["effect_of_all"]))
    assert (np.abs(answers["gap"]) < 0.05 * change).all()
    first, second, third = answers["mebibytes_on_each_of_8_devices"].values()
    assert abs(second / first - 2) < 0.02 and abs(third / second - 2) < 0.02
    text, asked = losses["losses on text"], losses["losses on questions"]
    assert text["newest"][2] / text["whole"][0] < 1.0095
    half = f"half newest, half read by the last {eviction.QUERIES}"
    assert all(x > 1.04 * y for x, y in zip(text["read by all"][:4], text["newest"], strict=False))
    assert all(x < 1.005 * y for i in (0, 1, 4) for x, y in [(text[half][i], text["newest"][i])])
    for kind in (text, asked):
        assert all(x > 0.96 * y for x, y in zip(kind[half], kind["newest"], strict=True))
    sinks = f"first {eviction.FIRST} and newest"
    pairs = ((x, y) for k in (text, asked) for x, y in zip(k[sinks], k["newest"], strict=True))
    assert all(abs(x - y) < 0.011 for x, y in pairs)
