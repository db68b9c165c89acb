"""Text to tokens and back, by the tokenizer of a checkpoint."""

import abc
import codecs
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from energy_attn.distributed.internal import check_file


class AbstractTokenizer(abc.ABC):
    """Text to tokens, and a stream of tokens to text."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with the special tokens that begin one."""

    @abc.abstractmethod
    def writer(self) -> Callable[[list[int]], str]:
        """A function that returns the text that the next tokens add.

        It keeps part of a character until the rest follows.
        """


class Bytes(AbstractTokenizer):
    """A token for each byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        """The bytes."""
        return list(text.encode("utf-8"))

    def writer(self) -> Callable[[list[int]], str]:
        """Decodes bytes; invalid UTF-8 becomes U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda tokens: decoder.decode(bytes(tokens))


class FromFile(AbstractTokenizer):
    """A `tokenizer.json`, by the library `tokenizers`; its errors become `ValueError` with the path."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._path = path
        with _explained(path):
            check_file(path)
            self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """The tokens, with the special tokens that the file puts around a text."""
        with _explained(self._path):
            return self._tokenizer.encode(text).ids

    def writer(self) -> Callable[[list[int]], str]:
        """Decodes by the stream of the library, without special tokens."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)

        def write(tokens: list[int]) -> str:
            with _explained(self._path):
                return "".join(stream.step(self._tokenizer, x) or "" for x in tokens)

        return write


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


def tokenizer_of(directory: Path, vocab: int) -> AbstractTokenizer:
    """The tokenizer of a checkpoint; bytes where there is none and the vocabulary has 256 tokens.

    Raises `ImportError` without `tokenizers`, and `ValueError` if the tokenizer is missing or cannot
    be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        if vocab == 256:
            return Bytes()
        raise ValueError(
            f"tokenizer: wanted {path}, for a vocabulary of {vocab} tokens, got no such file"
        )
    try:
        return FromFile(path)
    except ImportError as error:
        raise ImportError(
            "tokenizers is not installed; the extra `models` brings it: pip install tokenizers"
        ) from error
