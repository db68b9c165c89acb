"""`python -m energy_attn plan`: what it says of a model on a mesh, against sums by hand."""

import dataclasses
import json

import pytest

from energy_attn.__main__ import main
from energy_attn.cli._command import MODEL
from energy_attn.cli.plan import Job, weights
from energy_attn.distributed import cost
from energy_attn.distributed import plan as planner
from energy_attn.models import ExpertsConfig, LlamaConfig
from tests.support.complaints import complaint

CONFIG = LlamaConfig(
    1000, 64, 160, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4
)
MESH = "--chip", "v5p", "--axes", "4,4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(CONFIG.to_json()))
    return made


@pytest.fixture
def plan(folder, capsys):
    """The object that the command prints for some options."""

    def run(*options):
        command = ["plan", *MESH, "--model", str(folder), *options, "--json"]
        assert main(command) == 0
        return json.loads(capsys.readouterr().out)

    return run


def by_method(found):
    return {(x["method"], x["layout"]): x for x in found["plans"]}


def test_seconds_and_bytes(plan):
    """Layers that are not counted, a backward that is left out, a batch or a K of 1000 tokens."""
    options = "--tokens", "2K", "--batch", "3", "--tile", "1"
    trained, read = by_method(plan(*options)), by_method(plan(*options, "--no-gradients"))
    topology, chip = cost.topology("tpu_v5p", (4, 4)), planner.chip("v5p")
    shape = cost.Shape(3, 2048, 2048, 8, 4, 8, causal=True, queries_sharded=True, layout="zigzag")
    for gradient, rows in ((True, trained), (False, read)):
        ring = rows["ring", "zigzag"]
        time = planner.step_time("ring", "keys", shape, topology, chip, gradient=gradient)
        assert [ring[x] for x in time._fields] == pytest.approx([3 * x for x in time])
        assert ring["sent"] == 3 * cost.volume("ring", "keys", shape, topology, gradient=gradient)
        assert ring["seconds"] == ring["products"] + ring["exposed"]
    more = trained["ring", "zigzag"]["products"] / read["ring", "zigzag"]["products"]
    assert more == pytest.approx(3.5)
    # every query sees half of the keys; two products of 8 numbers, on 16 chips
    pairs = 3 * 8 * 2048 * 2049 / 2 / 16
    assert read["ring", "zigzag"]["products"] == pytest.approx(3 * pairs * 32 / (0.654 * 459e12))
    contiguous, even = read["ring", "contiguous"], read["ring", "zigzag"]
    assert contiguous["products"] / even["products"] == pytest.approx(2 - 1 / 16, rel=0.01)


def test_the_model_that_comes_with_the_library(capsys):
    """A name that is taken for a file."""
    found = []
    for model in "demo", str(MODEL):
        assert main(["plan", *MESH, "--tokens", "2K", "--model", model, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


def test_memory(plan):
    """Weights that are whole on each device, moments in 16 bits, a cache of one layer, or inputs that are not kept."""
    matrices = 3 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160)
    norms = 3 * 2 * 64 + 64
    every = matrices + norms + 2 * 1000 * 64
    assert weights(CONFIG, "bfloat16") == (every, every - 1000 * 64)
    read, trained = (plan("--tokens", "2K", *x) for x in (["--no-gradients"], []))
    shape = cost.Shape(1, 2048, 2048, 8, 4, 8, causal=True, queries_sharded=True)
    attention = cost.memory("ring", "keys", shape, cost.topology("tpu_v5p", (4, 4)))
    found = by_method(read)["ring", "contiguous"]["memory"]
    cache = 3 * 128 * 2 * 4 * 8 * 2
    assert list(found.values()) == [2 * every // 16, cache, attention]
    found = by_method(trained)["ring", "contiguous"]["memory"]
    assert list(found.values()) == [(2 + 2 + 4 + 4) * every // 16, 3 * 128 * 64 * 2, attention]
    rate = 0.654 * 459e12
    assert read["weight_seconds"] == pytest.approx(2 * (every - 64000) * 128 / rate)
    assert trained["weight_seconds"] == pytest.approx(6 * (every - 64000) * 128 / rate)


def test_layers_and_experts():
    """A window in all layers or in none; experts that every token goes through."""
    windows = LlamaConfig(
        *(1000, 64, 160, 3, 8, 4),
        model_type="gemma2",
        sliding_window=100,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    )
    job = Job(windows, planner.chip("v5p"), cost.topology("tpu_v5p", (4,)), 1024)
    assert {x.window: n for x, n in job.shapes("zigzag").items()} == {(99, 0): 2, None: 1}
    short = dataclasses.replace(job, tokens=64)
    assert {x.window: n for x, n in short.shapes("zigzag").items()} == {None: 3}
    experts = ExpertsConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=160)
    routed = weights(
        LlamaConfig(*(1000, 64, 160, 3, 8, 4), model_type="mixtral", experts=experts), "bfloat16"
    )
    dense = weights(CONFIG, "bfloat16")
    expert, router = 3 * 3 * 64 * 160, 3 * 8 * 64
    assert routed == (dense.all + 7 * expert + router, dense.used + expert + router)


def test_fits(plan, folder, capsys):
    """A context that is too long and comes first, or is said to fit; parts of memory that fit one by one."""
    found = plan("--tokens", "64M", "--batch", "64")
    assert not any(x["fits"] for x in found["plans"])
    command = ["plan", "--chip", "v5e", "--axes", "8", "--tokens", "80M", "--model", str(folder)]
    assert main([*command, "--no-gradients", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [x["fits"] for x in plans] == [sum(x["memory"].values()) <= 16e9 for x in plans]
    together = [x for x in plans if not x["fits"] and max(x["memory"].values()) < 16e9]
    assert [x["method"] for x in together] == ["ulysses"]
    assert main([*command, "--no-gradients"]) == 0
    table = capsys.readouterr().out.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    head, *rows = (x.split() for x in table)
    assert head[:4] == ["method", "layout", "fits", "memory"] and len(rows) == 10
    fits = [x[2] == "yes" for x in rows]
    assert fits == sorted(fits, reverse=True) and 0 < sum(fits) < len(fits)
    assert all((int(x[3][:-1]) <= 100) == (x[2] == "yes") for x in rows)


def test_the_table(folder, capsys):
    """A method that is left out silently, or a table without what it does not count."""
    command = ["plan", *MESH, "--tokens", "2K", "--model", str(folder / "config.json")]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "1 × 2048 tokens on 16 v5p, forward and backward, all 3 layers\n\nmethod "
    )
    assert "no tree: wanted --no-gradients, got" in out and "no ulysses: wanted" in out
    assert "not counted: the backward's buffers, what MLPs" in out
    assert main([*command, "--method", "ring", "--layout", "striped", "--efficiency", "1"]) == 0
    out = capsys.readouterr().out
    assert "ring    striped  yes" in out and "gather" not in out and "at 100% of 459 TFLOP/s" in out


TOKENS = "argument --tokens: wanted a number above 0"
BAD = {
    "--tokens 1G": f"{TOKENS}, as 32768, 32K or 1M, got '1G'",
    "--tokens 0": TOKENS,
    f"--tokens {'9' * 5000}": f"{TOKENS} and at most 2147483647",
    "--tokens 2048M": f"{TOKENS} and at most 2147483647",
    "--tokens 1001": "--tokens: wanted a multiple of the 16 devices, got 1001",
    "--axes 4,x": "argument --axes: wanted sizes of mesh axes, as 8 or 4,4,8, got '4,x'",
    "--axes 0": "argument --axes: wanted sizes",
    f"--axes {'9' * 30}": "argument --axes: wanted sizes",
    "--axes 65536 --tokens 64K": "--axes: wanted at most 16384 devices, got 65536",
    "--method tree": "--method: wanted --no-gradients, got --gradients",
    "--method ulysses": "--method: wanted a number of devices that can share 8 heads",
    "--tokens 16 --layout zigzag": "--layout: shape: wanted a multiple of 32 tokens",
    "--chip abacus": "argument --chip: invalid choice: 'abacus'",
    "--model nowhere": "--model: path: wanted a config.json, got nowhere",
    "--efficiency 2": "--efficiency: wanted a part of the peak, above 0 and at most 1, got 2.0",
    "--chip h100 --compile": "--compile: wanted a TPU as --chip, v4, v5e, v5p, v6e, got 'h100'",
    "--nodes 2 --compile": "--compile: wanted one slice, got --nodes",
}


@pytest.mark.parametrize(("options", "message"), BAD.items(), ids=lambda text: text[:40])
def test_bad_options(options, message, folder, capsys):
    """A traceback, or a message that does not name the option."""
    given = ["plan", *MESH, "--tokens", "2K", "--model", folder, *options.split()]
    assert message in " ".join(complaint(given, capsys).split())


def test_no_compiler(folder, capsys, monkeypatch):
    """An ImportError of JAX's where libtpu is not installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command = ["plan", *MESH, "--tokens", "2K", "--model", folder, "--compile"]
    assert "--compile: wanted libtpu, which compiles" in complaint(command, capsys)
