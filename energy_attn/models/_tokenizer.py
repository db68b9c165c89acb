"""The tokenizer of a checkpoint: text and chats to tokens, and tokens to text."""

import dataclasses
import datetime
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, final

from energy_attn.distributed.internal import files as saved_files
from energy_attn.kernels.internal import checks

from ._vocabulary import AbstractVocabulary, TextStream, Tokens, ids, special_tokens, vocabulary
from .checkpoint._config import located, read_json
from .decoder._config import check_type

_LONGEST = 2**26  # characters of a chat, more than any context
_WIDEST = 2**14  # bits of a number, about as many as Python writes in decimal


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a checkpoint by name: from its files, else from `config`, its tokenizer_config.json."""
    files = {x.stem: x for x in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (path := folder / "chat_template.jinja").exists():
        files["default"] = path
    if files:
        return {name: _text(path) for name, path in files.items()}
    if (path := folder / "chat_template.json").is_file():
        config = read_json(path, path.name)
    else:
        path = folder / "tokenizer_config.json"
    return named_templates(config.get("chat_template"), f"{path}: chat_template")


def _text(path: Path) -> str:
    try:
        saved_files.check_file(path)
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: chat_template: wanted text in UTF-8, got none: {error}"
        ) from error


def named_templates(templates: object, name: str) -> dict[str, str]:
    """Templates by name, from one or a list of named ones; a `ValueError` calls the argument `name`."""
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list) and all(isinstance(x, Mapping) for x in templates):
        entries = [(x.get("name"), x.get("template")) for x in templates]
        if all(isinstance(text, str) for entry in entries for text in entry):
            return {str(key): str(text) for key, text in entries}
    raise ValueError(
        f"{name}: wanted a template, or a list of named ones, got {checks.received(templates)}"
    )


def check_messages(name: str, messages: Any) -> list[dict[str, Any]]:
    """Messages as plain data, without keys whose value is None."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise TypeError(f"{name}: wanted a list of messages, got {checks.received(messages)}")
    if not messages:
        raise ValueError(f"{name}: wanted at least one message, got {checks.received(messages)}")
    chat = []
    for index, message in enumerate(messages):
        place = f"{name}[{index}]"
        check_type(place, message, Mapping, "a mapping with role and content")
        entries = {key: x for key, x in plain(place, message).items() if x is not None}
        if not isinstance(entries.get("role"), str):
            raise ValueError(f"{place}: wanted a role, a string, got {checks.received(message)}")
        if not isinstance(entries.get("content"), (str, list)) and "tool_calls" not in entries:
            raise ValueError(f"{place}: wanted a content, a string, got {checks.received(message)}")
        chat.append(entries)
    return chat


def plain(name: str, x: object) -> Any:
    """Returns a value as plain JSON data, so that a template gets no object with methods; raises `TypeError`."""
    if isinstance(x, Mapping):
        return {str(key): plain(f"{name}[{key!r}]", value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(f"{name}[{i}]", value) for i, value in enumerate(x)]
    if x is None or type(x) in (str, bool, int, float):
        return x
    raise TypeError(
        f"{name}: wanted strings, numbers, lists and mappings, got {checks.received(x)}"
    )


def render(template: str, source: str, messages: list[dict[str, Any]], variables: Any) -> str:
    program = _program(template, source)
    pieces, length = [], 0
    try:
        for piece in program.generate(messages=messages, **variables):
            length += len(piece)
            _check_length(length)
            pieces.append(piece)
        return "".join(pieces)
    except Exception as error:  # a template is a program, which may raise anything
        raise ValueError(
            f"messages: wanted a chat that the chat template of {source} takes, got "
            f"{checks.received(messages)}: {error}"
        ) from error


def _check_length(length: float) -> None:
    if length > _LONGEST:
        raise ValueError(f"too long a text, list or number, of more than {_LONGEST:,} characters")


def _length(operator: str, left: object, right: object) -> float:
    """The length of the text or list that an operator makes; infinity for a number of too many bits."""
    if isinstance(left, Sized) and isinstance(right, Sized):
        return len(left) + len(right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        wide = bits * right if operator == "**" else bits + right.bit_length()
        return math.inf if wide > _WIDEST else 0
    for x, times in ((left, right), (right, left)):
        if isinstance(x, Sized) and isinstance(times, int):
            return len(x) * times
    return 0


@functools.lru_cache(64)
def _program(template: str, source: str) -> Any:
    environment = _environment()
    try:
        return environment.from_string(template)
    except Exception as error:
        raise ValueError(
            f"chat_template: wanted one of jinja2, got that of {source}: {error}"
        ) from error


@functools.cache
def _environment() -> Any:
    """A sandbox in which a template can neither change its variables nor reach Python."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError(
            "jinja2 is not installed, which chat templates need; the extra `models` brings it: "
            "pip install jinja2"
        ) from error

    class Environment(ImmutableSandboxedEnvironment):
        """A sandbox whose operators raise for results that are too long."""

        intercepted_binops = frozenset(("+", "*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_length(_length(operator, left, right))
            return super().call_binop(context, operator, left, right)

    class GenerationTag(Extension):
        """The tag `{% generation %}`, which marks text of the assistant, as its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        x: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own escapes HTML
        options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators}
        return json.dumps(x, **options, sort_keys=sort_keys)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """The tokenizer of a checkpoint: encodes text and chats as tokens, and decodes tokens.

    Made by [`Tokenizer.load`][energy_attn.models.Tokenizer.load]. Tokens and the text of chats equal those of
    transformers for the same files.

    Attributes:
        special_tokens: named tokens: `bos_token`, `eos_token`, `pad_token` and others.
        chat_templates: templates by name, of which `"default"` is used.

    Examples:
        >>> from importlib import resources
        >>> from energy_attn.models import Tokenizer
        >>> folder = resources.files("energy_attn") / "cli" / "demo" / "model"
        >>> template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"
        >>> tokenizer = Tokenizer.load(folder, chat_template=template)
        >>> tokenizer.encode("né"), tokenizer.decode([110, 195, 169])
        ([110, 195, 169], 'né')
        >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
        'user: Hello\\n'
    """

    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    _vocabulary: AbstractVocabulary
    _folder: Path

    @classmethod
    def load(
        cls, directory: str | os.PathLike[str], *, chat_template: str | None = None
    ) -> "Tokenizer":
        """Reads the tokenizer of a checkpoint.

        Its files are `tokenizer.json`, which the library tokenizers reads, and, if present, `tokenizer_config.json`,
        `special_tokens_map.json`, `chat_template.jinja`, `additional_chat_templates/NAME.jinja` and
        `chat_template.json`. Without a `tokenizer.json`, a `config.json` with a vocabulary of 256 tokens means a
        token for each byte. Padding and truncation that a `tokenizer.json` asks for are switched off.

        Args:
            directory: the folder; `"demo"`: the library's own model.
            chat_template: the chat template; None: from the files.

        Raises:
            ImportError: tokenizers is not installed.
            TypeError: an argument of another type.
            ValueError: a file that is missing or cannot be read.
        """
        folder = located(directory)
        check_type("chat_template", chat_template, str | None, "None or a template")
        config = _entries(folder / "tokenizer_config.json")
        special = special_tokens(folder, config)
        if chat_template is None:
            templates = chat_templates(folder, config)
        else:
            templates = named_templates(chat_template, "chat_template")
        tokens = vocabulary(folder, special, _entries(folder / "config.json"))
        return cls(special.named, templates, tokens, folder)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text.

        Args:
            text: the text; special tokens in it become tokens.
            add_special_tokens: whether to add the special tokens that the files put around a text.

        Raises:
            TypeError: an argument of another type.
            ValueError: text that the file of the tokenizer has no tokens for.
        """
        check_type("text", text, str, "a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise ValueError(
                f"text: wanted text that UTF-8 can encode, got {checks.received(text)}"
            ) from error
        return self._vocabulary.encode(
            text, checks.check_flag("add_special_tokens", add_special_tokens)
        )

    def decode(self, tokens: Tokens, *, skip_special_tokens: bool = True) -> str:
        """The text of tokens; U+FFFD in place of bytes that are not UTF-8.

        Args:
            tokens: the tokens; numbers below 0, which `generate` returns after the end of a row, are skipped.
            skip_special_tokens: whether to leave out special tokens.

        Raises:
            TypeError: an argument of another type.
            ValueError: an array with another number of axes, or numbers past 32 bits.
        """
        skip = checks.check_flag("skip_special_tokens", skip_special_tokens)
        return self._vocabulary.decode(ids("tokens", tokens), skip)

    def token_id(self, token: str) -> int | None:
        """The number of a token; None if it is not in the vocabulary."""
        return self._vocabulary.number(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The text of a chat, by the checkpoint's template.

        The text has its special tokens in it: `encode(text, add_special_tokens=False)` gives the tokens.

        Args:
            messages: mappings with `role` and `content`, of strings, numbers, lists and mappings.
            add_generation_prompt: whether to end with the beginning of an answer.
            variables: further variables of the template, such as `tools`, which chooses the template called
                `"tool_use"` if there is one.

        Raises:
            ImportError: jinja2 is not installed.
            TypeError: an argument of another type.
            ValueError: a checkpoint without a chat template, or one that refuses the messages or writes
                more than 2²⁶ characters.
        """
        chat = check_messages("messages", messages)
        checks.check_flag("add_generation_prompt", add_generation_prompt)
        more = {name: plain(name, x) for name, x in variables.items()}
        has_tools = more.get("tools") is not None and "tool_use" in self.chat_templates
        name = "tool_use" if has_tools else "default"
        if name not in self.chat_templates:
            has = ", ".join(self.chat_templates) or "none"
            raise ValueError(
                "messages: wanted a checkpoint with a chat template called 'default', or chat_template= of "
                f"Tokenizer.load, got {self._folder}, which has {has}"
            )
        known = {
            **self.special_tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": bool(add_generation_prompt),
        }
        return render(self.chat_templates[name], str(self._folder), chat, known | more)

    def stream(self, before: Tokens = (), *, stop: str | Sequence[str] | None = None) -> TextStream:
        """Returns a stream, which turns tokens into text as they come and never cuts a character.

        Special tokens are left out.

        Args:
            before: the tokens before the text, on which it depends whether the text begins with a space.
            stop: a string that ends the text, or several.

        Returns:
            A stream with `write(tokens)`, which returns the text that the next tokens add, and `end()`, which
            returns the text that was held back: part of a character, or text that may begin a stop string. It has
            `text`, everything returned so far; `count`, the number of tokens taken; and `stopped`, whether a stop
            string was completed: it is not part of the text, and later tokens are not taken.

        Raises:
            TypeError: an argument of another type.
            ValueError: an empty stop string; tokens that `decode` refuses.

        Examples:
            >>> from energy_attn.models import Tokenizer
            >>> stream = Tokenizer.load("demo").stream(stop=["END"])
            >>> [stream.write([token]) for token in "é EnEND".encode()]
            ['', 'é', ' ', '', 'En', '', '', '']
            >>> stream.text, stream.stopped
            ('é En', True)
        """
        return TextStream(self._vocabulary, before, stop)


def special_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """The numbers of the special tokens among `texts`, which decoded text lacks."""
    numbers = (tokenizer.token_id(text) for text in texts)
    return [x for x in numbers if x is not None and not tokenizer.decode([x])]


def _entries(file: Path) -> Mapping[str, Any]:
    return read_json(file, file.name) if file.is_file() else {}
