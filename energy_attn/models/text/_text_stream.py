"""Text of tokens as they come: whole characters, and nothing that may become a stop string."""

from collections.abc import Callable, Sequence

_BEFORE = 6  # tokens of the prompt that decide how the first written one is spelled
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # of bytes that are no UTF-8, or not yet


class TextStream:
    """The text that tokens add, made by [`Tokenizer.stream`][energy_attn.models.Tokenizer.stream].

    A part of a character waits for the rest of it, and text that may begin a stop string waits until
    it is known whether it does.

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
        self, decode: Callable[[Sequence[int]], str], before: Sequence[int], stop: Sequence[str]
    ) -> None:
        self.text, self.count, self.stopped = "", 0, False
        self._decode, self._stop = decode, tuple(stop)
        # tokens whose text is not known yet, behind those that decide how they are spelled
        self._tokens, self._known = list(before[-_BEFORE:]), len(before[-_BEFORE:])
        self._held = ""

    def write(self, tokens: Sequence[int]) -> str:
        """The text that the next tokens add, as far as it cannot change any more."""
        return self._shown("".join(map(self._step, tokens)))

    def end(self) -> str:
        """The text that was held back: there are no more tokens."""
        held = "" if self.stopped else self._held + self._added()[1]
        self._tokens, self._known, self._held = [], 0, ""
        return self._shown(held)

    def _shown(self, text: str) -> str:
        self.text += text
        return text

    def _step(self, token: int) -> str:
        """The text that one more token shows."""
        if self.stopped:
            return ""
        self.count += 1
        self._tokens.append(int(token))
        before, added = self._added()
        if not added or added.endswith(_REPLACEMENT):
            return ""
        self._tokens = self._tokens[self._known :]
        self._known = len(self._tokens)
        text = self._held + added
        ends = [at for at in map(text.find, self._stop) if at >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _added(self) -> tuple[str, str]:
        """The text of the tokens that are known, and what the others add to it."""
        before = self._decode(self._tokens[: self._known])
        return before, self._decode(self._tokens)[len(before) :]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest ending of `text` that `stop` begins with, and is longer than."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if stop.startswith(text[-n:])), 0)
