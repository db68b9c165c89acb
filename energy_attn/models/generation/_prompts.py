"""Prompts as arrays of tokens, and many continuations of one prompt, scored in one pass."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from energy_attn.distributed import SequenceParallel
from energy_attn.distributed.internal import check_counts
from energy_attn.kernels.internal import call_policy, checks

from ...functional._by_rows import rows_of
from ...prefix_tree import PrefixTree
from ...prefix_tree._tree import check_beam, gather_slots
from .._tokenizer import Tokenizer
from ..decoder._cache import DecoderCache
from ..decoder._config import check_type
from ..decoder._decoder import AbstractDecoder
from ..decoder._read import check_tokens, read_chunks

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
            f"tokens: wanted tokens, or a tokenizer= beside text, got {checks.received(tokens)}"
        )
    rows = [tokens_of(text, tokenizer) for text in tokens]
    for index, (row, text) in enumerate(zip(rows, tokens, strict=True)):
        if not row:
            raise ValueError(
                "tokens: wanted text, as this tokenizer begins one with no token, got "
                f"{checks.received(text)} as number {index}"
            )
    return rows


def tokens_of(text: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(text, str):
        return tokenizer.encode(text)
    if _is_chat(text):  # its text has the special tokens that begin it
        return tokenizer.encode(tokenizer.apply_chat_template(text), add_special_tokens=False)
    raise TypeError(
        f"tokens: wanted strings and chats beside each other, got {checks.received(text)}"
    )


def _is_chat(x: object) -> bool:
    return isinstance(x, (list, tuple)) and len(x) > 0 and isinstance(x[0], Mapping)


def check_padding(tokens: object, lengths: object, tokenizer: Tokenizer | None) -> None:
    is_array = isinstance(tokens, (jax.Array, np.ndarray))
    if tokenizer is None or lengths is not None or not is_array or not checks.is_concrete(tokens):
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
    """Returns prompts as `[B, T]` int32, padded at the end, and their lengths, whose argument is called `name`."""
    if isinstance(tokens, (list, tuple)):
        if lengths is not None:
            raise ValueError(f"{name}: wanted None beside a list, got {checks.received(lengths)}")
        tokens, lengths = _padded(tokens)
    array = check_tokens("tokens", tokens)
    batch, time = array.shape
    if batch < 1 or time < 1:
        raise ValueError(
            f"tokens: wanted at least one prompt of one token, got {checks.received(tokens)}"
        )
    counts = check_counts(lengths, batch, time, name)
    if checks.is_concrete(counts) and (np.asarray(counts) < 1).any():
        raise ValueError(f"{name}: wanted at least 1, got {np.asarray(counts).tolist()}")
    check_vocabulary("tokens", array, counts, vocab)
    return jnp.asarray(checks.as_int32(array)), counts


def check_vocabulary(name: str, tokens: Array | np.ndarray, counts: Array, vocab: int) -> None:
    """Raises `ValueError` if one of the first `counts` of `tokens` is known to be outside `vocab`."""
    if checks.is_concrete(tokens) and checks.is_concrete(counts):
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
                f"{checks.received(rows[index])} as number {index}"
            )
    counts = np.array([len(row) for row in arrays], np.int32)
    padded = np.zeros((len(arrays), counts.max(initial=0)), np.int64)
    for target, row in zip(padded, arrays, strict=True):
        target[: len(row)] = row
    return padded, counts


def score_continuations(
    model: AbstractDecoder,
    tokens: Int[Array, "B T"] | Sequence[Sequence[int]],
    continuations: Int[Array, "B M C"],
    *,
    prompt_lengths: Int[Array, " B"] | None = None,
    lengths: Int[Array, "B M"] | None = None,
    parallel: SequenceParallel | None = None,
    chunk_size: int = 1024,
    reproducible: bool = False,
) -> Float[Array, "B M C"]:
    r"""$\log P$ of each token of `M` continuations of each prompt, in nats.

    $$\log P(y_{m,c} \mid x, y_{m,<c})$$

    The prompt is read once, and so is each prefix that continuations share: they form a prefix tree,
    which one pass over the cache reads. The result equals that of scoring them one by one, up to
    rounding.

    Args:
        model: the decoder.
        tokens: the prompts: `[B, T]` integers, or a list of sequences of different lengths.
        continuations: `[B, M, C]` integers.
        prompt_lengths: `[B]`, the number of tokens that each row of an array really has, in front.
        lengths: `[B, M]`, the number of tokens of each continuation, in front; None means `C`.
        parallel: the axes of the current mesh to shard the cache over.
        chunk_size: tokens of the prompts read at a time.
        reproducible: as in a call of the model.

    Returns:
        `[B, M, C]`, float32, or float64 where the weights are; 0 after the end of a continuation, so that the
        sum over `C` is its log-probability. Under `jax.jit`, where values cannot be checked, NaN from the first
        token outside the vocabulary on, and for a prompt whose length is not from 1 to `T`.

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes that do not fit, an empty prompt, tokens outside the vocabulary, lengths
            out of range, or a mesh that does not fit.

    Source: the chain rule; one pass over shared prefixes as in SpecInfer (arXiv 2305.09781).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.models import Llama, LlamaConfig, score_continuations
        >>> config = LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = Llama(config, key=jax.random.key(0))
        >>> answers = jnp.array([[[5, 1], [5, 2], [6, 0]]])
        >>> scores = score_continuations(model, [[1, 2, 3]], answers, lengths=jnp.array([[2, 2, 1]]))
        >>> scores.shape, bool(scores[0, 0, 0] == scores[0, 1, 0]), float(scores[0, 2, 1])
        ((1, 3, 2), True, 0.0)
    """
    check_type("model", model, AbstractDecoder, "an AbstractDecoder")
    checks.check_integer("chunk_size", chunk_size, 1)
    vocab = model.config.vocab_size
    tokens, context_lengths = prompts(tokens, prompt_lengths, vocab, "prompt_lengths")
    beam, counts = check_beam(continuations, lengths, "continuations")
    checks.check_shape("continuations", beam, (len(tokens), "M", "C"))
    check_vocabulary("continuations", continuations, counts, vocab)
    policy = call_policy(None, reproducible)
    # over a mesh, paths are temporarily written to the cache
    is_written = parallel is not None and not policy.reads_trees
    slots = tokens.shape[1] + (beam.shape[2] if is_written else 0)
    cache = model.empty_cache(len(tokens), slots, parallel=parallel, reproducible=reproducible)
    prompt, answers = (tokens, context_lengths), (checks.as_int32(beam), counts)
    return _score(model, *prompt, *answers, cache, chunk_size, reproducible)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _score(
    model: AbstractDecoder,
    tokens: Array,
    context_lengths: Array,
    beam: Array,
    counts: Array,
    cache: DecoderCache,
    chunk_size: int,
    reproducible: bool,
) -> Array:
    policy = call_policy(None, reproducible)
    # the last token of the prompt is the root: its logits are for the first tokens
    _, cache = read_chunks(model, tokens, cache, context_lengths - 1, chunk_size, policy)
    root = jnp.take_along_axis(tokens, context_lengths[:, None] - 1, axis=1)[:, :, None]
    root = jnp.broadcast_to(root, (*beam.shape[:2], 1))
    tree = PrefixTree.from_beam(jnp.concatenate([root, beam], 2), lengths=counts + 1)
    # a token outside the vocabulary is read as NaN, which other branches would see
    clipped = jnp.clip(tree.tokens, 0, model.config.vocab_size - 1)
    tree_of_vocabulary = tree._replace(tokens=clipped)
    read: Any = model.read_tree(tree_of_vocabulary, cache, reproducible=reproducible)
    log_p = gather_slots(rows_of(policy)(jax.nn.log_softmax, read.logits), tree.parent)
    token_log_p = jnp.take_along_axis(log_p, clipped[:, :, None], axis=2)[:, :, 0]
    invalid = (tree.mask & (clipped != tree.tokens)[:, None]).any(-1)
    invalid |= ((context_lengths < 1) | (context_lengths > tokens.shape[1]))[:, None]
    token_log_p = jnp.where(invalid, jnp.asarray(jnp.nan, token_log_p.dtype), token_log_p)
    return tree.unpack(token_log_p)[:, :, 1:]
