"""Text of tokens as they come: no text that may still change, or become a stop string."""

from collections.abc import Sequence
from typing import Any

from energy_attn.kernels.internal import received

from ._vocabulary import AbstractVocabulary, Tokens, ids

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # of bytes that are no UTF-8, or not yet


class TextStream:
    """The text that tokens add, made by [`Tokenizer.stream`][energy_attn.models.Tokenizer.stream].

    The pieces, joined, are the text of all tokens without what it has in common with the text of those before.
    A part of a character waits for the rest of it, and text that may begin a stop string waits until it is known
    whether it does. Characters of a tokenizer with byte fallback wait for a token that is no byte: a decoder
    writes U+FFFD for each byte of a run that is not UTF-8 as a whole.

    Attributes:
        text: what was written so far.
        count: the number of tokens that were taken.
        stopped: whether a stop string was completed. It is no part of the text; later tokens are not taken.

    Examples:
        >>> from importlib import resources
        >>> from energy_attn.models import Tokenizer
        >>> bytes_of = Tokenizer.load(resources.files("energy_attn") / "cli" / "demo" / "model")
        >>> stream = bytes_of.stream(stop=["END"])
        >>> [stream.write([token]) for token in "é EnEND".encode()]
        ['', 'é', ' ', '', 'En', '', '', '']
        >>> stream.text, stream.stopped
        ('é En', True)
    """

    text: str
    count: int
    stopped: bool

    def __init__(
        self, vocabulary: AbstractVocabulary, before: Tokens, stop: str | Sequence[str] | None
    ) -> None:
        self.text, self.count, self.stopped = "", 0, False
        self._vocabulary, self._stop, self._held = vocabulary, stop_strings(stop), ""
        # tokens that still decide how later ones are spelled, and the part of their text that is done with
        self._tokens = ids("before", before)
        self._known = self._decode(self._tokens)
        # how many of them, at the end, may get another text
        settling = (n for n, x in enumerate(reversed(self._tokens)) if vocabulary.settles(x))
        self._open = next(settling, len(self._tokens))
        if self._settled(self._known) == self._known:
            self._forget(self._known)

    def write(self, tokens: Tokens) -> str:
        """The text that the next tokens add, as far as it cannot change any more.

        Raises `TypeError` or `ValueError` as `Tokenizer.decode`.
        """
        return self._shown("".join(map(self._step, ids("tokens", tokens))))

    def end(self) -> str:
        """The text that was held back: there are no more tokens."""
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
        """The text behind what it has in common with the text that is done with."""
        pairs = zip(text, self._known, strict=False)
        unlike = (n for n, (x, y) in enumerate(pairs) if x != y)
        return text[next(unlike, min(len(text), len(self._known))) :]

    def _settled(self, text: str) -> str:
        """The part of the tokens' text that later tokens cannot change."""
        if self._open:
            text = self._decode(self._tokens[: -self._open])
        return text.removesuffix(_REPLACEMENT)

    def _forget(self, text: str) -> None:
        """Keeps the last tokens, whose text the settled text ends with, as later ones need no others."""
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
        raise TypeError(f"stop: wanted a string or a sequence of strings, got {received(stop)}")
    if not all(stops):
        raise ValueError(f"stop: wanted strings that are not empty, got {received(stop)}")
    return tuple(stops)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest ending of `text` that `stop` begins with, and is longer than."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if stop.startswith(text[-n:])), 0)
