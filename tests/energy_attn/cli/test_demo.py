"""The demo: small, in a process of its own, as users run it; and its verdict on wrong results."""

import argparse
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
import energy_attn.cli.demo as demo
from energy_attn.cli import _command
from energy_attn.cli.demo import _decode
from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.models import Llama, LlamaConfig
from tests.support.flags import run_module

SETTINGS = {"context": 2 * _decode.WINDOW + 7, "tokens": 6, "parts": False}
TINY = LlamaConfig(*(256, 16, 24, 1, 2, 1), tie_word_embeddings=True, max_position_embeddings=512)
BOUND = 1.0  # nats per held-out byte


@pytest.mark.full
def test_demo(tmp_path):
    """The command as users run it: its output, and its checks."""
    picture = tmp_path / "demo.png"
    done = run_module("demo", "--context", "1200", "--tokens", "20", "--out", str(picture))
    assert done.returncode == 0, done.stderr
    assert "918,656 weights" in done.stdout and "8 simulated devices" in done.stdout
    assert re.search(r"loss on the prompt's end +\S+ nats +blockwise ", done.stdout)
    assert re.search(r"bytes equal to dense decoding +20 of 20 +✓  decode(_cpu)? ", done.stdout)
    assert re.search(
        r"time a byte.* ms +decode(_cpu)? .* on one device \(decode(_cpu)?\)", done.stdout
    )
    assert re.search(r"time for the prompt.* s +blockwise .* device \(blockwise\)", done.stdout)
    assert re.search(r"energies, .* float64 .* nats +✓", done.stdout)
    assert re.search(r"collectives a step +4 all-gather +✓", done.stdout)
    assert re.search(r"bytes handed to them +2,112 +✓", done.stdout)
    assert "✗" not in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    # no terminal: no control characters
    assert "\r" not in done.stderr and "\x1b" not in done.stderr


@pytest.fixture(scope="module")
def pieces():
    """The computations of a run of the demo, made once."""
    with jax.enable_x64(False):
        model = jax.jit(lambda key: Llama(TINY, key=key))(jax.random.key(0))
    text, decode, compile_loop = _command.held_out_text(), demo.decode, demo.compile_loop
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
        "score": lambda *args: _decode.Score(2.0, 1.0, "blockwise"),
        "decode": remember("decode", decode),
        "compile_loop": remember("loop", compile_loop),
        "held_out_text": lambda: text,
    }
    return functions


@pytest.fixture
def run(pieces, monkeypatch, tmp_path, capsys):
    for name, function in pieces.items():
        monkeypatch.setattr(demo, name, function)
    monkeypatch.setattr(_decode, "_ROUNDS", 1)

    def run(**changes):
        args = argparse.Namespace(**{**SETTINGS, "out": tmp_path / "a.png", **changes})
        status = demo.run(args)
        return status, *capsys.readouterr()

    return run


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
    right = _decode.float64_attention

    def wrong(*args):
        outs, energies, scores = right(*args)
        outs[-1, 0, 0] += out
        energies[-1, -1] += energy
        return outs, energies, scores

    monkeypatch.setattr(_decode, "float64_attention", wrong)


def wrong_cost(monkeypatch, operations=0, size=0):
    a, b = _decode.expected(TINY)
    monkeypatch.setattr(demo, "expected", lambda config: (a + operations, b + size))


def longer_sends_more(monkeypatch):
    compile_loop = demo.compile_loop

    def wrong(model, slots, count, parallel, attend):
        longer = slots > SETTINGS["context"] * 1.5
        return compile_loop(model, slots, count, parallel, demo.gathered if longer else attend)

    monkeypatch.setattr(demo, "compile_loop", wrong)


ENERGIES = "energies, largest error against float64"
BREAKS = [
    ("bytes equal to dense decoding", lambda m: wrong_tokens(m, "dense")),
    ("bytes equal to one device's", lambda m: wrong_tokens(m, "alone")),
    (ENERGIES, lambda m: wrong_float64(m, energy=1e-3)),
    (ENERGIES, lambda m: wrong_float64(m, energy=np.nan)),
    ("outputs, largest error against float64", lambda m: wrong_float64(m, out=1e-3)),
    ("collectives a step", lambda m: wrong_cost(m, operations=1)),
    ("bytes handed to them", lambda m: wrong_cost(m, size=4)),
    ("both for a cache of", longer_sends_more),
]


@pytest.mark.full
@pytest.mark.parametrize(("what", "break_it"), BREAKS)
def test_what_does_not_hold_is_named(run, monkeypatch, what, break_it):
    break_it(monkeypatch)
    status, out, err = run()
    assert status == 1
    assert out.count("✗") == 1
    (line,) = err.splitlines()
    assert line.startswith(f"energy_attn demo: does not hold: {what}")


@pytest.mark.full
def test_parts(run, monkeypatch):
    """Parts that do not sum up to the difference, and a step without merges that sends something."""
    seconds, sent = {}, {}

    def medians(runs):
        seconds.update((name, 2.0**-i) for i, name in enumerate(runs))
        sent.update(
            (name, demo.sent(run.loop, 6 // run.calls).operations) for name, run in runs.items()
        )
        return seconds

    monkeypatch.setattr(_decode, "medians", medians)
    found, made = [], demo.parts
    monkeypatch.setattr(demo, "parts", lambda *args: found.append(made(*args)) or found[0])
    assert run(parts=True)[0] == 0
    total = found[0].merging + found[0].attending + found[0].repeating
    assert total == seconds["tree"] - seconds["alone"]
    assert found[0].calling == seconds["calls"] - seconds["tree"]
    one = TINY.num_hidden_layers
    assert sent == {
        **{"tree": one, "calls": one, "unmerged": 0, "bare": 0},
        **{name: 0 for name in ("alone", "bare alone", "calls alone")},
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 10}, "--context: wanted from"),
        ({"context": 10**9}, "--context: wanted from"),
        ({"tokens": 0}, "--tokens: wanted from 1 to"),
        ({"tokens": 2**31 - 1}, "--tokens: wanted from 1 to"),
        ({"out": Path("/nowhere/at/all.png")}, "--out: wanted a path in a folder that exists"),
    ],
    ids=str,
)
def test_bad_options(run, changes, message):
    status, out, err = run(**changes)
    assert status == 2 and out == "" and message in err


def test_without_matplotlib(run, monkeypatch):
    """A run without a picture. One decoding stands for all: that they are equal is `test_demo`."""
    decode, made = demo.decode, []

    def once(*args, **options):
        made.extend([] if made else [decode(*args)])
        return made[0]

    monkeypatch.setattr(demo, "decode", once)
    monkeypatch.setattr(demo, "compile_loop", lambda *args: made[0].loop)
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run()
    assert (status, err) == (0, "")
    assert out.count("✓") == 7
    assert "no picture: matplotlib is not installed (pip install matplotlib)" in out


def test_broken_weights(run, monkeypatch, tmp_path):
    """A traceback instead of the name of the file."""
    monkeypatch.setattr(_command, "MODEL", tmp_path)
    monkeypatch.setattr(demo, "byte_llama", _command.byte_llama)
    status, out, err = run()
    assert (
        status == 2 and out == "" and f"model.safetensors.index.json in it, got {tmp_path}" in err
    )


@pytest.fixture(scope="module")
def peer():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM.from_pretrained(_command.MODEL, dtype="float32")


@pytest.mark.full
def test_weights(peer, user_settings):
    """Committed weights other than the trained ones, or weights that this library reads wrongly."""
    torch = pytest.importorskip("torch")
    held = _command.held_out_text()
    starts = np.linspace(0, len(held) - 513, 16).astype(int)
    pieces = held[starts[:, None] + np.arange(513)].astype(np.int64)
    with torch.inference_mode():
        wanted = peer(torch.from_numpy(pieces[:, :-1])).logits.numpy().astype(np.float64)
    scores = wanted - np.log(np.exp(wanted).sum(-1, keepdims=True))
    loss = -np.take_along_axis(scores, pieces[:, 1:, None], 2).mean()
    assert loss < BOUND
    model = _command.byte_llama()
    tokens = jnp.asarray(pieces, jnp.int32)
    np.testing.assert_allclose(jax.jit(_decode.surprise)(model, tokens).mean(), loss, atol=1e-5)
    ours = jax.jit(lambda model, x: model(x).logits)(model, tokens[:2, :-1])
    np.testing.assert_allclose(ours, wanted[:2], atol=2e-6 * np.abs(wanted).max())
    assert _decode.parameters(model) == 918_656
    files = {path.name: path.stat().st_size for path in _command.MODEL.iterdir()}
    assert set(files) == {"config.json", "model.safetensors"} and sum(files.values()) <= 2e6


@pytest.mark.full
def test_score_sees_the_same_bytes():
    """With one window of text, the whole context is no better than all but its first half."""
    model = Llama(TINY, key=jax.random.key(0))
    text = np.random.default_rng(0).integers(0, 256, 2 * _decode.WINDOW).astype(np.uint8)
    near, far, kernels = _decode.score(model, text)
    read = jax.jit(lambda model, tokens: model(tokens).logits)
    logits = read(model, jnp.asarray(text[None, :-1], jnp.int32))
    wanted = -jax.nn.log_softmax(logits)[0, np.arange(len(text) - 1), text[1:]]
    np.testing.assert_allclose(far, wanted[-_decode.WINDOW :].mean(), rtol=1e-5)
    assert near != far and abs(near - far) < 0.1
    assert kernels == "blockwise"


def test_float64_attention():
    """The check itself: one query and two keys by hand, and a masked key."""
    query = np.array([[[1.0, 0.0], [0.0, 2.0]]])
    key = np.array([[[1.0, 1.0]], [[3.0, 0.0]], [[9.0, 9.0]]])
    value = np.array([[[1.0, 0.0]], [[0.0, 1.0]], [[5.0, 5.0]]])
    out, energy, _ = _decode.float64_attention(query, key, value, np.array([[True, True, False]]))
    for head, scores in enumerate([(1.0, 3.0), (2.0, 0.0)]):
        weights = np.exp(np.array(scores) / np.sqrt(2))
        np.testing.assert_allclose(energy[0, head], np.log(weights.sum()), rtol=1e-15)
        np.testing.assert_allclose(out[0, head], weights / weights.sum(), rtol=1e-15)


def test_held_out_text(tmp_path, monkeypatch):
    """A broken link, somebody else's file or a pipe that ends the demo, or blocks it for ever."""
    (tmp_path / "argparse.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "dataclasses.py").write_text("secret")
    os.mkfifo(tmp_path / "tarfile.py")
    (tmp_path / "typing.py").write_text("kept")
    read = Path.read_bytes

    def forbidden(path):  # root may read everything
        if path.name == "dataclasses.py":
            raise PermissionError(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    assert _command.held_out_text(tmp_path).tobytes() == b"kept"
    (tmp_path / "typing.py").unlink()
    with pytest.raises(FileNotFoundError, match="no sources of the standard library"):
        _command.held_out_text(tmp_path)


def test_table():
    lines = [
        demo.TableRow("one", "1", "of 1", True, "blockwise"),
        demo.TableRow("a longer one", "22", "x", False),
    ]
    assert demo.table(lines).splitlines()[2:] == [
        "one                  1  ✓  blockwise  of 1",
        "a longer one        22  ✗             x",
    ]


def test_kernels():
    """A kernel that is tried before the one that runs, or one in a loop, a `shard_map` or another program unseen."""

    def step(query, _):
        return ea.attention(query, query, query, is_causal=True), None

    def many(query):
        return jax.lax.scan(step, query, None, length=2)[0]

    def few(query):
        return jax.jit(ea.attention)(query[:, -1:], query, query)

    mesh = make_mesh((1, 2), devices=jax.devices()[:2])
    query = jax.ShapeDtypeStruct((1, 256, 2, 8), jnp.float32)

    def over_mesh(query):
        over = SequenceParallel(method="tree")
        return ea.attention(query[:, -1:], query, query, parallel=over)

    def traced(function):
        return _decode.kernels(jax.jit(function).trace(query))

    assert (traced(few), traced(many)) == ("decode_cpu", "blockwise")
    assert (
        traced(lambda query: (many(query), few(query), few(many(query)))) == "blockwise, decode_cpu"
    )
    assert traced(lambda query: jax.nn.dot_product_attention(query, query, query)) == ""
    with jax.set_mesh(mesh):
        assert traced(over_mesh) == "decode_cpu"


def test_unreadable_bytes_are_shown():
    assert demo.readable(np.array([65, 255, 10], np.uint8)) == "A\\xff\n"
    assert [demo._character(byte) for byte in b"a \n\x00\xff"] == ["a", "·", "↵", "�", "�"]
