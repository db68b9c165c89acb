"""The training on a mesh: one device is the judge of its losses, the page quotes what was measured."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from energy_attn.models import Llama

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "mesh_training.md"
sys.path.insert(0, str(ROOT / "examples"))
script = importlib.import_module("mesh_training")

STEPS = 6
TINY = dataclasses.replace(
    script.CONFIG, hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=8
)
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 20, np.uint8)


@pytest.fixture(scope="module")
def found():
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        return script.measure(TEXT, STEPS, TINY)


def plain():
    """The losses of a loop as one writes it for one device, with dense attention."""
    model = Llama(TINY, key=jax.random.key(0))
    state, losses = script.OPTIMISER.init(model), []

    def dense(query, key, value, **_):
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], 2) for x in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
        scores = jnp.where(jnp.tri(query.shape[1], dtype=bool), scores, -jnp.inf)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)
        return out, jax.nn.logsumexp(scores, -1).swapaxes(1, 2)

    @jax.jit
    def step(model, state, tokens):
        def loss(model):
            likely = jax.nn.log_softmax(model(tokens, attend=dense).logits)[:, :-1]
            return -jnp.take_along_axis(likely, tokens[:, 1:, None], -1).mean()

        value, slope = jax.value_and_grad(loss)(model)
        updates, state = script.OPTIMISER.update(slope, state, model)
        return optax.apply_updates(model, updates), state, value

    for number in range(STEPS):
        model, state, loss = step(model, state, script.batch(TEXT, number))
        losses.append(float(loss))
    return losses


@pytest.mark.full
def test_losses(found, user_settings):
    """A gradient that is not summed over an axis, or a sequence that is cut at devices."""
    wanted = plain()
    assert wanted[0] - wanted[-1] > 0.1
    for losses in found["losses"].values():
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert found["difference"]["float64"] < 1e-10


@pytest.mark.full
def test_resumed(found):
    """A checkpoint without the optimiser's state, or a training that reads other batches after it."""
    assert found["resumed"] == {"after": STEPS // 2, "equal": True}


@pytest.mark.full
def test_layout_and_what_is_sent(found):
    """Weights that lie whole on a device between steps, or sequences, heads or activations that are gathered."""
    parts, whole = found["held"]["weights"]
    assert whole / 4 <= parts < 1.02 * whole / 4
    as_above, mapped, unnamed, _ = found["sent"].values()
    gathered = [x for x in as_above if x["kind"] == "all-gather"]
    found_sends = [(x["axes"], x["count"], x["bytes"]) for x in gathered]
    assert found_sends == [("data", found["arrays"], parts)]
    assert {x["axes"] for x in as_above if x["kind"] == "collective-permute"} == {"sequence"}
    for kind in "all-gather", "collective-permute":
        assert [x for x in mapped if x["kind"] == kind] == [
            x for x in as_above if x["kind"] == kind
        ]
    assert "tensor" in {x["axes"] for x in unnamed if x["kind"] == "all-gather"}


def test_the_page_quotes_the_report():
    """A figure of the page that was measured with another program, or never."""
    report = json.loads((ROOT / "docs" / "mesh_training" / "report.json").read_text())
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert " ".join(script.table(report).split()) in page
    sent = report["sent"]
    gathers = [
        next(x["count"] for x in sent[name] if (x["axes"], x["kind"]) == (axes, "all-gather"))
        for name, axes in (
            ("as above", "data"),
            ("without `heads=` and `batch=`", "tensor"),
            ("weights not gathered first", "data"),
        )
    ]
    held, ours = report["held"]["weights"], report["losses"]["mesh"]
    gap = report["difference"]
    for quoted in (
        f"holds {held[0]:,} of the {held[1]:,} bytes",
        f"{report['weights']:,} weights in {report['arrays']} arrays",
        f"Over {report['steps']} steps, from {ours[0]:.2f} to {ours[-1]:.2f} nats",
        f"at most {gap['float32, first half']:.0e} in the first half and {gap['float32']:.0e} in",
        f"the same {report['steps']} steps is {gap['float64']:.0e}.",
        f"read after {report['resumed']['after']} steps",
        f"gathered, {gathers[1]} times",
        f"are the {gathers[0]} weights over `data`",
        f"over `data` {gathers[2]} times",
    ):
        assert quoted in page, quoted
    assert report["resumed"]["equal"] and "in every bit" in page
