"""Text to tokens and back, as a checkpoint's folder says."""

import abc
import codecs
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from energy_attn.distributed.internal import check_pulled


class AbstractTokenizer(abc.ABC):
    """Text to tokens, and tokens to text while they come."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that begin one. Raises nothing."""

    @abc.abstractmethod
    def writer(self) -> Callable[[list[int]], str]:
        """A function that is given tokens as they come, and says what text they add.

        Half a character is kept until its other half comes. Raises nothing.
        """


class Bytes(AbstractTokenizer):
    """A token for each byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        """The bytes."""
        return list(text.encode("utf-8"))

    def writer(self) -> Callable[[list[int]], str]:
        """Decodes bytes; what is no UTF-8 becomes U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda tokens: decoder.decode(bytes(tokens))


class FromFile(AbstractTokenizer):
    """A `tokenizer.json`, by the library `tokenizers`; `ValueError` names the file where that fails."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._path = path
        with _explained(path):
            check_pulled(path)
            self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the file puts around a text."""
        with _explained(self._path):
            return self._tokenizer.encode(text).ids

    def writer(self) -> Callable[[list[int]], str]:
        """Decodes by the library's stream, without special tokens."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)

        def write(tokens: list[int]) -> str:
            with _explained(self._path):
                return "".join(stream.step(self._tokenizer, x) or "" for x in tokens)

        return write


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """What the library raises, as a `ValueError` that names the file."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except (
        BaseException
    ) as error:  # it raises no narrower class, and where Rust panics no Exception
        raise ValueError(
            f"tokenizer: wanted a file of the library tokenizers, got {path}: {error}"
        ) from error


def tokenizer_of(directory: Path, vocab: int) -> AbstractTokenizer:
    """The tokenizer of a checkpoint; bytes where it has none and a vocabulary of 256.

    Raises `ImportError` without `tokenizers`, and `ValueError` if there is no tokenizer, or none
    that can be read.
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
            "text is split by the library tokenizers, which is not installed: pip install tokenizers"
        ) from error
