"""The capacity of a modern Hopfield network: the script, its theory, and the committed figures."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "papers" / "hopfield"
spec = importlib.util.spec_from_file_location("capacity", FOLDER / "capacity.py")
capacity = importlib.util.module_from_spec(spec)
spec.loader.exec_module(capacity)


@pytest.fixture(scope="module")
def committed():
    return json.loads((FOLDER / "capacity.json").read_text())


def grid(result, name):
    return np.asarray(result[name])


def test_theorem_3():
    """Constants other than those that the paper prints for its two examples."""
    assert abs(capacity.growth(1.0, 9.0, 20, 0.001) - 3.1546) < 1e-4
    assert abs(capacity.growth(1.0, 1.0, 75, 0.001) - 1.3718) < 1e-4


def test_capacity(committed):
    """Figures that contradict the page: where memories are told apart, and that their number grows exponentially."""
    betas, sizes = committed["betas"], np.asarray(committed["memories"])
    assert (betas[0], betas[-1], sizes[-1]) == (0.25, 4.0, 2**14)
    kept = {}
    for beta, held, errors in zip(
        betas, committed["mean_field"], grid(committed, "error"), strict=True
    ):
        kept[beta] = sizes[errors < 0.5].max()
        if held is not None:
            assert (errors[sizes <= held / 4] < 0.15).all(), beta
            assert (errors[sizes >= held * 2] > 0.9).all(), beta
        if beta >= 1.4:
            assert (errors <= 0.05).all(), beta
    # twice the β, and the number is not twice but dozens of times as large
    assert kept[0.5] == 64 and kept[1.0] == 2048
    assert grid(committed, "at_rest").mean() > 0.99


def test_what_is_proved_holds(committed):
    """A condition for being stored that holds where memories are lost."""
    proved = grid(committed, "separated") == 1
    assert proved.sum() > 20
    assert (grid(committed, "error")[proved] < 0.02).all()
    assert (grid(committed, "retrieved")[proved] == 1).all()


def settled(beta, width, count):
    """The length of the fixed point of a memory, in mean field, by iteration."""
    random = np.random.default_rng(0).standard_normal((100_000, width))
    cosines = random[:, 0] / np.linalg.norm(random, axis=1)
    r = 1.0
    for _ in range(2000):
        scores = np.exp(beta * width * r * cosines)
        mean, lean = scores.mean(), (scores * cosines).mean() / scores.mean()
        own = np.exp(beta * width * r)
        weight = own / (own + (count - 1) * mean)
        r, before = weight + (1 - weight) * lean, r
        if abs(r - before) < 1e-6:
            break
    return r


def test_mean_field():
    """A number at which nothing happens: just below, the memory holds the point; just above, nothing does."""
    held = capacity.mean_field(0.6, 12)
    assert 50 < held < 200
    assert settled(0.6, 12, 0.9 * held) > 0.7 and settled(0.6, 12, 1.1 * held) < 0.2
    assert capacity.mean_field(4.0, 16) is None


@pytest.mark.full
def test_script(tmp_path, capsys, user_settings):
    """A script that no longer runs, or writes other than what it prints."""
    sizes = ("--memories", "4", "40", "--betas", "0.25", "2", "--width", "16", "--probes", "9")
    assert capacity.run(["--out", str(tmp_path), *sizes]) == 0
    result = json.loads((tmp_path / "capacity.json").read_text())
    (hot, cold), text = result["error"], capsys.readouterr().out
    assert hot[1] > 0.9 and max(cold) < 0.02
    assert f"{hot[1]:.2f}" in text and "mean f." in text
    picture = tmp_path / "capacity.svg"
    assert not picture.exists() or "</svg>" in picture.read_text()
