"""Chat templates: messages to the text that a model was trained on, by jinja2, as transformers renders them."""

import datetime
import functools
import json
import math
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from energy_attn.distributed.internal import check_file
from energy_attn.kernels.internal import received

from ..checkpoint._config import read_json

_LONGEST = 2**26  # characters of a chat: more is no text for a model
_WIDEST = 2**14  # bits of a number: Python writes no wider one


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a checkpoint by name, its files before `config`, its tokenizer_config.json."""
    files = {x.stem: x for x in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (path := folder / "chat_template.jinja").exists():
        files["default"] = path
    if files:
        return {name: _text(path) for name, path in files.items()}
    if (path := folder / "chat_template.json").is_file():
        found = read_json(path, path.name).get("chat_template")
        return named_templates(found, f"{path}: chat_template")
    path = folder / "tokenizer_config.json"
    return named_templates(config.get("chat_template"), f"{path}: chat_template")


def _text(path: Path) -> str:
    try:
        check_file(path)
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: chat_template: wanted text in UTF-8, got none: {error}"
        ) from error


def named_templates(given: object, name: str) -> dict[str, str]:
    """Templates by name, from one or a list of named ones; a `ValueError` calls the argument `name`."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list) and all(isinstance(x, Mapping) for x in given):
        entries = [(x.get("name"), x.get("template")) for x in given]
        if all(isinstance(text, str) for entry in entries for text in entry):
            return {str(key): str(text) for key, text in entries}
    raise ValueError(f"{name}: wanted a template, or a list of named ones, got {received(given)}")


def check_messages(name: str, messages: object) -> list[dict[str, Any]]:
    """Messages as plain data, without keys whose value is None."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise TypeError(f"{name}: wanted a list of messages, got {received(messages)}")
    if not messages:
        raise ValueError(f"{name}: wanted at least one message, got {received(messages)}")
    chat = []
    for index, message in enumerate(messages):
        place = f"{name}[{index}]"
        if not isinstance(message, Mapping):
            raise TypeError(
                f"{place}: wanted a mapping with role and content, got {received(message)}"
            )
        found = {key: x for key, x in plain(place, message).items() if x is not None}
        if not isinstance(found.get("role"), str):
            raise ValueError(f"{place}: wanted a role, a string, got {received(message)}")
        if not isinstance(found.get("content"), (str, list)) and "tool_calls" not in found:
            raise ValueError(f"{place}: wanted a content, a string, got {received(message)}")
        chat.append(found)
    return chat


def plain(name: str, x: Any) -> Any:
    """The value as JSON has it: a template gets no object with methods; raises `TypeError`."""
    if isinstance(x, Mapping):
        return {str(key): plain(f"{name}[{key!r}]", value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(f"{name}[{i}]", value) for i, value in enumerate(x)]
    if x is None or type(x) in (str, bool, int, float):
        return x
    raise TypeError(f"{name}: wanted strings, numbers, lists and mappings, got {received(x)}")


def render(template: str, source: str, messages: list[dict[str, Any]], variables: Any) -> str:
    """The text of messages."""
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
            f"{received(messages)}: {error}"
        ) from error


def _check_length(length: float) -> None:
    if length > _LONGEST:
        raise ValueError(f"too long a text, list or number, of more than {_LONGEST:,} characters")


def _length(operator: str, left: object, right: object) -> float:
    """The length of the text or list that an operator makes; infinity for a number that is too wide."""
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
    """An environment in which a template can neither change what it is given nor reach Python."""
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
        """A sandbox whose operators make nothing that is too long."""

        intercepted_binops = frozenset(("+", "*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_length(_length(operator, left, right))
            return super().call_binop(context, operator, left, right)

    class GenerationTag(Extension):
        """`{% generation %}`, which marks what an assistant wrote: its body, unchanged."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        x: Any,
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
