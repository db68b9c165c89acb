"""Reproducible decoders, compiled for GPUs that are not there: what rounds is the same code in all programs."""

import re

import pytest
from jax.sharding import Mesh, SingleDeviceSharding

from tests.support.cuda import entries, nodes
from tests.support.reproducible_programs import compiled, of_xla, training

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("user_settings")]
KERNELS = {"tile_program_product", "tile_program_sums", "tile_program_entries"}
WEIGHTS = 5  # of different shapes, in a layer and behind it


def place(capability=(9, 0)):
    return SingleDeviceSharding(nodes(1, 1, capability).devices.item())


@pytest.mark.parametrize(
    ("what", "name", "dtype"),
    [
        ("gradients", "llama", "bfloat16"),
        ("prompt", "gpt_oss", "bfloat16"),
        ("step", "gpt_oss", "float32"),
    ],
)
def test_what_rounds(what, name, dtype):
    """A product, a sum or a function of XLA's, which it computes otherwise here and there; a product that is fused."""
    assert not of_xla(compiled(what, name, dtype, 1 if what == "step" else 300, place()))


def test_weights_stay_where_they_are():
    """A step that writes a copy of its weights, to round them or to turn them."""
    text = compiled("step", "llama", "bfloat16", 1, place()).as_text()
    made = re.findall(r"= bf16\[(?:640,256|256,640|517,256)\][^=]*? ([a-z\-]+)\(", text)
    assert set(made) <= {"parameter", "bitcast", "get-tuple-element"}


def test_over_a_mesh():
    """A gradient that devices add up, or the sum of a tile that XLA splits."""
    mesh = Mesh(nodes(1, 4).devices.reshape(2, 2), ("data", "token"))
    program = training(mesh, "bfloat16")
    # of zeros, which no rounding of an output left
    assert of_xla(program) == {"exponential": 1}
    assert "all-reduce" not in program.as_text()


def code(folder):
    """The PTX of the kernels of tiles, by name: one for each shape of weights."""
    found = {}
    for name, entry in entries(folder, r"(tile_program_[a-z]+)\w*"):
        found.setdefault(name, set()).add(re.sub(name + r"\w*", name, entry))
    return found


@pytest.mark.parametrize(
    ("capability", "dtype"), [((8, 0), "bfloat16"), ((9, 0), "bfloat16"), ((9, 0), "float32")]
)
def test_a_tile_is_one_program(capability, dtype, tmp_path):
    """A constant in a kernel that depends on how many rows a call has."""
    texts = []
    for what, length in (("prompt", 300), ("step", 1)):
        (folder := tmp_path / what).mkdir()
        options = {"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx"}
        compiled(what, "llama", dtype, length, place(capability), options)
        texts.append(code(folder))
    assert texts[0].keys() == KERNELS
    assert texts[0] == texts[1]
    assert len(texts[0]["tile_program_product"]) == WEIGHTS
