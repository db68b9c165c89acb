"""The tokenizer of a checkpoint: tokens, text and chats as transformers has them, and text as it comes."""

import json
import re
import sys

import numpy as np
import pytest

from energy_attn.models import Tokenizer
from tests.energy_attn.models.trained_tokenizers import TEXTS, byte_level, sentence_piece, write
from tests.support.complaints import refused

KINDS = {
    "byte level": byte_level,
    "BPE": lambda: sentence_piece("BPE"),
    "Unigram": lambda: sentence_piece("Unigram"),
}
# Tokens that tokenizer_config.json adds to the file, or says to be special.
ADDED = {
    "added_tokens_decoder": {
        "7": {"content": "[X]", "special": True, "normalized": False, "lstrip": True},
        "8": {"content": "[tool]", "special": False, "normalized": False},
    },
    "extra_special_tokens": ["<|im_start|>", "x"],
}
# Each the start, in its shape, of one in use.
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}
        {%- continue %}
    {%- endif %}
    {%- set ns.last = loop.index0 %}
    {%- generation %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | default('', true) + '<|im_end|>' + '\\n' }}
    {%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA = """\
{{- bos_token }}
{% if not date_string is defined %}
    {% if strftime_now is defined %}
        {% set date_string = strftime_now("%d %b %Y") %}
    {% endif %}
{% endif %}
{% if messages[0]['role'] == 'system' %}
    {% set system = messages[0]['content']|trim %}
    {% set messages = messages[1:] %}
{% else %}
    {% set system = "" %}
{% endif %}
<|start_header_id|>system<|end_header_id|>

Today: {{ date_string }}
{{ system }}<|eot_id|>
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant, got ' + message.role) }}
{% endif %}
<|start_header_id|>{{ message['role'] }}<|end_header_id|>

{{ message['content'] | trim }}{{ message.tool_calls is defined }}<|eot_id|>
{% endfor %}
{%- if add_generation_prompt %}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}
{{ tools is none }} {{ pad_token }} {{ {"ü": "<&>"} | tojson(indent=2) }}
"""
CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Grüß <b>Gott</b>"},
    {"role": "assistant", "content": "Hi", "tool_calls": None},
    {"role": "user", "content": "and?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": "<int> é"}}}]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp("tokenizer"), KINDS[request.param](), **ADDED)


def peer_of(folder):
    from transformers import PreTrainedTokenizerFast

    peer = PreTrainedTokenizerFast.from_pretrained(folder)
    # they keep the padding and the truncation of the file, which we switch off
    peer.backend_tokenizer.no_padding()
    peer.backend_tokenizer.no_truncation()
    return peer


@pytest.mark.full
def test_tokens_and_text_are_those_of_transformers(folder):
    """Prompts padded or cut by the file, special tokens twice, missing or read as text, bytes that are lost."""
    ours, peer = Tokenizer.load(folder), peer_of(folder)
    for text in TEXTS:
        for special in (True, False):
            tokens = ours.encode(text, add_special_tokens=special)
            assert tokens == peer(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                got = ours.decode(tokens, skip_special_tokens=skip)
                assert got == peer.decode(tokens, skip_special_tokens=skip)
        if not {*"[<x"} & {*text}:  # no special token
            assert ours.decode(tokens).lstrip(" ") == text.lstrip(" ")
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens = rng.integers(0, 300, 9)
        assert ours.decode(tokens) == peer.decode(tokens.tolist(), skip_special_tokens=True)
    assert ours.token_id("<pad>") == peer.pad_token_id and ours.token_id("no such") is None
    assert ours.decode(np.array([*tokens, -1, -1])) == ours.decode(tokens)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@pytest.mark.full
def test_the_file_says_what_is_put_around_a_text(tmp_path):
    """Flags of tokenizer_config.json that are obeyed, or taken for names of tokens."""
    folder = write(tmp_path, byte_level(), add_bos_token=False, add_eos_token=True)
    tokens = Tokenizer.load(folder).encode("né")
    assert tokens == peer_of(folder)("né")["input_ids"] and tokens[0] == 0


@pytest.mark.full
@pytest.mark.parametrize("place", ["config", "list", "jinja", "json", "saved"])
def test_chats_are_those_of_transformers(place, tmp_path):
    """White space around blocks, HTML that is escaped, a message with None, tools, dates, and where templates are."""
    folder = write(tmp_path, byte_level())
    for template in CHATML, LLAMA:
        other = [
            {"name": "tool_use", "template": CHATML},
            {"name": "default", "template": template},
        ]
        given = {"config": template, "list": other}
        write(tmp_path, byte_level(), chat_template=given.get(place, "not this one"))
        if place == "jinja":
            (folder / "chat_template.jinja").write_text(template, "utf-8")
        if place == "json":
            (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
        if place == "saved":  # as files of their own, in folders
            peer = peer_of(folder)
            peer.chat_template = {x["name"]: x["template"] for x in other}
            peer.save_pretrained(folder)
        ours, peer = Tokenizer.load(folder), peer_of(folder)
        if place == "json":  # which transformers reads for processors alone
            peer.chat_template = template
        for options in (
            {},
            {"add_generation_prompt": False},
            {"tools": TOOLS},
            {"tools": []},
            {"enable_thinking": False, "date_string": "1 Jan 2030"},
        ):
            options = {"add_generation_prompt": True, **options}
            got = ours.apply_chat_template(CHAT, **options)
            assert got == peer.apply_chat_template(CHAT, tokenize=False, **options)
            tokens = peer.apply_chat_template(CHAT, return_dict=False, **options)
            assert ours.encode(got, add_special_tokens=False) == tokens
    again = ours.apply_chat_template(CHAT, add_generation_prompt=True)
    assert ours.apply_chat_template(CHAT) == again


def test_templates_in_files_of_their_own(tmp_path):
    """A template for tools that is not read, or one of the configuration beside those of files."""
    folder = write(tmp_path, byte_level(), chat_template="the configuration's")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with {{ tools[0] }}")
    (folder / "additional_chat_templates" / "notes.txt").write_bytes(b"\xff")
    with pytest.raises(
        ValueError, match="wanted a .*chat template called 'default', .* has tool_use"
    ):
        Tokenizer.load(folder).apply_chat_template(CHAT)
    (folder / "chat_template.jinja").write_text("without")
    tokenizer = Tokenizer.load(folder)
    assert dict(tokenizer.chat_templates) == {
        "default": "without",
        "tool_use": "with {{ tools[0] }}",
    }
    assert tokenizer.apply_chat_template(CHAT) == "without"
    assert tokenizer.apply_chat_template(CHAT, tools=["f"]) == "with f"


def naive(pieces, stops):
    """The text before the first stop string that is complete, and the number of pieces up to it."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        text += piece
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            return text[: min(places)], count
    return text, len(pieces)


def test_stop_strings(folder):
    """One that begins inside of another, or takes several tokens; text that is shown and then taken back."""
    tokenizer, rng = Tokenizer.load(folder), np.random.default_rng(0)
    first = tokenizer.encode("\n", add_special_tokens=False)

    def spelled(x):  # behind another character, as some tokenizers begin a text with a space
        return tokenizer.encode("\n" + x, add_special_tokens=False)[len(first) :]

    for _ in range(40):
        drawn = ["aé€y"[x] for x in rng.integers(0, 4, 12)]
        stops = ["".join("aé€y"[x] for x in rng.integers(0, 4, rng.integers(1, 5))) for _ in "ab"]
        stops.append(stops[0][-2:])  # which one token completes with the first
        stream = tokenizer.stream(first, stop=stops)
        shown = ["".join(stream.write([x]) for x in spelled(c)) for c in drawn]
        want, count = naive(drawn, stops)
        assert "".join(shown) + stream.end() == stream.text == want
        assert stream.count == sum(len(spelled(c)) for c in drawn[:count])
        # nothing is held that can neither become a stop string nor lose its text
        for index in range(1, count):
            held = "".join(drawn[:index])[len("".join(shown[:index])) :]
            if tokenizer.token_id("<0xE2>") is not None:  # a byte behind it may take its text
                held = held.rstrip("€")
            assert not held or any(stop.startswith(held) for stop in stops)


# Llamas and Tibetan are bytes to a tokenizer with byte fallback, letters and Han to none.
SCRIPTS = (
    *("hi there", "🦙🦙", "é€", "東京 天気", "བོད་ཡིག", "👩‍👩‍👧 "),
    *("نص", "▁ \n\t", "\ufffd", " END"),
)


@pytest.fixture(scope="module", params=[*KINDS, "bytes"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        (folder / "config.json").write_text('{"vocab_size": 256}')
    else:
        write(folder, KINDS[request.param]())
    return Tokenizer.load(folder)


def added(tokenizer, before, tokens):
    """The text of all tokens, without what it has in common with the prompt's."""
    prompt, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    unlike = (n for n, (x, y) in enumerate(zip(prompt, whole, strict=False)) if x != y)
    return whole[next(unlike, min(len(prompt), len(whole))) :]


def drawn_tokens(tokenizer, rng, is_text):
    """Text with special tokens in it, or any tokens: bytes that are no text, behind those that are."""
    special = [x for x in map(tokenizer.token_id, ("<s>", "<|im_start|>")) if x is not None]
    if not is_text:
        names = [f"<0x{byte:02X}>" for byte in "🦙é\x7f".encode()]
        often = [x for x in map(tokenizer.token_id, names) if x is not None]
        drawn = rng.choice([*often, *special, *rng.integers(0, 256, 8)], 24)
        return drawn.tolist()
    tokens = []
    for _ in range(5):
        tokens += tokenizer.encode(SCRIPTS[rng.integers(len(SCRIPTS))], add_special_tokens=False)
        if special and rng.random() < 0.3:
            tokens += rng.choice(special, 7).tolist()
    return tokens


@pytest.mark.parametrize("is_text", [True, False], ids=["text", "any tokens"])
def test_streamed_text_is_what_the_whole_adds(is_text, tokenizer):
    """A prompt that ends inside a character or in special tokens, text that later tokens change, a lost stop."""
    rng = np.random.default_rng(is_text)
    for _ in range(60):
        tokens = drawn_tokens(tokenizer, rng, is_text)
        cut, *splits = np.sort(rng.integers(0, len(tokens), 6)).tolist()
        before, after = tokens[:cut], tokens[cut:]
        want = added(tokenizer, before, after)
        stream = tokenizer.stream(before)
        ends = [*splits, len(tokens)]
        shown = [stream.write(tokens[x:y]) for x, y in zip([cut, *ends], ends, strict=False)]
        assert want.startswith("".join(shown)), (before, after)
        assert "".join(shown) + stream.end() == stream.text == want, (before, after)
        begin = rng.integers(0, len(want) + 1)
        stop = want[begin : begin + rng.integers(1, 4)]
        if not stop or "\ufffd" in stop:
            continue
        stream = tokenizer.stream(before, stop=[stop])
        shown = [stream.write([x]) for x in after]
        texts = [added(tokenizer, before, after[: n + 1]) for n in range(len(after))]
        count = next(n for n, text in enumerate(texts) if stop in text)
        assert (stream.stopped, stream.count) == (True, count + 1), (before, after, stop)
        assert "".join(shown) + stream.end() == texts[count].partition(stop)[0] == stream.text


def test_bytes(tmp_path):
    """A byte model's tokens; a character in pieces, and bytes that are no text, which nothing follows."""
    (tmp_path / "config.json").write_text('{"vocab_size": 256}')
    tokenizer = Tokenizer.load(tmp_path, chat_template="{{ messages[0].content }}")
    assert tokenizer.encode("é<s>") == [195, 169, *b"<s>"]
    assert tokenizer.decode([195, 169, 255, -1]) == "é\ufffd"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "x"
    assert tokenizer.token_id("a") == 97 and tokenizer.token_id("é") is None
    stream = tokenizer.stream()
    assert [stream.write([x]) for x in (195, 169, 195)] == ["", "é", ""]
    assert stream.end() == "\ufffd"


def test_one_stop_string(tokenizer):
    """A string that is taken for a stop string of each letter."""
    tokens = tokenizer.encode("So END that", add_special_tokens=False)
    found = tokenizer.stream(stop="END")
    assert found.write(tokens) + found.end() == found.text == "So " and found.stopped
    found = tokenizer.stream(stop=None)
    assert found.write(tokens) + found.end() == "So END that"


LONG = {
    "a product": "{{ 'x' * 10**10 }}",
    "a list": "{{ 10**10 * [0] }}",
    "a number": "{{ 10**(10**10) }}",
    "products of numbers": "{% set n = namespace(x=9) %}{% for _ in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "sums": "{% set n = namespace(x='x') %}{% for _ in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "loops": "{% for _ in range(9**5) %}{{ 'x' * 10**5 }}{% endfor %}",
}


@pytest.mark.parametrize("template", LONG.values(), ids=LONG)
def test_a_template_that_does_not_end(template):
    """Memory that a template fills."""
    tokenizer = Tokenizer.load("demo", chat_template=template)
    with pytest.raises(ValueError, match="^messages: wanted a chat .* takes, .*: too long"):
        tokenizer.apply_chat_template(CHAT)


def test_products_in_templates():
    """Products and sums that are not long, and are refused."""
    template = "{{ '-' * 9 }} {{ 3 * [1] + [2] }} {{ 2 ** 62 * 2.5 }} {{ -3 * 4 - 2 ** -1 }} {{ 'a' + 'b' }}"
    tokenizer = Tokenizer.load("demo", chat_template=template)
    want = f"{'-' * 9} {3 * [1] + [2]} {2**62 * 2.5} {-3 * 4 - 2**-1} ab"
    assert tokenizer.apply_chat_template(CHAT) == want


@pytest.mark.parametrize("name", ["tokenizers", "jinja2"])
def test_a_library_that_is_missing(name, tmp_path, monkeypatch):
    """An ImportError that does not say what to install."""
    write(tmp_path, byte_level())
    tokenizer = Tokenizer.load(tmp_path, chat_template="a") if name == "jinja2" else None
    from energy_attn.models import _tokenizer

    _tokenizer._environment.cache_clear()
    _tokenizer._program.cache_clear()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"{name} is not installed.* extra `models` brings it"):
        Tokenizer.load(tmp_path) if tokenizer is None else tokenizer.apply_chat_template(CHAT)


def chat(*messages, template=LLAMA, **options):
    def apply(folder):
        return Tokenizer.load(folder, chat_template=template).apply_chat_template(
            list(messages), **options
        )

    return apply


def of(method, *given, **options):
    """A call of a tokenizer's method."""
    return lambda folder: getattr(Tokenizer.load(folder), method)(*given, **options)


USER = {"role": "user", "content": "a"}
BAD = {
    "TypeError directory: wanted the path": lambda f: Tokenizer.load(7),
    "ValueError tokenizer: wanted .*/no/tokenizer.json, got no such file": lambda f: Tokenizer.load(
        f / "no"
    ),
    "TypeError chat_template: wanted None or a template": chat(template=3),
    "ValueError chat_template: wanted one of jinja2, .*endfor": chat(USER, template="{% endfor %}"),
    "ValueError messages: wanted a checkpoint with a chat template": of(
        "apply_chat_template", [USER]
    ),
    "ValueError messages: wanted at least one": chat(),
    r"TypeError messages\[1\]: wanted a mapping with role and content, got str": chat(
        USER, "hello"
    ),
    r"ValueError messages\[0\]: wanted a role": chat({"content": "a"}),
    r"ValueError messages\[0\]: wanted a content": chat({"role": "user", "content": None}),
    r"TypeError messages\[0\]\['content'\]\[0\]: wanted strings": chat(USER | {"content": [print]}),
    "TypeError tools: wanted strings, numbers": chat(USER, tools=print),
    "TypeError add_generation_prompt: wanted True": chat(USER, add_generation_prompt="yes"),
    "ValueError messages: wanted a chat that .* takes, .*: Roles must alternate": chat(USER, USER),
    "ValueError messages: wanted a chat .*unsafe": chat(
        USER, template="{{ messages.__class__.__mro__ }}"
    ),
    "ValueError tokens: wanted numbers of 32 bits, got 5 to 1099511627776": of(
        "decode", [5, 2**40]
    ),
    r"ValueError tokens: wanted numbers of 32 bits, got list \[1180591": of("decode", [2**70]),
    "TypeError tokens: wanted an integer array": of("decode", [0.5]),
    "ValueError tokens: wanted shape": of("decode", np.ones((1, 2), int)),
    "ValueError before: wanted numbers of 32 bits, got 1099511627776 to": of("stream", [2**40]),
    "TypeError before: wanted an integer array": of("stream", ["a"]),
    "ValueError tokens: wanted numbers of 32 bits, got 1099511627776 to": lambda f: (
        Tokenizer.load(f).stream().write([2**40])
    ),
    "TypeError stop: wanted a string or a sequence of strings": of("stream", stop=[3]),
    "ValueError stop: wanted strings that are not empty": of("stream", stop=""),
    "ValueError text: wanted text that UTF-8 can encode": of("encode", "a\ud800"),
    "TypeError text: wanted a string, got int 3": of("encode", 3),
}
# The file, its text, and the error.
BAD_FILES = r"""
tokenizer_config.json {"chat_template": 3} | ValueError .*: chat_template: wanted a template
tokenizer_config.json {"pad_token": []} | ValueError .*: pad_token: wanted a token, got list
tokenizer_config.json {"added_tokens_decoder": [1]} | ValueError .*: added_tokens_decoder: wanted objects
tokenizer_config.json {"added_tokens_decoder": {"a": {"content": "x"}}} |
    ValueError .*: added_tokens_decoder: wanted a token's number, got 'a'
tokenizer_config.json {"added_tokens_decoder": {"7": {"content": "x", "lstrip": 3}}} |
    TypeError .*: added_tokens_decoder\['7'\].lstrip: wanted True or
tokenizer_config.json {"additional_special_tokens": 3} |
    ValueError .*: additional_special_tokens: wanted .*, got int 3
tokenizer_config.json {"extra_special_tokens": "ab"} | ValueError .*: extra_special_tokens: wanted .*, got str 'ab'
tokenizer_config.json {"bos_token": "\ud800"} | ValueError .*: bos_token: wanted a token, got str
special_tokens_map.json {"pad_token": 3} | ValueError .*: pad_token: wanted a token, got int 3
special_tokens_map.json { | ValueError wanted a special_tokens_map.json, got .*Expecting
chat_template.jinja \xff | ValueError .*: chat_template: wanted text in UTF-8, got
additional_chat_templates/rag.jinja \xff | ValueError .*: chat_template: wanted text in UTF-8, got
chat_template.jinja/x \xff | ValueError .*: .*wanted a file, got a folder
"""
ROWS = re.sub(r"\n {4}", " ", BAD_FILES).strip().splitlines()


@pytest.fixture(scope="module")
def plain_files(tmp_path_factory):
    write(made := tmp_path_factory.mktemp("plain"), byte_level())
    return {path.name: path.read_bytes() for path in made.iterdir()}


@pytest.mark.parametrize(("wanted", "call"), BAD.items(), ids=BAD)
def test_bad_input(wanted, call, plain_files, tmp_path, unchecked):
    """A mistake that no error names."""
    for name, data in plain_files.items():
        (tmp_path / name).write_bytes(data)
    with refused(wanted):
        call(tmp_path)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.replace("/", " "))
def test_bad_files(row, plain_files, tmp_path, unchecked):
    """A file that is read as another one, or an error that names neither the file nor the entry."""
    file, wanted = row.split(" | ")
    name, _, text = file.partition(" ")
    for other, data in plain_files.items():
        (tmp_path / other).write_bytes(data)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"a\xff" if text == r"\xff" else text.encode())
    path = name.removesuffix("/x").rpartition("/")[2]
    with refused(wanted.replace(" .*:", f" .*{path}.*:", 1)):
        Tokenizer.load(tmp_path)
