"""The toy policy gradient: its page quotes what was measured, and it runs."""

import importlib
import json
import sys

import jax
import numpy as np
import pytest

from tests.support.flags import ROOT

sys.path.insert(0, str(ROOT / "examples"))
script = importlib.import_module("train_to_rollout")


def test_page():
    """A ratio that the page says is 1 and was not, or is so wrong and was not."""
    found = json.loads((ROOT / "docs" / "benchmarks" / "train_to_rollout.json").read_text())
    for name in ("log_ratio", "kl"):
        assert found["reproducible"][name] == [0.0] * script.STEPS
    wrong = np.expm1(max(found["plain"]["log_ratio"]))
    said = f"by up to {wrong:.1%}".replace("%", " percent")
    assert said in (ROOT / "docs" / "reproducible.md").read_text()


@pytest.mark.full
def test_step():
    """Texts that are sampled with other log-probabilities than their training computes."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        assert script.run(True, 1)["log_ratio"] == [0.0]
