"""Test-time training: the outer gradient is that of the definition, on one device and a mesh; its page quotes it."""

import functools
import importlib
import json
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, make_mesh
from tests.support.flags import ROOT

sys.path.insert(0, str(ROOT / "examples"))
script = importlib.import_module("test_time_training")

CHUNK, CHUNKS, OPTIONS = 8, 3, {"width": 8, "heads": 2, "blocks": (1, 2)}


def defined(model, rows):
    """The outer loss as it is defined: a loop over chunks, and dense attention of whole sequences."""
    length = CHUNK * CHUNKS
    ahead = np.arange(length)[:, None] - np.arange(length)
    windows = np.where((ahead >= 0) & (ahead < CHUNK), 0.0, -np.inf)[:, None]
    causal = np.where(ahead >= 0, 0.0, -np.inf)[:, None]

    def norm(x):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    def turned(x):  # pairs of entries as complex numbers
        half = x.shape[-1] // 2
        angles = np.arange(length)[:, None] * 100.0 ** -(np.arange(half) / half)
        turned = jax.lax.complex(x[..., :half], x[..., half:]) * np.exp(1j * angles)[:, None]
        return jnp.concatenate([turned.real, turned.imag], -1)

    def layers(weights, x):
        return jax.nn.gelu(x @ weights[0]) @ weights[1]

    def attended(block, x, hidden):
        q, k, v = (jnp.einsum("td,dnh->tnh", norm(x), y) for y in block.project)
        scores = jnp.einsum("tnh,snh->tns", turned(q), turned(k)) / np.sqrt(q.shape[-1])
        weights = jax.nn.softmax(scores + hidden.swapaxes(1, 1), -1)
        return x + jnp.einsum("tns,snh,nhd->td", weights, v, block.join)

    def of_tokens(fasts, row):
        """The losses of all tokens, those of chunk `i` with the weights `fasts[i]`."""
        x = model.embedding[row[:-1]]
        for block in model.prefix:
            x = attended(block, x, causal)
            x = x + layers(block.mlp, norm(x))
        for number, block in enumerate(model.suffix):
            x = attended(block, x, windows)
            y = norm(x).reshape(CHUNKS, CHUNK, -1)
            moved = [layers(fast[number], z) for fast, z in zip(fasts, y, strict=True)]
            x = x + layers(block.mlp, norm(x)) + jnp.concatenate(moved)
        logits = norm(x) @ model.embedding.T
        likely = logits - jax.nn.logsumexp(logits, -1, keepdims=True)
        return -likely[np.arange(length), row[1:]].reshape(CHUNKS, CHUNK).mean(1)

    def of_row(row):
        def of_chunk(fast, before, number):
            return of_tokens([*before, *[fast] * (CHUNKS - number)], row)[number]

        fasts = [model.fast]
        for number in range(CHUNKS - 1):
            slope = jax.grad(of_chunk)(fasts[-1], fasts[:-1], number)
            rate = jnp.exp(model.log_rate)
            moved = [
                [w - rate * g for w, g in zip(*both, strict=True)]
                for both in zip(fasts[-1], slope, strict=True)
            ]
            fasts.append(moved)
        return of_tokens(fasts, row).mean()

    return sum(map(of_row, rows)) / len(rows)


@functools.cache
def problem():
    """A model in float64, rows of tokens, and the outer gradient by its definition."""
    model = script.make_model(jax.random.key(0), chunk=CHUNK, **OPTIONS)
    model = jax.tree.map(lambda x: x.astype(jnp.float64), model)
    model = eqx.tree_at(lambda x: x.log_rate, model, jnp.array(0.7))
    rows = np.random.default_rng(0).integers(0, script.TOKENS, (2, CHUNK * CHUNKS + 1))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return model, rows, jax.jit(jax.grad(defined))(model, rows)


def check(attention):
    model, rows, wanted = problem()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        gradient = jax.jit(jax.grad(script.mean_loss, has_aux=True), static_argnums=2)
        found, _ = gradient(model, jnp.asarray(rows), attention)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.abs(b).max() > 1e-4
        np.testing.assert_allclose(a, b, atol=1e-12, rtol=1e-9)


def test_page():
    """A figure of the page that was not measured, or memory that grows with the square of the length."""
    report = json.loads((ROOT / "docs" / "benchmarks" / "test_time_training.json").read_text())
    page = " ".join((ROOT / "docs" / "second_order.md").read_text(encoding="utf-8").split())
    for name in script.ATTENTIONS:
        sizes = [report[str(x)]["MiB"][name] for x in (1024, 4096, 16384)]
        seconds = [report[str(x)]["seconds"][name] for x in (1024, 4096)]
        cells = [*(f"{x:,}" for x in sizes), *(f"{x:.2f}" for x in seconds)]
        assert f"| {' | '.join(cells)} |" in page
        assert (sizes[2] < 4 * sizes[1]) == (name != "jax.nn")
    moved, still = (report[name][-1] for name in ("inner steps", "no inner steps"))
    assert f"has a loss of {moved:.2f} nats, and {still:.2f} if" in page
    for paper in ("energy_based_transformer/descent", "meanflow/meanflow"):
        memory = json.loads((ROOT / "papers" / f"{paper}.json").read_text())["memory"]
        assert f"| {memory['energy_attn'][-1]:.0f} | {memory['jax.nn'][-1]:,.0f} |" in page


@pytest.mark.full
@pytest.mark.parametrize("kind", ["array", "window"])
def test_outer_gradient(kind):
    """An outer gradient without the second derivatives, or with wrong ones, in any weight."""
    check(script.by_array(ea.attention) if kind == "array" else script.by_window())


@pytest.mark.full
@pytest.mark.parametrize("kind", ["array", "window"])
def test_outer_gradient_on_a_mesh(kind):
    """The same with every chunk sharded: second derivatives that a collective loses, or masks of another chunk."""
    with jax.set_mesh(make_mesh((8,), ("sequence",))):
        if kind == "array":
            check(script.by_array(ea.attention, parallel=SequenceParallel("sequence")))
        else:
            check(script.by_window(parallel=SequenceParallel("sequence", "ring")))


@pytest.mark.full
def test_script(tmp_path, capsys, user_settings, monkeypatch):
    """A script that no longer runs, or writes other than what it prints."""
    monkeypatch.setattr(script, "LENGTH", 64)
    out = tmp_path / "out.json"
    assert script.main(["--steps", "2", "--lengths", "64", "--out", str(out)]) == 0
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert set(result["64"]["MiB"]) == set(result["64"]["seconds"]) == set(script.ATTENTIONS)
    assert str(result["inner steps"]) in printed and json.dumps(result["64"]) in printed
