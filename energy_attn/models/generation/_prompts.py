"""Prompts: tokens, text or chats, as one padded array and the length of each."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from energy_attn.distributed.internal import check_counts
from energy_attn.kernels.internal import as_int32, is_concrete, received

from ..decoder._read import check_tokens
from ..text._tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompts = (
    Int[Array, "B T"]
    | Sequence[Sequence[int]]
    | str
    | Sequence[str]
    | Sequence[Message]
    | Sequence[Sequence[Message]]
)


def encoded(tokens: object, tokenizer: Tokenizer | None) -> object:
    """Returns text and chats as lists of tokens, and anything else unchanged."""
    if isinstance(tokens, str) or _is_chat(tokens):
        tokens = [tokens]
    if not isinstance(tokens, (list, tuple)) or not any(
        isinstance(x, str) or _is_chat(x) for x in tokens
    ):
        return tokens
    if tokenizer is None:
        raise TypeError(
            f"tokens: wanted tokens, or a tokenizer= beside text, got {received(tokens)}"
        )
    rows = [tokens_of(text, tokenizer) for text in tokens]
    for index, (row, text) in enumerate(zip(rows, tokens, strict=True)):
        if not row:
            raise ValueError(
                "tokens: wanted text, as this tokenizer begins one with no token, got "
                f"{received(text)} as number {index}"
            )
    return rows


def tokens_of(text: Any, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a string or a chat; raises `TypeError` for anything else."""
    if isinstance(text, str):
        return tokenizer.encode(text)
    if _is_chat(text):  # its text has the special tokens that begin it
        return tokenizer.encode(tokenizer.apply_chat_template(text), add_special_tokens=False)
    raise TypeError(f"tokens: wanted strings and chats beside each other, got {received(text)}")


def _is_chat(x: object) -> bool:
    return isinstance(x, (list, tuple)) and len(x) > 0 and isinstance(x[0], Mapping)


def check_padding(tokens: object, lengths: object, tokenizer: Tokenizer | None) -> None:
    is_array = isinstance(tokens, (jax.Array, np.ndarray))
    if tokenizer is None or lengths is not None or not is_array or not is_concrete(tokens):
        return
    special = tokenizer.special_tokens
    name = special.get("pad_token")
    pad = None if name is None else tokenizer.token_id(name)
    rows = np.asarray(tokens)
    if pad is None or rows.ndim != 2 or not rows.size:
        return
    ends = rows[:, -1] == pad
    # some models begin each text with the token that pads
    begins = (rows[:, 0] == pad) & (name != special.get("bos_token"))
    for padded, side in ((ends, "right"), (begins, "left")):
        if padded.any():
            raise ValueError(
                f"tokens: wanted prompts in front and lengths=, or a list of prompts without padding, got "
                f"row {int(padded.argmax())} padded on the {side} with token {pad}, {name!r}, "
                "which would be read as text"
            )


def prompts(
    tokens: object, lengths: object, vocab: int, name: str = "lengths"
) -> tuple[Array, Array]:
    """Prompts as `[B, T]` int32, padded at the end, and their lengths, the argument `name`."""
    if isinstance(tokens, (list, tuple)):
        if lengths is not None:
            raise ValueError(f"{name}: wanted None beside a list, got {received(lengths)}")
        tokens, lengths = _padded(tokens)
    array = check_tokens("tokens", tokens)
    batch, time = array.shape
    if batch < 1 or time < 1:
        raise ValueError(f"tokens: wanted at least one prompt of one token, got {received(tokens)}")
    counts = check_counts(lengths, batch, time, name)
    if is_concrete(counts) and (np.asarray(counts) < 1).any():
        raise ValueError(f"{name}: wanted at least 1, got {np.asarray(counts).tolist()}")
    check_vocabulary("tokens", array, counts, vocab)
    return jnp.asarray(as_int32(array)), counts


def check_vocabulary(name: str, tokens: Array | np.ndarray, counts: Array, vocab: int) -> None:
    """Raises `ValueError` if one of the first `counts` of `tokens` is known to be outside `vocab`."""
    if is_concrete(tokens) and is_concrete(counts):
        tokens = np.asarray(tokens)
        exists = np.arange(tokens.shape[-1]) < np.asarray(counts)[..., None]
        outside = tokens[exists & ((tokens < 0) | (tokens >= vocab))]
        if outside.size:
            raise ValueError(
                f"{name}: wanted tokens from 0 to {vocab - 1}, the model's vocabulary, "
                f"got {outside[0]}"
            )


def _padded(rows: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    if any(isinstance(row, jax.core.Tracer) for row in rows):
        raise TypeError("tokens: wanted an array [B, T] inside jax.jit, got a list of traced rows")
    arrays = [np.asarray(row) for row in rows]
    for index, row in enumerate(arrays):
        if row.ndim != 1 or row.size == 0 or not np.issubdtype(row.dtype, np.integer):
            raise ValueError(
                f"tokens: wanted sequences of at least one integer, got "
                f"{received(rows[index])} as number {index}"
            )
    counts = np.array([len(row) for row in arrays], np.int32)
    padded = np.zeros((len(arrays), counts.max(initial=0)), np.int64)
    for target, row in zip(padded, arrays, strict=True):
        target[: len(row)] = row
    return padded, counts
