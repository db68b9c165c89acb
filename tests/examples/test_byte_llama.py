"""The example that trains the library's model of bytes: its text, its steps and its penalties."""

import importlib
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.cli import _command
from energy_attn.models import LlamaConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "byte_llama"))

library, training = map(importlib.import_module, ("library", "training"))
Penalty, Stage = training.Penalty, training.Stage

TINY = LlamaConfig(*(256, 16, 24, 1, 2, 1), tie_word_embeddings=True, max_position_embeddings=512)
STRONG = {"none": 0.0, "z-loss": 0.1, "entropy": 1.0}  # visible after few steps
STEPS = 150
FOX = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 100, np.uint8)


@pytest.fixture(scope="module")
def trainings():
    """A training with each penalty, and the steps that it reported."""

    def run(name):
        told = []
        options = {"config": TINY, "penalty": name, "stages": (Stage(1.0, 32, 8),)}
        return training.train(
            FOX, 0, STEPS, after=lambda step, _: told.append(step), **options
        ), told

    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(training, "_LOW", 3.5)  # above what 32 keys allow
        for name, penalty in list(training.PENALTIES.items()):
            patch.setitem(training.PENALTIES, name, penalty._replace(strength=STRONG[name]))
        return {name: run(name) for name in training.PENALTIES}


@pytest.mark.full
def test_training(trainings):
    """A model that does not learn, steps that are not reported, another start from the same seed."""
    found, told = trainings["none"]
    assert told == list(range(1, STEPS + 1)) and len(found.losses) == STEPS
    assert abs(found.losses[0] - np.log(256)) < 0.2 and found.losses[-1] < 2.3
    first = [each.losses[0] for each, _ in trainings.values()]
    np.testing.assert_allclose(first, first[0], rtol=1e-6)


@pytest.mark.full
def test_training_in_stages(user_settings, monkeypatch):
    """Pieces of other sizes than those of the stages, or a stage that never comes."""
    sizes = set()

    def spy(model, tokens, positions):
        sizes.add((tokens.shape, positions.shape))
        return training._none(model, tokens, positions)

    monkeypatch.setitem(training.PENALTIES, "spy", Penalty(0.0, spy))
    stages = Stage(0.7, 32, 8), Stage(1.0, 64, 2)
    assert len(training.train(FOX, 0, 4, TINY, "spy", stages).losses) == 4
    assert sizes == {((8, 33), (8, 32)), ((2, 65), (2, 64))}


@pytest.mark.full
def test_penalties(trainings, user_settings):
    """Penalties without effect: on the size of energies, on entropies below a bound."""
    tokens = jnp.asarray(FOX[None, :257], jnp.int32)
    found = {name: training.observe(each.model, tokens) for name, (each, _) in trainings.items()}
    assert found["z-loss"].energy < 0.5 * found["none"].energy
    assert found["entropy"].entropy > found["none"].entropy + 0.2


def test_standard_library():
    text = library.standard_library()
    assert text.train.dtype == text.held_out.dtype == np.uint8
    assert len(text.train) > 2e6 and text.files > 100
    assert len(text.held_out) > 200_000
    assert library.HELD_OUT == _command.HELD_OUT
    assert text.held_out.tobytes() == _command.held_out_text().tobytes()
    assert text.held_out[:400].tobytes() not in text.train.tobytes()
    again = library.standard_library()
    assert (again.train == text.train).all() and (again.held_out == text.held_out).all()


def test_sources_are_found_in_order(tmp_path):
    for name in ("b.py", "a/z.py", "a/b/c.py", "test/no.py", "x/site-packages/no.py", "typing.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "_sysconfigdata_linux.py").write_text("no")
    (tmp_path / "c.txt").write_text("no")
    text = library.standard_library(tmp_path)
    assert text.train.tobytes() == b"# a/b/c.py\n\0# a/z.py\n\0# b.py\n"
    assert (text.held_out.tobytes(), text.files) == (b"# typing.py\n", 3)


def test_sources_that_cannot_be_read(tmp_path, monkeypatch):
    """One broken link, one file of somebody else's or one pipe that ends the training or blocks it for ever."""
    (tmp_path / "a.py").write_bytes(b"\xff\xfe no text")  # bytes are enough
    (tmp_path / "argparse.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "b.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "c.py").symlink_to(tmp_path / "c.py")
    (tmp_path / "d.py").write_text("secret")
    os.mkfifo(tmp_path / "e.py")
    (tmp_path / "typing.py").write_text("kept")
    read = Path.read_bytes

    def forbidden(path):  # root may read everything
        if path.name == "d.py":
            raise PermissionError(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    text = library.standard_library(tmp_path)
    assert text.train.tobytes() == b"\xff\xfe no text" and text.files == 1
    assert text.held_out.tobytes() == b"kept"


def test_no_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="no sources of the standard library"):
        library.standard_library(tmp_path)
