"""Reproducible decoders, compiled for TPUs that are not there: nothing of XLA's rounds but rotary angles' sines."""

import numpy as np
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

from tests.support.programs import compiled, of_xla, training
from tests.support.tpu import devices

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("user_settings")]
ANGLES = {"cosine", "sine"}


@pytest.mark.parametrize(
    ("chip", "what", "name", "dtype"),
    [
        ("v5e", "gradients", "llama", "bfloat16"),
        ("v5e", "prompt", "gpt_oss", "bfloat16"),
        ("v5e", "step", "gpt_oss", "float32"),
    ],
)
def test_what_rounds(chip, what, name, dtype):
    """A product or a sum of XLA's, whose order follows the shape of a call; a product that is added unrounded."""
    length = 1 if what == "step" else 300
    program = compiled(what, name, dtype, length, SingleDeviceSharding(devices(chip)[0]))
    assert of_xla(program).keys() <= ANGLES


def test_over_a_mesh():
    """A gradient that devices add up, or the sum of a tile that XLA splits."""
    mesh = Mesh(np.array(devices("v5e")).reshape(2, 2), ("data", "token"))
    # one of zeros, which no rounding of an output left
    assert of_xla(training(mesh, "bfloat16")).keys() <= ANGLES | {"exponential"}
