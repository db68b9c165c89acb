"""The special tokens of a checkpoint: what tokenizer_config.json and special_tokens_map.json say."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from energy_attn.kernels.internal import check_flag, received

from ..checkpoint._config import naming, read_json

# Flags, for transformers where there is no tokenizer.json, which says itself what is put around a text.
_FLAGS_OF_NAMES = "add_bos_token", "add_eos_token"
# Of an entry of `added_tokens_decoder`: what the library tokenizers takes.
_FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special"
_LISTS = "additional_special_tokens", "extra_special_tokens"


class Special(NamedTuple):
    """Special tokens.

    Attributes:
        named: by name, `bos_token`, `eos_token`, `pad_token` and others.
        contents: all of them, those without a name too.
        added: tokens that the vocabulary may lack, special or not, with their flags.
    """

    named: Mapping[str, str]
    contents: tuple[str, ...]
    added: tuple[Mapping[str, Any], ...]


def special_tokens(folder: Path, config: Mapping[str, Any]) -> Special:
    """The special tokens that the files of a folder name; `config` is its tokenizer_config.json.

    The map is read where the configuration lists no tokens, as by transformers. Raises `ValueError`.
    """
    files = {folder / "tokenizer_config.json": config}
    file = folder / "special_tokens_map.json"
    if file.is_file() and "added_tokens_decoder" not in config:
        files[file] = read_json(file, file.name)
    named: dict[str, str | None] = {}
    lists: dict[str, list[str]] = {}
    for file, entries in files.items():
        with naming(file):
            named |= {
                name: None if token is None else _content(name, token)
                for name, token in entries.items()
                if name.endswith("_token") and name not in _FLAGS_OF_NAMES
            }
            lists |= {x: _listed(x, entries[x] or ()) for x in _LISTS if x in entries}
    with naming(folder / "tokenizer_config.json"):
        added = _added(config.get("added_tokens_decoder") or {})
    present = {name: token for name, token in named.items() if token is not None}
    contents = dict.fromkeys((*present.values(), *(x for tokens in lists.values() for x in tokens)))
    return Special(present, tuple(contents), added)


def _listed(name: str, tokens: object) -> list[str]:
    """The texts of a list of tokens, or of an object whose values they are."""
    if not isinstance(tokens, (list, tuple, Mapping)):
        raise ValueError(f"{name}: wanted a list of tokens, got {received(tokens)}")
    values = tokens.values() if isinstance(tokens, Mapping) else tokens
    return [_content(name, x) for x in values]


def _added(tokens: object) -> tuple[dict[str, Any], ...]:
    """Entries of `added_tokens_decoder` in the order of their numbers, as the library tokenizers takes them."""
    name = "added_tokens_decoder"
    if not isinstance(tokens, Mapping) or not all(isinstance(x, Mapping) for x in tokens.values()):
        raise ValueError(f"{name}: wanted objects by number, got {received(tokens)}")
    for number in tokens:
        if re.fullmatch("[0-9]{1,10}", number) is None:
            raise ValueError(f"{name}: wanted a token's number, got {number[:40]!r}")
    return tuple(
        {"content": _content(f"{name}[{number!r}]", tokens[number])}
        | {
            flag: check_flag(f"{name}[{number!r}].{flag}", tokens[number][flag])
            for flag in _FLAGS
            if flag in tokens[number]
        }
        for number in sorted(tokens, key=int)
    )


def _content(name: str, token: object) -> str:
    """The text of a token: a string, or an object whose `content` it is."""
    text = token.get("content") if isinstance(token, Mapping) else token
    # half of a surrogate pair is no text
    if not isinstance(text, str) or not text or re.search("[\ud800-\udfff]", text):
        raise ValueError(f"{name}: wanted a token, got {received(token)}")
    return text
