"""`citation()` prints what was used, and agrees with the repository's own metadata."""

import functools
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.functional import _citation
from energy_attn.models import Llama, LlamaConfig, PromptLookup, generate

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def used(monkeypatch, capsys):
    """The BibTeX keys cited since the test began, in order."""
    monkeypatch.setattr(_citation, "_used", {"tree": _citation._PAPERS["tree"]})

    def keys():
        assert ea.citation() is None
        return re.findall(r"^@\w+\{(\w+),$", capsys.readouterr().out, re.MULTILINE)

    return keys


def text(capsys) -> str:
    ea.citation()
    return capsys.readouterr().out


def test_entries_are_bibtex(used, capsys):
    """A brace lost in formatting makes the whole bibliography unreadable."""
    _citation.cite(*_citation._PAPERS)
    entries = text(capsys).strip().split("\n\n")
    assert len(entries) == 1 + len(_citation._PAPERS)
    for entry in entries:
        depth = 0
        for character in entry:
            depth += {"{": 1, "}": -1}.get(character, 0)
            assert depth >= 0
        assert depth == 0 and entry.endswith("\n}")
        assert re.match(r"@(article|software)\{\w+,\n", entry)
        assert all(re.fullmatch(r"  \w+ +=( \{.+\}),", line) for line in entry.split("\n")[1:-1])
    years = re.findall(r"arXiv:(\d\d)\d\d\.\d{5}\},\n  year    = \{20(\d\d)\}", "\n".join(entries))
    assert len(years) == len(_citation._PAPERS) and all(a == b for a, b in years)


def test_only_what_was_used(used):
    """A bibliography with papers of features that a program never used."""
    software, tree = "energy_attn", "shyam2024tree"
    kernels = ["milakov2018online", "dao2023flashattention2"]
    assert used() == [software, tree]
    given = [jax.ShapeDtypeStruct((1, 8, 8, 4), jnp.float32)] * 3

    def trace(**options):  # a call counts when it is traced
        jax.eval_shape(lambda *x: ea.attention(*x, **options), *given)

    trace(implementation="reference")
    assert used() == [software, tree]
    for _ in range(2):  # however often
        trace(implementation="blockwise")
    assert used() == [software, tree, *kernels]
    config = LlamaConfig(8, 8, 8, 1, 2)
    model = eqx.filter_eval_shape(lambda key: Llama(config, key=key), jax.random.key(0))
    with jax.set_mesh(make_mesh()):
        for method in ("tree", "ring", "ulysses", "hybrid", "gather"):
            trace(parallel=SequenceParallel(method=method))
    spread = ["liu2023ring", "jacobs2023ulysses", "fang2024usp", "grattafiori2024llama3"]
    assert used() == [software, tree, *kernels, *spread, "touvron2023llama"]
    drafted = functools.partial(generate, max_new_tokens=2, drafter=PromptLookup())
    eqx.filter_eval_shape(drafted, model, jax.ShapeDtypeStruct((1, 3), jnp.int32))
    ahead = ["leviathan2022speculative", "miao2023specinfer"]
    assert used() == [software, tree, *kernels, *spread, "touvron2023llama", *ahead]


def test_a_paper_without_an_entry():
    """A misspelt name that is ignored, which leaves the paper uncited."""
    with pytest.raises(KeyError, match="hopfeild"):
        _citation.cite("hopfeild")


def test_every_citation_is_known():
    """The same, for calls that no test makes."""
    source = "\n".join(p.read_text("utf-8") for p in (ROOT / "energy_attn").rglob("*.py"))
    named = {
        name
        for call in re.findall(r"\bcite\(((?:\s*\"\w+\",?)+)\s*\)", source)
        for name in re.findall(r'"(\w+)"', call)
    }
    assert {"flash", "llama"} <= named <= set(_citation._PAPERS)


def test_agrees_with_the_repository(used, capsys):
    """A version or a title that is written twice drifts apart."""
    cff, said = (ROOT / "CITATION.cff").read_text(encoding="utf-8"), text(capsys)
    assert f"version = {{{ea.__version__}}}" in said
    assert set(re.findall(r"^version: (.+)$", cff, re.MULTILINE)) <= {ea.__version__}
    for each in ("attention as the gradient of a free energy", "2408.04093"):
        assert each in said.lower() and each in cff.lower()
