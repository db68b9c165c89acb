"""Messages from a running compiled loop to the host: the progress of the prefill, and new tokens."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, SupportsInt

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array

from energy_attn.kernels.internal import received

from ...functional._progress import Progress, progress_of

# Compiled programs call the functions below with the number of a listener, so that another listener
# does not compile the program again. Listeners are registered here while they listen.
_LISTENERS: dict[int, "_Listener"] = {}
_NUMBERS = itertools.count()


class _Listener:
    """Passes messages on; keeps an error that this raises, which ends the loop."""

    error: BaseException | None

    def __init__(
        self, stream: Callable[[np.ndarray], Any] | None, show: Progress, total: int, prompts: int
    ):
        self.error = None
        self._stream, self._show, self._total, self._prompts = stream, show, total, prompts
        self._read = 0

    def read(self, number: int) -> None:
        """`number` more tokens of the prompts were read."""
        self._read += number
        note = f"{self._read:,} of {self._total:,} tokens"
        self._tell(self._show, self._read / self._total, note)

    def wrote(self, tokens: np.ndarray, numbers: np.ndarray | None) -> bool:
        """These tokens of these prompts follow, -1 where a row has none; returns whether to go on."""
        if self._stream is not None:
            if numbers is not None:
                rows = np.full((self._prompts, tokens.shape[1]), -1, tokens.dtype)
                rows[numbers] = tokens
                tokens = rows
            self._tell(self._stream, tokens)
        return self.error is None

    def _tell(self, receiver: Callable[..., Any], *told: object) -> None:
        if self.error is None:
            try:
                receiver(*told)
            except BaseException as error:  # which the runtime would lose
                self.error = error


@contextlib.contextmanager
def listening(
    stream: Callable[[np.ndarray], Any] | None,
    progress: bool | Progress | None,
    total: int,
    prompts: int,
) -> Iterator[Array | None]:
    """The number of a listener, for `tell_read` and `tell_wrote`; None without a listener.

    `total` tokens will be read, of so many prompts. On exit, waits for all messages and raises the
    error of `stream` or `progress`. Raises `ValueError` inside of a traced program, and `TypeError` for
    a wrong `progress`.
    """
    if stream is None and progress is False:
        yield None
        return
    number = next(_NUMBERS)
    watch = jnp.zeros((), jnp.int32) + number
    if isinstance(watch, jax.core.Tracer):
        name, argument = ("progress", progress) if stream is None else ("stream", stream)
        raise ValueError(f"{name}: wanted none inside of jax.jit, got {received(argument)}")
    with progress_of("reading", progress) as show:
        listener = _LISTENERS[number] = _Listener(stream, show, total, prompts)
        try:
            yield watch
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


def tell_wrote(watch: Array | None, tokens: Array, numbers: Array | None) -> Array | bool:
    """Reports the next tokens of all prompts or of those with these numbers, for use inside `jax.jit`.

    Returns whether to go on.
    """
    if watch is None:
        return True
    told = (watch, tokens) if numbers is None else (watch, tokens, numbers)
    return io_callback(_wrote, jax.ShapeDtypeStruct((), bool), *told, ordered=True)


def _read(watch: SupportsInt, number: SupportsInt) -> None:
    _LISTENERS[int(watch)].read(int(number))


def _wrote(
    watch: SupportsInt, tokens: Array | np.ndarray, numbers: Array | np.ndarray | None = None
) -> np.ndarray:
    rows = None if numbers is None else np.asarray(numbers)
    return np.asarray(_LISTENERS[int(watch)].wrote(np.asarray(tokens), rows))
