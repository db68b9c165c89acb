"""The demo: small, in a process of its own as a user runs it; and its verdict when something is wrong."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn._demo as demo
from energy_attn import __main__ as command
from energy_attn._demo import _checks, _picture, _report, _temper, _text, _train
from energy_attn._info import CALLS, choice
from energy_attn.models import Llama

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {"context": 2 * _temper.WINDOW + 7, "tokens": 6, "seconds": 0.0, "seed": 1}


def run_module(*arguments, **environment):
    inherited = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    return subprocess.run(
        [sys.executable, "-m", "energy_attn", *arguments],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_demo(tmp_path):
    picture = tmp_path / "demo.png"
    done = run_module(
        *("demo", "--seconds", "2", "--context", "1500", "--tokens", "20", "--out", str(picture))
    )
    assert done.returncode == 0, done.stderr
    assert "8 simulated devices" in done.stdout
    assert re.search(r"bytes equal to dense decoding +20 of 20 +✓", done.stdout)
    assert re.search(r"energies, .* float64 .* nats +✓", done.stdout)
    assert re.search(r"collectives a step +8 all-reduce +✓", done.stdout)
    assert re.search(r"bytes handed to them +2,176 +✓", done.stdout)
    assert "✗" not in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    # no terminal: lines, no control characters
    assert re.search(r"^training 100%  loss", done.stderr, re.MULTILINE)
    assert "\r" not in done.stderr and "\x1b" not in done.stderr


def test_devices_that_the_user_asked_for_are_kept():
    done = run_module("demo", XLA_FLAGS="--xla_force_host_platform_device_count=3")
    assert done.returncode == 2
    assert "wanted 8 devices, real or simulated, got 3" in done.stderr


@pytest.fixture(scope="module")
def pieces():
    """All that a run of the demo computes, once."""
    model = Llama(_train.CONFIG, key=jax.random.key(0))
    text, decode, compile_step = _text.standard_library(), demo.decode, demo.compile_step
    made: dict = {"train": _train.Training(model, np.ones(3), 1.0, 1.0), "score": (2.0, 1.0)}

    def remember(name, function):
        def remembered(*args, **options):
            key = (name, *map(repr, args[1:]), *map(repr, options.values()))
            if key not in made:
                made[key] = function(*args, **options)
            return made[key]

        return remembered

    functions = {
        "train": lambda *args: made["train"],
        "score": lambda *args: made["score"],
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
    a, b = _checks.expected(_train.CONFIG)
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
    assert "no picture: matplotlib is not installed (pip install 'energy_attn[plot]')" in out


def test_training_lowers_the_loss(user_settings):
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 100, np.uint8)
    assert len(_train.train(text, 1000, 0.0, seed=0).losses) == 1
    training = _train.train(text, 1000, 4.0, seed=0)
    assert training.losses[0] > 5.0
    if len(training.losses) > 30:  # else the machine is too busy to say
        assert training.losses[-1] < 3.0


def test_training_stops_by_steps_too(monkeypatch, user_settings):
    monkeypatch.setattr(_train, "_MAX_STEPS", 2)
    text = np.arange(5000, dtype=np.uint8)
    assert len(_train.train(text, 1000, 1e6, seed=0).losses) == 2


def test_score_sees_the_same_bytes():
    """With one window of text there is nothing to be gained by seeing all of it but the first half."""
    model = Llama(_train.CONFIG, key=jax.random.key(0))
    text = np.random.default_rng(0).integers(0, 256, 2 * _temper.WINDOW).astype(np.uint8)
    near, far = _train.score(model, text)
    logits = model(jnp.asarray(text[None, :-1], jnp.int32)).logits
    wanted = -jax.nn.log_softmax(logits)[0, np.arange(len(text) - 1), text[1:]]
    np.testing.assert_allclose(far, wanted[-_temper.WINDOW :].mean(), rtol=1e-5)
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


def test_no_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="no sources of the standard library"):
        _text.standard_library(tmp_path)


class Terminal:
    """A stream that says that it is a terminal."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with _report.Progress("work") as progress:
        for i in range(11):
            progress.show(i / 10, f"step {i}")
    last = sys.stderr.text.split("\r")[-1]
    assert last == f"\x1b[Kwork │{'█' * 30}│ 100%  step 10\n"


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
    command._simulate_devices()
    assert os.environ["XLA_FLAGS"] == after
    monkeypatch.undo()
