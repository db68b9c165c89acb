"""`python -m energy_attn generate`: text in, text out, the same as by `generate`."""

import io
import json
import re
import shlex
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from energy_attn.__main__ import main
from energy_attn.cli._command import byte_llama
from energy_attn.models import Llama, LlamaConfig, Tokenizer, generate, load
from tests.support.complaints import complaint
from tests.support.flags import environment
from tests.support.selection import few

PROMPT = "ab" * 9 + "é"
CONFIG = LlamaConfig(256, 16, 24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint for bytes; its weights are large, so that no two tokens are nearly as likely."""
    made = tmp_path_factory.mktemp("bytes")
    draw = jax.jit(lambda: jax.tree.map(lambda x: 20 * x, Llama(CONFIG, key=jax.random.key(0))))
    draw().save(made)
    (made / "prompt.txt").write_text(PROMPT, "utf-8")
    return made


@pytest.fixture(scope="module")
def written(folder):
    """What the model writes."""
    found = generate(Llama.load(folder), [list(PROMPT.encode())], 12)
    return np.asarray(found.tokens[0])


def arguments(folder, *more, prompt=True):
    given = ["--prompt-file", str(folder / "prompt.txt")] if prompt else []
    return ["generate", "--model", str(folder), *given, "--max-new-tokens", "12", *more]


def command(folder, *more, prompt=True):
    return main(arguments(folder, *more, prompt=prompt))


@pytest.fixture
def interruptible():
    """Children that Ctrl-C reaches, also where a shell runs the tests in the background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("moment", few(["importing", "compiling", "writing"], "importing"))
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt(moment):
    """A traceback, or a crash of XLA, in place of one line and the status of a program that Ctrl-C ends."""
    logs = {"importing": ["-X", "importtime"]}.get(moment, [])
    given = ["--model", "demo", "--prompt", "import ", "--max-new-tokens", "4000", "--top-k", "5"]
    with subprocess.Popen(
        [sys.executable, *logs, "-m", "energy_attn", "generate", *given],
        env=environment() | {"JAX_LOG_COMPILES": str(int(moment == "compiling"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        if moment == "writing":
            assert process.stdout.read(1)
        else:
            word = {"importing": "jax._src.core", "compiling": "Compiling jit(run)"}[moment]
            assert any(word in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read().splitlines()
    assert said[-1] == "energy_attn: interrupted" and process.returncode == 130
    if moment == "writing":
        warning = "top_k: wanted a temperature above 0 beside it, got 0; nothing is drawn"
        assert said[:-1] == [f"energy_attn: {warning}"]


def test_the_example_says_something(capsys):
    """An example in the help to which the model answers with spaces."""
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    example = capsys.readouterr().out.partition("example:\n")[2]
    assert main(shlex.split(example)[3:]) == 0
    assert capsys.readouterr().out == "'__main__'\n"


def test_the_model_that_comes_with_the_library(capsys):
    """A name that is taken for a folder."""
    prompt = "class Node:\n    def __init__(self, "
    given = ["--prompt", prompt, "--dtype", "float32", "--max-new-tokens", "8"]
    assert main(["generate", "--model", "demo", *given]) == 0
    found = generate(byte_llama(), [list(prompt.encode())], 8).tokens[0]
    assert capsys.readouterr().out == bytes(found.tolist()).decode() + "\n"
    assert load("demo").config == byte_llama().config
    assert Tokenizer.load("demo").encode("a") == [97]


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    few([[], ["--mesh", "2x2", "--tensor", "2", "--chunk-size", "8", "--speculative"]], []),
    ids=["alone", "mesh"],
)
def test_writes_what_the_model_writes(more, folder, written, capsys):
    """The text of the model, invalid UTF-8 included; mesh, split weights and drafts change nothing."""
    assert command(folder, *more) == 0
    said = capsys.readouterr()
    assert said.out == bytes(written.tolist()).decode("utf-8", "replace") + "\n"
    assert re.search(r"^20 tokens read and the first written in [\d.]+ s", said.err, re.M)
    assert ("of the drafted tokens accepted" in said.err) == ("--speculative" in more)


@pytest.mark.full
def test_ends_where_the_checkpoint_says(folder, written, tmp_path, capsys):
    """generation_config.json overrides config.json, in the command and in `generate`; options override both."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = int(written[3])
    said = tmp_path / "generation_config.json"
    said.write_text(json.dumps({"eos_token_id": [300, first]}))
    assert command(tmp_path) == 0
    end = written.tolist().index(first) + 1
    want = bytes(written[:end].tolist()).decode("utf-8", "replace")
    assert capsys.readouterr().out == want + "\n"
    # the function stops there too, unless it is told otherwise
    model = Llama.load(tmp_path)
    found = [generate(model, [list(PROMPT.encode())], 12, **x) for x in ({}, {"eos_token_id": ()})]
    assert found[0].lengths.tolist() == [end] and found[1].tokens[0].tolist() == written.tolist()
    assert command(tmp_path, "--eos", "300,301") == 0
    assert capsys.readouterr().out == bytes(written.tolist()).decode("utf-8", "replace") + "\n"
    model.save(tmp_path / "again")
    assert Llama.load(tmp_path / "again").config.eos_token_id == (300, first)
    for text in "[2]", '{"eos_token_id": "</s>"}', "{":
        said.write_text(text)
        with pytest.raises((TypeError, ValueError), match="generation_config.json"):
            Llama.load(tmp_path)


@pytest.mark.full
def test_tokens_of_a_tokenizer(tmp_path, capsys):
    """Text of tokens depends on their neighbours, and a character may take several of them."""
    # every byte is a token, in the order of the library's alphabet for bytes: é takes two
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model = jax.tree.map(lambda x: 20 * x, Llama(CONFIG, key=jax.random.key(1)))
    model.save(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = tokenizer.encode(PROMPT).ids
    assert len(tokens) == len(PROMPT.encode())
    assert main(["generate", "--model", str(tmp_path), "--prompt", PROMPT]) == 0
    found = generate(model, [tokens], 128).tokens[0].tolist()
    said = capsys.readouterr().out.removesuffix("\n")
    # part of a character at the end is not written
    assert tokenizer.decode(found).startswith(said) and len(said) >= 100


MESH, EOS = "wanted 8 or 2x4, or other sizes, got ", "by number, 2 or 2,7, "
TEMPERATURE = "temperature: wanted 0, for the likeliest token, or a number above"
BAD = {
    "--speculative --draft-model x": "--speculative: wanted it or --draft-model",
    "--system s": "--system: wanted --chat beside it",
    "--chat": "wanted a checkpoint with a chat template",
    "--min-p 2": "min_p: wanted a number above 0 and at most 1",
    "--tensor 0": "--tensor: wanted at least 1, got 0",
    "--mesh 3x5": "wanted 15 devices, real or simulated, got 8",
    "--max-new-tokens 0": "max_new_tokens: wanted at least 1, got 0",
    "--max-new-tokens 2147483647": "max_new_tokens: wanted",
    "--dtype int8": "dtype: wanted",
    "--mesh 1000000000": "--mesh: wanted 1000000000 devices, real or simulated, got 8",
    "--tensor 1000000000": "--tensor: wanted 1000000000 devices",
    "--temperature -1": TEMPERATURE,
    "--temperature nan": TEMPERATURE,
    "--eos -1": "--eos: wanted tokens of at least 0, got -1",
    # what argparse refuses
    **{f"--mesh {x}": f"{MESH}'{x.strip('_')}'" for x in ("2y4", "0x4", "_")},
    **{f"--eos {x}": f"{EOS}got {x!r}" for x in ("foo", "2,", "2;7")},
    "--method star": "invalid choice: 'star'",
    "--eos 1099511627776": f"{EOS}from -2147483647 to 2147483647, got",
    f"--seed {2**70}": "an integer, from -2147483647 to 2147483647, got '1180591",
    f"--max-new-tokens {'9' * 5000}": "wanted an integer",
    f"--mesh {'9' * 30}": "wanted 8 or 2x4",
}


@pytest.mark.parametrize(("more", "message"), BAD.items(), ids=lambda text: text[:40])
def test_bad_options(more, message, folder, capsys):
    """A traceback, or an option that is taken for another."""
    given = [x.strip("_") for x in more.split()]
    said = complaint(arguments(folder, *given), capsys)
    assert message in said
    if said.startswith("usage"):
        assert given[0] in said and len(said.splitlines()) == 2


def test_missing_files_are_named(folder, tmp_path, capsys):
    def said(model, *prompt):
        return complaint(["generate", "--model", model, *(prompt or ("--prompt", "a"))], capsys)

    for name in (str(tmp_path / "none"), "organisation/model"):
        wanted = f"wanted a folder on this machine, got {name}; download the checkpoint first"
        assert wanted in said(name)
    for path, reason in ((tmp_path / "no", "No such file"), (tmp_path, "Is a directory")):
        wanted = f"--prompt-file: wanted a file of text, got {path}: {reason}"
        assert wanted in said(folder, "--prompt-file", path)
    odd = LlamaConfig(300, 16, 24, num_hidden_layers=1, num_attention_heads=4)
    Llama(odd, key=jax.random.key(0)).save(tmp_path)
    assert "tokenizer.json, for a vocabulary of 300 tokens" in said(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "wanted a file of the library tokenizers" in said(tmp_path)


def test_a_tokenizer_that_panics(tmp_path):
    """A panic in Rust, for a file or a text, which is no Exception and would end the caller; and a pointer."""
    path = tmp_path / "tokenizer.json"
    said = json.loads(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps(said | {"normalizer": broken}))
    with pytest.raises(ValueError, match=f"tokenizer: wanted a file .* got {path}: Precompiled"):
        Tokenizer.load(tmp_path)
    special = [{"SpecialToken": {"id": "X", "type_id": 0}}]
    broken = {"type": "TemplateProcessing", "single": special, "pair": [], "special_tokens": {}}
    path.write_text(json.dumps(said | {"post_processor": broken}))
    with pytest.raises(ValueError, match=f"tokenizer: wanted a file .* got {path}: no entry"):
        Tokenizer.load(tmp_path).encode("a")
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="Git LFS pointer: git lfs pull"):
        Tokenizer.load(tmp_path)


@pytest.mark.full
def test_several_prompts_chats_and_json(folder, written, tmp_path, capsys):
    """A prompt with the text of another, a system message that is lost, a stop string that is written, or a reason."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    model = Llama.load(folder)

    def run(*more):
        given = ["generate", "--model", str(tmp_path), "--max-new-tokens", "12", *more]
        assert main(given) == 0
        return capsys.readouterr().out

    texts = {x: alone(model, list(x.encode())) for x in ("abab", "é", "[system] s\n[user] é\n")}
    shown = run("--prompt", "abab", "--prompt", "é")
    assert shown == f"abab{texts['abab']}\n---\né{texts['é']}\n"
    said = run("--prompt", "é", "--chat", "--system", "s")
    assert said == texts["[system] s\n[user] é\n"] + "\n"
    # ends with the fifth character of the first text, which the second may not have
    stop = texts["abab"][4]
    said = run(*"--json --prompt abab --prompt é --stop".split(), stop)
    lines = [json.loads(x) for x in said.splitlines()]
    for line, prompt in zip(lines, ("abab", "é"), strict=True):
        text = texts[prompt]
        assert line["prompt"] == prompt and line["text"] == text.partition(stop)[0]
        assert line["finish_reason"] == ("stop" if stop in text else "length")
        assert len(line["logprobs"]) == len(line["tokens"]) and sum(line["logprobs"]) < 0
    assert lines[0]["finish_reason"] == "stop" and len(lines[0]["tokens"]) < 12
    given = "--prompt-file", str(folder / "prompt.txt"), "--eos", str(written[3])
    ended = json.loads(run("--json", *given))
    assert ended["finish_reason"] == "stop" and ended["tokens"][-1] == written[3]


def alone(model, prompt):
    return bytes(generate(model, [prompt], 12).tokens[0].tolist()).decode("utf-8", "replace")


def test_prompts(folder, tmp_path, monkeypatch, capsys):
    """Standard input that is taken for a file, text in another encoding of a file that is not named, and no text."""
    seen = []

    def stopped(model, tokens, *_, **__):
        seen.append(tokens)
        raise ZeroDivisionError

    monkeypatch.setattr("energy_attn.cli.generate.generate", stopped)

    def run(*given, stdin=b""):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), "ascii"))
        return command(folder, *given, prompt=False)

    for given in ("--prompt-file", "-"), ("--prompt", "-"), ("--prompt", "-", "--prompt", "a"):
        with pytest.raises(ZeroDivisionError):
            run(*given, stdin="é\r\n-".encode())
    assert seen == [[list("é\n-".encode())]] * 2 + [[list("é\n-".encode()), list(b"a")]]
    latin = tmp_path / "latin.txt"
    latin.write_bytes("é".encode("latin-1"))
    for path, stdin, name in ((latin, b"", str(latin)), ("-", b"\xe9", "standard input")):
        assert run("--prompt-file", str(path), stdin=stdin) == 2
        assert f"--prompt-file: wanted text in UTF-8, got {name}: " in capsys.readouterr().err
    assert run("--prompt", "") == run("--prompt-file", "-") == 2
    said = capsys.readouterr().err.splitlines()
    wanted = "wanted text, as this tokenizer begins one with no token, got ''"
    assert said == [f"energy_attn generate: --prompt{x}: {wanted}" for x in ("", "-file")]


@pytest.mark.full
def test_a_text_that_begins_with_a_token(tmp_path, capsys):
    """No prompt, where the tokenizer puts a token before every text: what the model says after that one."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<s>": 7}, unk_token="a"))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $0", special_tokens=[("<s>", 7)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = Llama(CONFIG, key=jax.random.key(1))
    model.save(tmp_path)
    given = "--model", str(tmp_path), "--prompt", "", "--max-new-tokens", "2"
    assert main(["generate", *given]) == 0
    assert "1 tokens read" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error(folder, monkeypatch):
    """What `| head` leaves, which the module ends quietly on, as an error of the command."""

    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr("energy_attn.cli.generate._run", closed)
    with pytest.raises(BrokenPipeError):
        command(folder)


@pytest.mark.full
def test_a_reader_that_leaves(folder):
    """`| head -c 1` in earnest: no message, and the status of a program that the closed pipe ends."""
    given = ["--model", folder, "--prompt", PROMPT, "--max-new-tokens", "300"]
    with subprocess.Popen(
        [sys.executable, "-m", "energy_attn", "generate", *given],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE
