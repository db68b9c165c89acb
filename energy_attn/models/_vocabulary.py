"""The vocabulary and the special tokens of a checkpoint, and the text of tokens that arrive one by one."""

import abc
import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

from energy_attn.distributed.internal import files as saved_files
from energy_attn.kernels.internal import checks

from .checkpoint._config import naming, read_json

# Flags that look like names of tokens; a tokenizer.json decides itself what is put around a text.
_FLAGS_OF_NAMES = "add_bos_token", "add_eos_token"
# Flags of an entry of `added_tokens_decoder` that the library tokenizers takes.
_FLAGS = "single_word", "lstrip", "rstrip", "normalized", "special"
_LISTS = "additional_special_tokens", "extra_special_tokens"


class Special(NamedTuple):
    named: Mapping[str, str]  # `bos_token`, `eos_token`, `pad_token` and others
    contents: tuple[str, ...]  # all special tokens, with and without a name
    added: tuple[
        Mapping[str, Any], ...
    ]  # tokens, special or not, that the vocabulary may lack, with their flags


def special_tokens(folder: Path, config: Mapping[str, Any]) -> Special:
    """The special tokens in a folder; its map is read if `config`, its tokenizer_config.json, lists none."""
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
    if not isinstance(tokens, (list, tuple, Mapping)):
        raise ValueError(f"{name}: wanted a list of tokens, got {checks.received(tokens)}")
    values = tokens.values() if isinstance(tokens, Mapping) else tokens
    return [_content(name, x) for x in values]


def _added(tokens: object) -> tuple[dict[str, Any], ...]:
    """Entries of `added_tokens_decoder`, sorted by number, with the flags that the library tokenizers takes."""
    name = "added_tokens_decoder"
    if not isinstance(tokens, Mapping) or not all(isinstance(x, Mapping) for x in tokens.values()):
        raise ValueError(f"{name}: wanted objects by number, got {checks.received(tokens)}")
    for number in tokens:
        if re.fullmatch("[0-9]{1,10}", number) is None:
            raise ValueError(f"{name}: wanted a token's number, got {number[:40]!r}")
    return tuple(
        {"content": _content(f"{name}[{number!r}]", tokens[number])}
        | {
            flag: checks.check_flag(f"{name}[{number!r}].{flag}", tokens[number][flag])
            for flag in _FLAGS
            if flag in tokens[number]
        }
        for number in sorted(tokens, key=int)
    )


def _content(name: str, token: object) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    # half of a surrogate pair is no text
    if not isinstance(text, str) or not text or re.search("[\ud800-\udfff]", text):
        raise ValueError(f"{name}: wanted a token, got {checks.received(token)}")
    return text


Tokens = Sequence[int] | Int[Array | np.ndarray, " tokens"]


def ids(name: str, tokens: Tokens) -> list[int]:
    """Tokens as a list, without negative numbers; errors call the argument `name`."""
    array = np.asarray(tokens) if len(tokens) else np.zeros(0, np.int32)
    if array.dtype == object and all(isinstance(x, int) for x in array.flat):  # past 64 bits
        raise ValueError(f"{name}: wanted numbers of 32 bits, got {checks.received(tokens)}")
    checks.check_shape(name, checks.check_int32(name, array), ("tokens",))
    return array[array >= 0].tolist()


class AbstractVocabulary(abc.ABC):
    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    @abc.abstractmethod
    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of tokens; U+FFFD in place of bytes that are not UTF-8."""

    @abc.abstractmethod
    def settles(self, token: int) -> bool:
        """Whether later tokens cannot change the text up to this token, except a U+FFFD at the end."""

    @abc.abstractmethod
    def number(self, token: str) -> int | None: ...


class Bytes(AbstractVocabulary):
    """A token for each byte of UTF-8, and no special ones."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        if tokens and max(tokens) > 255:
            raise ValueError(f"tokens: wanted bytes, from 0 to 255, got {max(tokens)}")
        return bytes(tokens).decode("utf-8", "replace")

    def settles(self, token: int) -> bool:
        """Returns True, as no byte belongs to two characters."""
        return True

    def number(self, token: str) -> int | None:
        data = token.encode("utf-8")
        return data[0] if len(data) == 1 else None


class FromFile(AbstractVocabulary):
    """A `tokenizer.json` without padding and truncation; its errors are `ValueError`s with the path."""

    def __init__(self, path: Path, special: Special) -> None:
        from tokenizers import Tokenizer

        self._path = path
        with _explained(path):
            saved_files.check_file(path)
            self._tokenizer: Any = Tokenizer.from_file(str(path))
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
        with naming(path.parent / "tokenizer_config.json"):
            self._add(special)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with _explained(self._path):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        with _explained(self._path):
            return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def settles(self, token: int) -> bool:
        """False for a byte of byte fallback, and for a token without text."""
        return token not in self._unsettled and self._tokenizer.id_to_token(token) is not None

    def number(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def _add(self, special: Special) -> None:
        """Adds tokens of tokenizer_config.json that the file lacks, and marks special ones."""
        from tokenizers import AddedToken

        known = {str(token) for token in self._tokenizer.get_added_tokens_decoder().values()}
        for token in special.added:
            if token["content"] not in known:
                self._tokenizer.add_tokens([AddedToken(**token)])
        # text that is not a token yet would become one, with a number outside the model's vocabulary
        named = [x for x in special.contents if self.number(x) is not None and x not in known]
        self._tokenizer.add_special_tokens([AddedToken(x, normalized=False) for x in named])

    @functools.cached_property
    def _unsettled(self) -> frozenset[int]:
        """Special tokens, and the bytes that a decoder with byte fallback joins."""
        added = self._tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        numbers = [(number, x) for x in names if (number := self.number(x)) is not None]
        return frozenset(special | {n for n, x in numbers if self.decode([n], True) != x})


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns errors of the library into `ValueError`, with the path of the file."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        # the library raises no narrower class, and a panic of Rust is not an Exception
        raise ValueError(
            f"tokenizer: wanted a file of the library tokenizers, got {path}: {error}"
        ) from error


def vocabulary(folder: Path, special: Special, config: Mapping[str, Any]) -> AbstractVocabulary:
    """The vocabulary of a checkpoint: its file, or bytes if there is none and `config` has 256 tokens."""
    path, size = folder / "tokenizer.json", config.get("vocab_size")
    if not path.is_file():
        if size == 256:
            return Bytes()
        known = "" if size is None else f", for a vocabulary of {size} tokens"
        raise ValueError(f"tokenizer: wanted {path}{known}, got no such file")
    try:
        return FromFile(path, special)
    except ImportError as error:
        raise ImportError(
            "tokenizers is not installed; the extra `models` brings it: pip install tokenizers"
        ) from error


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # for bytes that are not UTF-8, or not yet


class TextStream:
    """The text that tokens add, as `Tokenizer.stream` describes it.

    The pieces concatenate to the text of all tokens, without the text of the tokens before them. With byte fallback,
    characters wait for a token that is not a byte: a decoder writes U+FFFD for each byte of a run that is not UTF-8 as
    a whole.
    """

    text: str  # everything returned so far
    count: int  # the number of tokens taken
    stopped: bool  # whether a stop string was completed

    def __init__(
        self, vocabulary: AbstractVocabulary, before: Tokens, stop: str | Sequence[str] | None
    ) -> None:
        self.text, self.count, self.stopped = "", 0, False
        self._vocabulary, self._stop, self._held = vocabulary, stop_strings(stop), ""
        # the last tokens, on which the text of later ones depends, and the part of their text that is settled
        self._tokens = ids("before", before)
        self._known = self._decode(self._tokens)
        # the number of tokens at the end whose text later tokens may change
        settling = (n for n, x in enumerate(reversed(self._tokens)) if vocabulary.settles(x))
        self._open = next(settling, len(self._tokens))
        if self._settled(self._known) == self._known:
            self._forget(self._known)

    def write(self, tokens: Tokens) -> str:
        """The text that the next tokens add, up to where it may still change; raises as `Tokenizer.decode`."""
        return self._shown("".join(map(self._step, ids("tokens", tokens))))

    def end(self) -> str:
        """Ends the stream; returns the text that was held back."""
        text = self._decode(self._tokens)
        held = "" if self.stopped else self._take(text, text) + self._held
        self._tokens, self._known, self._open, self._held = [], "", 0, ""
        return self._shown(held)

    def _shown(self, text: str) -> str:
        self.text += text
        return text

    def _step(self, token: int) -> str:
        if self.stopped:
            return ""
        self.count += 1
        self._tokens.append(token)
        self._open = 0 if self._vocabulary.settles(token) else self._open + 1
        text = self._decode(self._tokens)
        settled = self._settled(text)
        shown = self._take(settled, settled if text.endswith(_REPLACEMENT) else text)
        if settled == text:
            self._forget(text)
        return shown

    def _take(self, settled: str, text: str) -> str:
        """The part of the settled text to show next, up to a stop string that the text contains."""
        text = self._held + self._behind(text)
        ends = [at for at in map(text.find, self._stop) if at >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        if added := self._behind(settled):
            self._known = settled
        text = self._held + added
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _behind(self, text: str) -> str:
        """The text after its common prefix with the settled text."""
        pairs = zip(text, self._known, strict=False)
        unlike = (n for n, (x, y) in enumerate(pairs) if x != y)
        return text[next(unlike, min(len(text), len(self._known))) :]

    def _settled(self, text: str) -> str:
        """The part of the tokens' text that later tokens cannot change."""
        if self._open:
            text = self._decode(self._tokens[: -self._open])
        return text.removesuffix(_REPLACEMENT)

    def _forget(self, text: str) -> None:
        """Keeps only the last tokens, as many as have a text that the settled text ends with."""
        count, known = 0, ""
        while not known or not text.endswith(known):
            if count >= len(self._tokens):
                return
            count = max(1, 2 * count)
            known = self._decode(self._tokens[-count:])
        self._tokens, self._known = self._tokens[-count:], known

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._vocabulary.decode(tokens, True)


def stop_strings(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(stops, Sequence) or not all(isinstance(x, str) for x in stops):
        raise TypeError(
            f"stop: wanted a string or a sequence of strings, got {checks.received(stop)}"
        )
    if not all(stops):
        raise ValueError(f"stop: wanted strings that are not empty, got {checks.received(stop)}")
    return tuple(stops)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest ending of `text` that is a proper prefix of `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if stop.startswith(text[-n:])), 0)
