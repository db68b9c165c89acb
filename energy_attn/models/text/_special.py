"""The special tokens of a checkpoint: what tokenizer_config.json and special_tokens_map.json say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from energy_attn.kernels.internal import received

from ..checkpoint._config import naming, read_json

# Flags, for transformers where there is no tokenizer.json, which says itself what is put around a text.
_FLAGS_OF_NAMES = "add_bos_token", "add_eos_token"
# Of an entry of `added_tokens_decoder`: what the library tokenizers takes.
_FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special"


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
    entries = dict(config)
    file = folder / "special_tokens_map.json"
    if file.is_file() and "added_tokens_decoder" not in config:
        entries |= read_json(file, file.name)
    with naming(folder / "tokenizer_config.json"):
        named = {
            name: _content(name, token)
            for name, token in entries.items()
            if name.endswith("_token") and name not in _FLAGS_OF_NAMES and token is not None
        }
        lists: list[Any] = [
            entries.get(f"{x}_special_tokens") or () for x in ("additional", "extra")
        ]
        more = [x for tokens in lists for x in (tokens.values() if _is_map(tokens) else tokens)]
        contents = (*named.values(), *(_content("additional_special_tokens", x) for x in more))
        listed = entries.get("added_tokens_decoder") or {}
        if not _is_map(listed) or not all(map(_is_map, listed.values())):
            raise ValueError(
                f"added_tokens_decoder: wanted objects by number, got {received(listed)}"
            )
        added = tuple(
            {"content": _content("added_tokens_decoder", token)}
            | {flag: token[flag] for flag in _FLAGS if flag in token}
            for _, token in sorted(listed.items(), key=lambda item: int(item[0]))
        )
    return Special(named, tuple(dict.fromkeys(contents)), added)


def _is_map(x: object) -> bool:
    return isinstance(x, Mapping)


def _content(name: str, token: object) -> str:
    """The text of a token: a string, or an object whose `content` it is."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name}: wanted a token, got {received(token)}")
    return text
