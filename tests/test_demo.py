"""The demo: small, in a process of its own as a user runs it; and its verdict when something is wrong."""

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn.cli.demo as demo
from energy_attn import __main__ as command
from energy_attn.cli import _devices
from energy_attn.cli.demo import _checks, _model, _picture, _report, _text, _train
from energy_attn.cli.info import CALLS, choice
from energy_attn.models import Llama, LlamaConfig

from .flags import environment

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "context": 2 * _train.WINDOW + 7,
    "tokens": 6,
    "train": False,
    "seconds": 0.0,
    "seed": 1,
}
TINY = LlamaConfig(
    *(256, 16, 24, 1, 2, 1),
    tie_word_embeddings=True,
    max_position_embeddings=512,
)
BOUND = 1.0  # nats a byte of text that was held out
STRONG = {"none": 0.0, "z-loss": 0.1, "entropy": 1.0}  # to be seen after few steps
STEPS = 150


def run_module(*arguments, **variables):
    inherited = {name: x for name, x in environment().items() if name != "JAX_ENABLE_X64"}
    return subprocess.run(
        [sys.executable, "-m", "energy_attn", *arguments],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_demo(tmp_path):
    """The command as a user runs it: what it says, and what must hold."""
    picture = tmp_path / "demo.png"
    done = run_module("demo", "--context", "1200", "--tokens", "20", "--out", str(picture))
    assert done.returncode == 0, done.stderr
    assert "918,656 weights" in done.stdout and "8 simulated devices" in done.stdout
    assert re.search(r"bytes equal to dense decoding +20 of 20 +✓", done.stdout)
    assert re.search(r"energies, .* float64 .* nats +✓", done.stdout)
    assert re.search(r"collectives a step +8 all-reduce +✓", done.stdout)
    assert re.search(r"bytes handed to them +2,176 +✓", done.stdout)
    assert "✗" not in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    # no terminal: no control characters
    assert "\r" not in done.stderr and "\x1b" not in done.stderr


def test_devices_that_the_user_asked_for_are_kept():
    done = run_module("demo", XLA_FLAGS="--xla_force_host_platform_device_count=3")
    assert done.returncode == 2
    assert "wanted 8 devices, real or simulated, got 3" in done.stderr


@pytest.fixture(scope="module")
def pieces():
    """All that a run of the demo computes, once."""
    with jax.enable_x64(False):
        model = Llama(TINY, key=jax.random.key(0))
    text, decode, compile_step = _text.standard_library(), demo.decode, demo.compile_step
    made: dict = {}

    def remember(name, function):
        def remembered(*args, **options):
            key = (name, *map(repr, args[1:]), *map(repr, options.values()))
            if key not in made:
                made[key] = function(*args, **options)
            return made[key]

        return remembered

    functions = {
        "byte_llama": lambda: model,
        "score": lambda *args: (2.0, 1.0),
        "decode": remember("decode", decode),
        "compile_step": remember("step", compile_step),
        "standard_library": lambda: text,
    }
    return functions


@pytest.fixture
def run(pieces, monkeypatch, tmp_path, capsys):
    for name, function in pieces.items():
        monkeypatch.setattr(demo, name, function)

    def run(**changes):
        args = argparse.Namespace(**{**SETTINGS, "out": tmp_path / "a.png", **changes})
        status = demo.run(args)
        return status, *capsys.readouterr()

    return run


def test_all_holds(run):
    status, out, err = run()
    assert (status, err) == (0, "")
    assert out.count("✓") == 7


def wrong_tokens(monkeypatch, which):
    decode = demo.decode

    def wrong(model, prompt, count, parallel=None, **options):
        right = decode(model, prompt, count, parallel, **options)
        if bool(options) != (which == "dense") or parallel is not None:
            return right
        tokens = right.tokens.copy()
        tokens[-1] ^= 1
        return right._replace(tokens=tokens)

    monkeypatch.setattr(demo, "decode", wrong)


def wrong_float64(monkeypatch, energy=0.0, out=0.0):
    right = _checks.float64_attention

    def wrong(*args):
        outs, energies, scores = right(*args)
        outs[-1, 0, 0] += out
        energies[-1, -1] += energy
        return outs, energies, scores

    monkeypatch.setattr(_checks, "float64_attention", wrong)


def wrong_cost(monkeypatch, operations=0, size=0):
    a, b = _checks.expected(TINY)
    monkeypatch.setattr(demo, "expected", lambda config: (a + operations, b + size))


def longer_sends_more(monkeypatch):
    compile_step = demo.compile_step

    def wrong(model, slots, parallel, attend):
        longer = slots > SETTINGS["context"] * 1.5
        return compile_step(model, slots, parallel, demo.gathered if longer else attend)

    monkeypatch.setattr(demo, "compile_step", wrong)


BREAKS = {
    "bytes equal to dense decoding": lambda m: wrong_tokens(m, "dense"),
    "bytes equal to one device's": lambda m: wrong_tokens(m, "alone"),
    "energies, largest error against float64": lambda m: wrong_float64(m, energy=1e-3),
    "outputs, largest error against float64": lambda m: wrong_float64(m, out=1e-3),
    "collectives a step": lambda m: wrong_cost(m, operations=1),
    "bytes handed to them": lambda m: wrong_cost(m, size=4),
    "both for a cache of": longer_sends_more,
}


@pytest.mark.parametrize(("what", "break_it"), BREAKS.items(), ids=BREAKS)
def test_what_does_not_hold_is_named(run, monkeypatch, what, break_it):
    break_it(monkeypatch)
    status, out, err = run()
    assert status == 1
    assert out.count("✗") == 1
    (line,) = err.splitlines()
    assert line.startswith(f"energy_attn demo: does not hold: {what}")


def test_nan_does_not_hold(run, monkeypatch):
    wrong_float64(monkeypatch, energy=np.nan)
    assert run()[0] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 10}, "--context: wanted from"),
        ({"context": 10**9}, "--context: wanted from"),
        ({"tokens": 0}, "--tokens: wanted at least 1"),
        ({"seconds": float("nan")}, "--seconds: wanted at least 0"),
        ({"out": Path("/nowhere/at/all.png")}, "--out: wanted a path in a folder that exists"),
    ],
    ids=str,
)
def test_bad_options(run, changes, message):
    status, out, err = run(**changes)
    assert status == 2 and out == "" and message in err


def test_without_matplotlib(run, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, _ = run()
    assert status == 0
    assert "no picture: matplotlib is not installed (pip install matplotlib)" in out


FOX = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 100, np.uint8)


@pytest.fixture(scope="module")
def trainings():
    """A training with each penalty, and the steps that it told of."""

    def run(name):
        told = []
        options = {"config": TINY, "penalty": name, "stages": (_train.Stage(1.0, 32, 8),)}
        return _train.train(FOX, 0, STEPS, after=lambda step, _: told.append(step), **options), told

    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(_train, "_LOW", 3.5)  # above what 32 keys allow
        for name, penalty in list(_train.PENALTIES.items()):
            patch.setitem(_train.PENALTIES, name, penalty._replace(strength=STRONG[name]))
        return {name: run(name) for name in _train.PENALTIES}


def test_training(trainings):
    """A model that does not learn, steps that are not told of, another start after the same seed."""
    training, told = trainings["none"]
    assert told == list(range(1, STEPS + 1)) and len(training.losses) == STEPS
    assert abs(training.losses[0] - np.log(256)) < 0.2 and training.losses[-1] < 2.3
    first = [each.losses[0] for each, _ in trainings.values()]
    np.testing.assert_allclose(first, first[0], rtol=1e-6)


def test_training_in_stages(user_settings, monkeypatch):
    """Pieces other than the stages say, a stage that never comes, or no end when the time is over."""
    sizes = set()

    def spy(model, tokens, positions):
        sizes.add((tokens.shape, positions.shape))
        return _train._none(model, tokens, positions)

    monkeypatch.setitem(_train.PENALTIES, "spy", _train.Penalty(0.0, spy))
    clock = types.SimpleNamespace(perf_counter=itertools.count().__next__)  # a second a step
    monkeypatch.setattr(_train, "time", clock)
    stages = _train.Stage(0.7, 32, 8), _train.Stage(1.0, 64, 2)
    training = _train.train(FOX, 0, 10**6, 4.0, TINY, "spy", stages)
    assert (len(training.losses), training.seconds) == (4, 4)
    assert sizes == {((8, 32), (8, 32)), ((2, 64), (2, 64))}


def test_penalties(trainings, user_settings):
    """Penalties that do not hold what they are to hold: energies near 0, entropies above a bound."""
    tokens = jnp.asarray(FOX[None, :257], jnp.int32)
    found = {name: _train.observe(each.model, tokens) for name, (each, _) in trainings.items()}
    assert found["z-loss"].energy < 0.5 * found["none"].energy
    assert found["entropy"].entropy > found["none"].entropy + 0.2


def test_demo_trains(run, trainings, monkeypatch):
    """`--train` that uses the weights that are there, or that ends otherwise than with them."""
    calls = []

    def train(text, seed, steps, seconds):
        calls.append((seed, seconds))
        return trainings["none"][0]

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "byte_llama", None)
    status, out, _ = run(train=True)
    assert status == 0 and calls == [(1, 0.0)]
    assert re.search(r"trained on \d+ files .* 150 steps in \d+ s, loss [12]\.\d+ nats a byte", out)


def test_broken_weights(run, monkeypatch, tmp_path):
    """A trace instead of the file's name."""
    monkeypatch.setattr(_model, "FOLDER", tmp_path)
    monkeypatch.setattr(demo, "byte_llama", _model.byte_llama)
    status, out, err = run()
    assert status == 2 and out == "" and "config.json" in err


@pytest.fixture(scope="module")
def peer():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM.from_pretrained(_model.FOLDER)


def test_weights(peer, user_settings):
    """Committed weights that are not those that were trained, or that this library reads otherwise."""
    torch = pytest.importorskip("torch")
    held = _text.standard_library().held_out
    starts = np.linspace(0, len(held) - 513, 16).astype(int)
    pieces = held[starts[:, None] + np.arange(513)].astype(np.int64)
    with torch.inference_mode():
        wanted = peer(torch.from_numpy(pieces[:, :-1])).logits.numpy().astype(np.float64)
    scores = wanted - np.log(np.exp(wanted).sum(-1, keepdims=True))
    loss = -np.take_along_axis(scores, pieces[:, 1:, None], 2).mean()
    assert loss < BOUND
    model = _model.byte_llama()
    tokens = jnp.asarray(pieces, jnp.int32)
    np.testing.assert_allclose(jax.jit(_train.surprise)(model, tokens).mean(), loss, atol=1e-5)
    ours = jax.jit(lambda model, x: model(x).logits)(model, tokens[:2, :-1])
    np.testing.assert_allclose(ours, wanted[:2], atol=2e-6 * np.abs(wanted).max())
    assert _train.parameters(model) == 918_656
    files = {path.name: path.stat().st_size for path in _model.FOLDER.iterdir()}
    assert set(files) == {"config.json", "model.safetensors"} and sum(files.values()) <= 4e6


def test_score_sees_the_same_bytes():
    """With one window of text there is nothing to be gained by seeing all of it but the first half."""
    model = Llama(TINY, key=jax.random.key(0))
    text = np.random.default_rng(0).integers(0, 256, 2 * _train.WINDOW).astype(np.uint8)
    near, far = _train.score(model, text)
    read = jax.jit(lambda model, tokens: model(tokens).logits)
    logits = read(model, jnp.asarray(text[None, :-1], jnp.int32))
    wanted = -jax.nn.log_softmax(logits)[0, np.arange(len(text) - 1), text[1:]]
    np.testing.assert_allclose(far, wanted[-_train.WINDOW :].mean(), rtol=1e-5)
    assert near != far and abs(near - far) < 0.1


def test_float64_attention():
    """The judge, judged: one query, two keys, by hand; and keys that are not seen."""
    query = np.array([[[1.0, 0.0], [0.0, 2.0]]])
    key = np.array([[[1.0, 1.0]], [[3.0, 0.0]], [[9.0, 9.0]]])
    value = np.array([[[1.0, 0.0]], [[0.0, 1.0]], [[5.0, 5.0]]])
    out, energy, _ = _checks.float64_attention(query, key, value, np.array([[True, True, False]]))
    for head, scores in enumerate([(1.0, 3.0), (2.0, 0.0)]):
        weights = np.exp(np.array(scores) / np.sqrt(2))
        np.testing.assert_allclose(energy[0, head], np.log(weights.sum()), rtol=1e-15)
        np.testing.assert_allclose(out[0, head], weights / weights.sum(), rtol=1e-15)


def test_standard_library():
    text = _text.standard_library()
    assert text.train.dtype == text.held_out.dtype == np.uint8
    assert len(text.train) > 2e6 and text.files > 100
    assert len(text.held_out) > 200_000
    assert text.held_out[:400].tobytes() not in text.train.tobytes()
    again = _text.standard_library()
    assert (again.train == text.train).all() and (again.held_out == text.held_out).all()


def test_sources_are_found_in_order(tmp_path):
    for name in ("b.py", "a/z.py", "a/b/c.py", "test/no.py", "x/site-packages/no.py", "typing.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "_sysconfigdata_linux.py").write_text("no")
    (tmp_path / "c.txt").write_text("no")
    text = _text.standard_library(tmp_path)
    assert text.train.tobytes() == b"# a/b/c.py\n\0# a/z.py\n\0# b.py\n"
    assert (text.held_out.tobytes(), text.files) == (b"# typing.py\n", 3)


def test_sources_that_cannot_be_read(tmp_path, monkeypatch):
    """One broken link, one file of somebody else's or one pipe that ends the demo or holds it up for ever."""
    (tmp_path / "a.py").write_bytes(b"\xff\xfe no text")  # bytes are enough
    (tmp_path / "argparse.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "b.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "c.py").symlink_to(tmp_path / "c.py")
    (tmp_path / "d.py").write_text("secret")
    os.mkfifo(tmp_path / "e.py")
    (tmp_path / "typing.py").write_text("kept")
    read = Path.read_bytes

    def forbidden(path):  # whoever tests as root may read everything
        if path.name == "d.py":
            raise PermissionError(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    text = _text.standard_library(tmp_path)
    assert text.train.tobytes() == b"\xff\xfe no text" and text.files == 1
    assert text.held_out.tobytes() == b"kept"


def test_no_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="no sources of the standard library"):
        _text.standard_library(tmp_path)


def test_table():
    lines = [_report.Line("one", "1", "of 1", True), _report.Line("a longer one", "22", "x", False)]
    assert _report.table(lines).splitlines()[2:] == [
        "one                  1  ✓  of 1",
        "a longer one        22  ✗  x",
    ]


def test_unreadable_bytes_are_shown():
    assert _report.readable(np.array([65, 255, 10], np.uint8)) == "A\\xff\n"
    assert [_picture.character(byte) for byte in b"a \n\x00\xff"] == ["a", "·", "↵", "�", "�"]


def test_info():
    done = run_module("info")
    assert done.returncode == 0, done.stderr
    assert "1 × cpu" in done.stdout and "decode, blockwise, reference" in done.stdout
    assert done.stdout.count("declines") >= 1


def test_reader_that_goes():
    """`info | head`, and an encoding that lacks letters: a traceback at the end."""
    command = [sys.executable, "-m", "energy_attn", "info"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "ascii"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as info:
        info.stdout.close()
        assert info.stderr.read() == ""
    assert info.returncode == 128 + signal.SIGPIPE
    assert "1 \\xd7 cpu" in run_module("info", PYTHONIOENCODING="ascii").stdout


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.what)
def test_info_says_what_would_be_used(call):
    chosen, *reasons = choice(call, "cpu")
    assert chosen == ("decode" if call.query[1] == 1 else "blockwise")
    assert reasons
    for platform, few, many in (("cuda", "pallas_gpu", "cudnn"), ("tpu", "pallas_tpu", "splash")):
        chosen, *_ = choice(call, platform)
        if call.dtype == "float64":
            wanted = {"blockwise"}
        else:
            wanted = {few} if call.query[1] < 64 or call.dtype == "float32" else {few, many}
        assert chosen in wanted


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--tokens", "x"]], ids=str)
def test_bad_commands(arguments, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m energy_attn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "--xla_force_host_platform_device_count=8"),
        ("--a=1", "--a=1 --xla_force_host_platform_device_count=8"),
        ("--xla_force_host_platform_device_count=2", "--xla_force_host_platform_device_count=2"),
    ],
)
def test_flags(before, after, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if before:
        monkeypatch.setenv("XLA_FLAGS", before)
    _devices.simulate_devices()
    assert os.environ["XLA_FLAGS"] == after
    monkeypatch.undo()
