"""`python -m energy_attn plan --compile`: the program that it compiles, beside the model."""

import json

import pytest

from energy_attn.__main__ import main
from energy_attn.cli._ahead import compiled
from energy_attn.distributed import cost
from energy_attn.models import LlamaConfig

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("user_settings")]


def test_a_compiled_plan(tmp_path, capsys):
    """A program of another method, without its backward, or whose bytes are not those of all its collectives."""
    config = LlamaConfig(1000, 1024, 1024, 2, 8, 4)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    command = ["plan", "--chip", "v5p", "--axes", "2,2", "--tokens", "8K", "--model", str(tmp_path)]
    assert main([*command, "--method", "ring", "--layout", "zigzag", "--compile", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    program = plan["compiled_layer"]
    assert program["sent"] == pytest.approx(plan["sent"] / 2, rel=0.01)  # of two layers
    assert program["memory"] > plan["memory"]["attention of a layer"]
    assert program["exposed"] == {"collective-permute": 0}


def test_a_gather_sums_on_a_v5p():
    """A compiler that no longer makes an all-reduce, which sends twice as much, of each scatter of gradients."""
    shape = cost.Shape(
        1, 8192, 8192, 8, 4, 128, causal=True, queries_sharded=True, layout="striped"
    )
    topology = cost.topology("tpu_v5p", (8,))
    forward = cost.volume("gather", None, shape, topology)
    both = cost.volume("gather", None, shape, topology, gradient=True)
    assert compiled("v5p", (8,), shape, "gather", False).sent == pytest.approx(forward, rel=0.01)
    scattered = both - forward * (1 + 7 / 8)
    program = compiled("v5p", (8,), shape, "gather", True)
    assert program.sent == pytest.approx(both + scattered, rel=0.01)
    assert all(program.exposed[kind] > 0 for kind in ("all-gather", "all-reduce"))


@pytest.mark.parametrize("method", ["ulysses", "hybrid"])
def test_gradients_are_exchanged_in_16_bits(method):
    """A compiler that exchanges gradients of 16-bit arrays in float32, as on CPUs."""
    shape = cost.Shape(
        *(1, 16384, 16384, 32, 8, 128), causal=True, queries_sharded=True, layout="striped"
    )
    model = cost.volume(method, None, shape, cost.topology("tpu_v5p", (2, 2)), gradient=True)
    assert compiled("v5p", (2, 2), shape, method, True).sent == pytest.approx(model, rel=0.01)


def test_no_such_slice():
    """A traceback of libtpu's."""
    shape = cost.Shape(1, 21, 21, 7, 7, 128, causal=True, queries_sharded=True)
    with pytest.raises(ValueError, match="--axes: wanted the sizes of a slice of v5e"):
        compiled("v5e", (3, 7), shape, "ring", False)
