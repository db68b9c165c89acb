"""`python -m energy_attn bench` and `info`: their computations and output, without times."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.__main__ import main
from energy_attn.cli import bench
from energy_attn.cli.bench import _cases, _generation, _masks, _measure, _program, _speculative
from energy_attn.models import Llama, LlamaConfig
from tests.support.selection import few


def small_models():
    """Untrained models, quicker than the trained ones."""
    config = LlamaConfig(256, 16, 24, num_hidden_layers=1, num_attention_heads=2)
    models = (Llama(config, key=jax.random.key(seed)) for seed in range(2))
    return _generation.Models(*models, np.arange(4096).astype(np.uint8))


@pytest.mark.full
@pytest.mark.usefixtures("user_settings")
@pytest.mark.parametrize("suite", few(list(bench.SUITES), "observables"))
def test_suites(suite, tmp_path, capsys, monkeypatch):
    """A suite that fails, or whose peers compute something else."""
    seen, cases = set(), []
    for case in bench.SUITES[suite]:  # one of each kind: others differ only in size
        kind = case.name, "T=1," in case.sizes
        if kind not in seen:
            seen.add(kind)
            cases.append(case)
    monkeypatch.setitem(bench.SUITES, suite, tuple(cases))
    monkeypatch.setattr(_generation, "read_models", small_models)
    monkeypatch.setattr(_program, "_LAYERS", (1, 2))
    arguments = ["bench", "--suite", suite, "--shrink", "128", "--repeats", "2"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / f"{suite}.json").read_text())
    assert [row["name"] for row in result["times"]] == [case.name for case in cases]
    for row in result["times"]:
        peers = set(row["times_faster"])
        assert peers and peers == set(row["median_ms"]) - {_cases.OURS}
        # one pass of attention is there for its cost: its results are not compared
        assert set(row["largest_difference"]) == peers - {
            _cases.ONE_PASS,
            _cases.ONE_GRADIENT,
            _speculative.DECODE,
            _masks.CAUSAL,
        }
        tolerance = {"float32": 1e-4, "bfloat16": 0.05, "int32": 0}[row["dtype"]]
        assert max(row["largest_difference"].values(), default=0) <= tolerance, row
        assert len(row["runs_ms"][_cases.OURS]) == 2
        assert ("of_bandwidth" in row) == (row["name"] == "decode") == ("GB_per_s" in row)
    compiled = [(row["layers"], row["causal"]) for row in result.get("compilation", ())]
    wanted = [(1, False), (1, True), (2, False), (2, True)]
    assert compiled == (wanted if suite == "cpu" else [])
    assert result["machine"]["jax"] and result["bandwidth"]["GB_per_s"] > 0
    assert "faster than" in capsys.readouterr().out


def test_wrong_answers_are_seen():
    """A fast wrong answer that is not compared."""
    found = {_cases.OURS: lambda: jnp.ones(3), "peer": lambda: jnp.asarray([1.0, 1.0, 1.5])}
    assert bench._differences(found) == {"peer": 0.5}


def test_sides_take_turns(monkeypatch):
    """All runs of one side before those of another: a machine that slows down would favour the first."""
    monkeypatch.setattr(_measure, "SHORT", 0.0)
    order = []

    def side(name):
        def run():
            order.append(name)
            return jnp.zeros(1)

        return run

    seconds = _measure.measure({"a": side("a"), "b": side("b")}, repeats=3)
    assert (
        "".join(order) == "aabb" + "aabb" * 3
    )  # warmed up, then each time a run before the one timed
    assert [len(runs) for runs in seconds.values()] == [3, 3]


def test_wrong_options(capsys):
    """Nothing measured, silently."""
    assert main(["bench", "--repeats", "0"]) == 2
    assert "numbers of at least 1" in capsys.readouterr().err


def test_info_explains_a_call(capsys):
    """A choice explained for another platform or other shapes than those given."""
    call = ["info", "--query", "1,1,32,128", "--key", "1,4096,8,128"]
    assert main([*call, "--platform", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "used on cpu" in out and "\n    decode_cpu\n" in out and "[1, 4096, 8, 128]" in out
    assert main(["info", "--query", "2,512,4,64", "--dtype", "float64", "--causal"]) == 0
    out = capsys.readouterr().out
    assert "\n    blockwise\n" in out and "as decode declines: query: wanted at most 64 rows" in out


def test_info_explains_a_gpu(capsys):
    """An answer for an H100, to a question about a GPU that neither cuDNN nor Triton knows."""
    call = ["info", "--platform", "cuda", "--query", "1,256,8,256", "--causal"]
    for capability, name in (("9.0", "cudnn"), ("8.0", "pallas_gpu"), ("7.5", "blockwise")):
        assert main([*call, "--capability", capability]) == 0
        assert f"\n    {name}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capability", "9"], "wanted two numbers, as in 9.0, got '9'"),
        (["--platform", "cpu", "--capability", "9.0"], "--capability is for --platform cuda"),
        (["--query", "1,2,3"], "wanted four sizes of at least 1, got '1,2,3'"),
        (["--query", "1,2,3,x"], "wanted four sizes"),
        (["--query", "1,1,8,64", "--key", "1,9,3,64"], "a K that divides 8"),
        (["--platform", "abacus"], "invalid choice"),
    ],
)
def test_info_wrong_options(arguments, message, capsys):
    """A traceback instead of a message."""
    try:
        status = main(["info", *arguments])
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    assert message in capsys.readouterr().err
