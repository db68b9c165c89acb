"""`python -m benchmarks`: its computations and files, without times."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import llama, runner, speculative
from benchmarks.runner import OURS, Case, Output
from energy_attn.models import Llama, LlamaConfig
from tests.support.selection import few


@pytest.fixture
def small(monkeypatch):
    """Untrained models, quicker than the trained ones, and no transformers."""
    config = LlamaConfig(256, 16, 24, num_hidden_layers=1, num_attention_heads=2)
    models = [Llama(config, key=jax.random.key(seed)) for seed in range(2)]
    text = np.arange(4096).astype(np.uint8)
    monkeypatch.setattr(speculative, "read_models", lambda: speculative.Models(*models, text))
    monkeypatch.setattr(llama, "byte_llama", lambda: models[0])
    monkeypatch.setattr(llama, "held_out_text", lambda: text)
    monkeypatch.setattr(llama, "TRANSFORMERS", "not_installed")


@pytest.mark.usefixtures("user_settings", "small")
@pytest.mark.parametrize("suite", few(list(command.SUITES), "observables"))
def test_suites(suite, tmp_path, capsys, monkeypatch):
    """A suite that fails, or whose peers compute something else."""
    # one of each kind: others differ only in size
    kinds = {(x.name, x.shape.get("T") == 1): x for x in reversed(command.SUITES[suite])}
    cases = [*kinds.values()]
    monkeypatch.setitem(command.SUITES, suite, cases)
    arguments = [suite, "--shrink", "128", "--repeats", "2", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    result = json.loads((tmp_path / f"{suite}.json").read_text())
    assert [row["name"] for row in result["times"]] == [case.name for case in cases]
    for row in result["times"]:
        peers = set(row["times_faster"])
        assert peers == set(row["median_ms"]) - {OURS} and peers | set(row["absent"])
        # one pass of attention is there for its cost: its results are not compared
        assert set(row["largest_difference"]) == {x for x in peers if not x.startswith("our ")}
        tolerance = {"float32": 1e-4, "bfloat16": 0.05, "int32": 0}[row["dtype"]]
        assert max(row["largest_difference"].values(), default=0) <= tolerance, row
        assert len(row["runs_ms"][OURS]) == 2
        assert ("of_bandwidth" in row) == (row["name"] == "decode") == ("GB_per_s" in row)
        assert ("temporary_bytes" in row) == row["name"].startswith("compilation")
        assert ("temporary_MiB" in row) == (suite in ("vocabulary", "second_order"))
        assert ("tokens_per_pass" in row) == (row["name"] == "generate")
    assert result["machine"]["jax"] and result["bandwidth"]["GB_per_s"] > 0
    assert f"wrote {tmp_path / suite}.svg" in capsys.readouterr().out


def test_sides_of_one_case():
    """A fast wrong answer that is not compared, a peer that ends the suite, figures of another side."""

    def fails():
        raise ImportError("not installed")

    results = {
        OURS: Output(jnp.ones(3), {"passes": 2}),
        "peer": Output(jnp.asarray([1.0, 1.0, 1.5]), {"passes": 1}),
        "none": Output(jnp.full(3, jnp.nan), {"passes": 0}),
        "our attention": Output(jnp.zeros(1), {"passes": 1}),
    }
    runs = {name: lambda x=x: lambda: x for name, x in results.items()}
    case = Case("job", "float32", {"T": 1000, "N": 1000}, lambda **_: runs | {"absent": fails})
    row = runner.compare(case, 1)
    assert row["largest_difference"] == {"peer": 0.5, "none": math.inf}
    assert row["absent"] == {"absent": "ImportError: not installed"}
    assert row["passes"] == {name: x.figures["passes"] for name, x in results.items()}
    assert case.shrunk(10).shape == {"T": 100, "N": 1000}
    assert case.shrunk(500).shape["T"] == 16


def test_sides_take_turns(monkeypatch):
    """All runs of one side before those of another: a machine that slows down would favour the first."""
    monkeypatch.setattr(runner, "SHORT", 0.0)
    order = []
    sides = {name: lambda name=name: order.append(name) or jnp.zeros(1) for name in "ab"}
    seconds = runner.measure(sides, repeats=3)
    # warmed up, then each time a run before the one timed
    assert "".join(order) == "aabb" + "aabb" * 3
    assert [len(runs) for runs in seconds.values()] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "argument --repeats: wanted a number of at least 1, got '0'"),
        (["masks", "musk"], "SUITE: wanted some of cpu, observables, .*, got 'musk'"),
        (["masks", "--only", "musk"], "--only: wanted a part of a case of masks, got 'musk'"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    """Nothing measured, silently."""
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert re.search(message, capsys.readouterr().err)
