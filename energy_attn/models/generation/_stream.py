"""Messages from a compiled loop to the host while it runs: the progress of the prefill, and new tokens."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsInt

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array

from energy_attn.kernels.internal import checks

from ...functional._progress import Progress, progress_of
from .._vocabulary import TextStream

# Compiled programs know a listener by its number, so that another listener does not compile the program again.
# Listeners are registered here while they listen.
_LISTENERS: dict[int, "_Listener"] = {}
_NUMBERS = itertools.count()


@dataclasses.dataclass
class _Listener:
    """Passes messages on; an error of a receiver is kept, and ends the loop."""

    # called with the next tokens, or, if there are `texts`, with the text that they add
    stream: Callable[[Any], Any] | None
    texts: Sequence[TextStream] | None  # the text of each prompt; one that is stopped ends its row
    show: Progress  # shows how much of the prompts has been read
    total: int  # tokens of the prompts
    prompts: int
    tokens_read: int = 0
    error: BaseException | None = None

    def read(self, number: int) -> None:
        self.tokens_read += number
        note = f"{self.tokens_read:,} of {self.total:,} tokens"
        self._tell(self.show, self.tokens_read / self.total, note)

    def wrote(
        self, tokens: np.ndarray, ends: np.ndarray, numbers: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Passes on the next tokens of the prompts `numbers`, -1 where a row has none; `ends`: they are a row's last.

        Returns the number of tokens that each row keeps, and whether it ends here.
        """
        kept, texts = (tokens >= 0).sum(1, dtype=np.int32), self.texts
        if texts is not None:
            self._tell(self._write, texts, kept, tokens, ends, numbers)
        elif self.stream is not None:
            rows = np.full((self.prompts, tokens.shape[1]), -1, tokens.dtype)
            rows[numbers] = tokens
            self._tell(self.stream, rows)
        stopped = [texts is not None and texts[number].stopped for number in numbers]
        return kept, np.array(stopped) | (self.error is not None)

    def _write(
        self,
        texts: Sequence[TextStream],
        kept: np.ndarray,
        tokens: np.ndarray,
        ends: np.ndarray,
        numbers: np.ndarray,
    ) -> None:
        """Passes on the text that the tokens add; writes into `kept` how many of them were taken."""
        said = [""] * self.prompts
        for index in np.flatnonzero(kept):
            number, row = numbers[index], tokens[index, tokens[index] >= 0]
            text, taken = texts[number], texts[number].count
            said[number] = text.write(row.tolist())
            kept[index] = text.count - taken
            if ends[index]:
                said[number] += text.end()
        if self.stream is not None:
            self.stream(said)

    def _tell(self, receiver: Callable[..., Any], *told: object) -> None:
        if self.error is None:
            try:
                receiver(*told)
            except BaseException as error:  # which the runtime would lose
                self.error = error


def check_untraced(name: str, argument: object) -> None:
    if isinstance(jnp.zeros((), jnp.int32) + 1, jax.core.Tracer):
        raise ValueError(f"{name}: wanted none inside of jax.jit, got {checks.received(argument)}")


@contextlib.contextmanager
def listening(
    stream: Callable[[Any], Any] | None,
    progress: bool | Progress | None,
    texts: Sequence[TextStream] | None,
    total: int,
    prompts: int,
) -> Iterator[Array | None]:
    """The number of a listener, for `tell_read` and `tell_wrote`; None without a listener."""
    if stream is None and progress is False and texts is None:
        yield None
        return
    check_untraced(*(("progress", progress) if stream is None else ("stream", stream)))
    number = next(_NUMBERS)
    with progress_of("reading", progress) as show:
        listener = _LISTENERS[number] = _Listener(stream, texts, show, total, prompts)
        try:
            yield jnp.zeros((), jnp.int32) + number
        finally:
            jax.effects_barrier()
            del _LISTENERS[number]
    if listener.error is not None:
        raise listener.error


def raise_error(watch: Array | None) -> None:
    """Raises the error that ended the loop, if one did; for use outside of `jax.jit`."""
    error = None if watch is None else _LISTENERS[int(watch)].error
    if error is not None:
        raise error


def tell_read(watch: Array | None, number: Array | int) -> None:
    """Reports that `number` more tokens of the prompts were read; for use inside `jax.jit`."""
    if watch is not None:
        io_callback(_read, None, watch, number, ordered=True)


def tell_wrote(
    watch: Array, tokens: Array, ends: Array, numbers: Array | None
) -> tuple[Array, Array]:
    """Reports next tokens from inside `jax.jit`; returns `[B]`, how many a row keeps and whether it ends."""
    if numbers is None:
        numbers = jnp.arange(len(tokens), dtype=jnp.int32)
    rows = ends.shape
    answer = jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, bool)
    return io_callback(_wrote, answer, watch, tokens, ends, numbers, ordered=True)


def _read(watch: SupportsInt, number: SupportsInt) -> None:
    _LISTENERS[int(watch)].read(int(number))


def _wrote(watch: SupportsInt, *told: Array | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _LISTENERS[int(watch)].wrote(*map(np.asarray, told))
