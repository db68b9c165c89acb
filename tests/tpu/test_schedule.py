"""The schedule of the TPU kernel's forward, as libtpu makes it ahead of time."""

import pytest

from tests.support.tpu_listings import listed

pytestmark = pytest.mark.tpu


def test_larger_blocks_take_fewer_bundles():
    """Blocks that are larger on a chip where XLA's schedule does not gain by it, or a step that takes longer."""
    found = listed("schedule", "v5e", "v6e")
    small, own = found["v5e"]
    assert small == own < 2600
    small, own = found["v6e"]
    assert own < 0.9 * small < 0.9 * 2150
