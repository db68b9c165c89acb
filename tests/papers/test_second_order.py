"""Models whose training differentiates a derivative of attention: the scripts, and the figures that are committed."""

import functools
import importlib.util
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea

FOLDER = Path(__file__).resolve().parents[2] / "papers"
SCRIPTS = {"meanflow": "meanflow/meanflow.py", "descent": "energy_based_transformer/descent.py"}


def script(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / SCRIPTS[name])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def committed(name):
    return json.loads((FOLDER / SCRIPTS[name]).with_suffix(".json").read_text())


def gradient(name, implementation):
    """The gradient of a batch's loss in all weights, in float64."""
    module, key = script(name), jax.random.key(3)
    attend = functools.partial(ea.attention, implementation=implementation)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        of = module.EXPERIMENT
        given = of.model(attend, key), of.data(key, 2, 5), key
    arrays, rest = eqx.partition(given, eqx.is_inexact_array)
    # away from the start, where the output and modulation of every layer are zero
    arrays = jax.tree.map(lambda x: x.astype(jnp.float64) + 0.05, arrays)

    @jax.jit
    def run(arrays):
        return eqx.filter_grad(lambda x: of.loss(*eqx.combine(x, rest))[0])(arrays)

    # the scripts rely on NumPy's promotion
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return run(arrays)


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
def test_gradients(name):
    """A gradient through a derivative of our attention that is not that of the matrix of weights."""
    found, wanted = (jax.tree.leaves(gradient(name, x)) for x in (None, "reference"))
    assert max(np.abs(x).max() for x in wanted) > 1e-3
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_committed(name):
    """Figures that contradict the page: another training than with jax.nn, or memory that is not linear."""
    result = committed(name)
    assert result["largest_difference"]["10"] < 1e-5
    assert result["points"] == [256, 512, 1024, 2048, 4096]
    ours, theirs = (np.asarray(result["memory"][x]) for x in ("energy_attn", "jax.nn"))
    assert (
        ours[-1] < 2.5 * ours[-2] and theirs[-1] > 3.5 * theirs[-2] and 20 * ours[-1] < theirs[-1]
    )


def test_meanflow():
    """Clouds that are as far from circles as the noise that they are made of."""
    spread = committed("meanflow")["roundness"]
    assert spread["made"] < 0.5 * spread["noise"]


def test_energy_based_transformer():
    """A descent that does not descend, or ends no nearer to the curve than its mean."""
    result = committed("descent")
    assert (
        result["falls"] > 0.95 and result["hidden"]["error"] < 0.25 * result["hidden"]["variance"]
    )


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name, tmp_path, capsys, user_settings):
    """A script that no longer runs, or writes other than what it prints."""
    module = script(name)
    small = ("--steps", "12", "--compared", "10", "--points", "256")
    assert module.run(module.EXPERIMENT, ["--out", str(tmp_path), *small]) == 0
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert f"{result['memory']['energy_attn'][0]:.1f} MiB" in capsys.readouterr().out
    picture = tmp_path / f"{name}.svg"
    assert not picture.exists() or "</svg>" in picture.read_text()
