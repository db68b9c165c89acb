"""Generates text by a decoder in one compiled loop, with or without a drafter."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from energy_attn.distributed import SequenceParallel
from energy_attn.distributed.internal import check_counts
from energy_attn.kernels.internal import (
    as_int32,
    check_integer,
    check_integral,
    check_key,
    check_shape,
    received,
)

from ...functional._citation import cite
from ...functional._progress import Progress
from ...prefix_tree._sampling import check_sampling
from ...prefix_tree._tree import is_concrete
from ..decoder._config import AbstractDecoderConfig
from ..decoder._decoder import AbstractDecoder
from ..decoder._read import check_tokens
from ._drafters import AbstractDrafter
from ._loop import Decoding, Sampling, begin, run
from ._queue import check_rows, serve
from ._stream import listening


class Generation(NamedTuple):
    """The generated tokens, and the number of passes.

    Attributes:
        tokens: `[B, max_new_tokens]` int32; -1 after the end of each row.
        lengths: `[B]`, the number of generated tokens; a token that ends a row is its last.
        passes: `[B]`, how often the model read tokens, without the prompt.
        drafted: `[B]`, the nodes drafted in these passes, without roots.
        accepted: `[B]`, the number of drafted nodes that are part of the text.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.models import Generation
        >>> one = jnp.ones(1, jnp.int32)
        >>> Generation(jnp.zeros((1, 9)), 9 * one, 4 * one, 12 * one, 4 * one).tokens_per_pass
        Array(2., dtype=float32)
    """

    tokens: Int[Array, "B max_new_tokens"]
    lengths: Int[Array, " B"]
    passes: Int[Array, " B"]
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]

    @property
    def tokens_per_pass(self) -> Float[Array, ""]:
        """Tokens per pass of the model: 1 without a drafter.

        The first token of each row, which the prompt gives, is not counted.
        """
        return (self.lengths - 1).sum() / jnp.maximum(self.passes.sum(), 1)

    @property
    def acceptance_rate(self) -> Float[Array, ""]:
        """The share of drafted nodes that were accepted; 0 if none was drafted."""
        return self.accepted.sum() / jnp.maximum(self.drafted.sum(), 1)


def generate(
    model: AbstractDecoder,
    tokens: Int[Array, "B T"] | Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    lengths: Int[Array, " B"] | None = None,
    parallel: SequenceParallel | None = None,
    batch_size: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | Int[Array | np.ndarray, " ends"] | None = None,
    key: PRNGKeyArray | None = None,
    drafter: AbstractDrafter | None = None,
    stream: Callable[[np.ndarray], Any] | None = None,
    progress: bool | Progress | None = False,
    chunk_size: int = 1024,
) -> Generation:
    r"""Continues prompts.

    The loop over tokens is one compiled program. With a drafter, each pass of the model verifies a
    tree of candidates over the cache and may accept several tokens. A drafter does not change the
    text: at temperature 0 it is that of greedy decoding; else tokens have the distribution
    $\mathrm{softmax}(\mathrm{logits} / \mathrm{temperature})$, restricted by `top_k` and `top_p`. The
    draw after position $n$ depends on `key`, the number of the prompt and $n$ alone, so that one key
    gives one text on any mesh, with any drafter and any `batch_size`, up to rounding.

    With a `batch_size` below the number of prompts they are a queue: a row whose prompt is complete
    gives its place in the cache to the next prompt. Two compiled programs take turns: one reads a
    prompt, the other runs passes of all rows until one is complete. Neither is compiled again for
    other prompts, as long as the longest has the same length.

    Args:
        model: the decoder.
        tokens: the prompts: `[B, T]` integers, or a list of sequences of different lengths.
        max_new_tokens: the largest number of tokens for each row.
        lengths: `[B]`, the number of tokens that each row of an array really has, in front; at least
            one.
        parallel: the axes of the mesh in force to shard the cache over.
        batch_size: how many prompts are computed at a time, in their order; None: all. The cache has
            as many rows, each with room for the longest prompt and `max_new_tokens`.
        temperature: the number 0 chooses the likeliest token; an array is above 0.
        top_k: draw from this number of likeliest tokens; None: from all.
        top_p: draw from the likeliest tokens whose probabilities add up to this; None: from all.
        eos_token_id: a token that ends a row, or a sequence or array of several; None: those of
            `model.config`, which [`Llama.load`][energy_attn.models.Llama.load] reads from
            generation_config.json or config.json; `()`: none.
        key: of the draws; required unless `temperature` is 0.
        drafter: guesses ahead: [`PromptLookup`][energy_attn.models.PromptLookup],
            [`ModelDrafter`][energy_attn.models.ModelDrafter], or your own; None: a token at a time.
        stream: called with the next tokens, an int32 array `[B, n]` with a row for each prompt, as soon
            as they are known, in order; -1 where a prompt has none or has ended. With a queue, also
            where a prompt waits, and the first token of a prompt comes in a message of its own. An
            exception that it raises ends the generation, and is raised.
        progress: whether to show on standard error how much of the prompts has been read; None: if
            that is a terminal; a function: called instead with the share read and a note.
        chunk_size: tokens of the prompts read at a time; where the cache is sharded over devices, each
            reads its share of them.

    Warns:
        UserWarning: `top_k` or `top_p` at temperature 0, where nothing is drawn; prompts that end,
            with the new tokens, beyond the context that the model is meant for.

    Returns:
        The tokens, and the number of passes. Under `jax.jit`, where bad values cannot be refused, a row
        whose prompt has a token outside the vocabulary, or a length not from 1 to `T`, gets no tokens.

    Raises:
        TypeError: an argument of another type.
        ValueError: no prompt or an empty one, tokens outside the vocabulary, sizes below one, a
            temperature without a key, `stream`, `progress` or a queue inside `jax.jit`, a queue where
            `parallel.batch` splits the rows or a drafter's state has none, a tree of another batch by
            a drafter, or a mesh that [`KVCache`][energy_attn.distributed.KVCache] refuses.

    Source: Leviathan et al. (arXiv 2211.17192) and SpecInfer (arXiv 2305.09781), whose output has the
    distribution of the model; the cache and its reduction: Tree Attention (arXiv 2408.04093), section 5.

    Examples:
        >>> import jax
        >>> from energy_attn.models import Llama, LlamaConfig, PromptLookup, generate
        >>> config = LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = Llama(config, key=jax.random.key(0))
        >>> found = generate(model, [[1, 2, 3], [4]], 5, drafter=PromptLookup(length=2))
        >>> found.tokens.shape, found.lengths.tolist()
        ((2, 5), [5, 5])
        >>> queue = generate(model, [[1, 2, 3], [4], [5, 6], [7]], 5, batch_size=2)
        >>> queue.tokens.shape, bool((queue.tokens[:2] == found.tokens).all())
        ((4, 5), True)
    """
    if not isinstance(model, AbstractDecoder):
        raise TypeError(f"model: wanted an AbstractDecoder, got {received(model)}")
    if drafter is not None and not isinstance(drafter, AbstractDrafter):
        raise TypeError(f"drafter: wanted None or an AbstractDrafter, got {received(drafter)}")
    if drafter is not None:
        cite("speculative")
    if stream is not None and not callable(stream):
        raise TypeError(f"stream: wanted None or a function of tokens, got {received(stream)}")
    check_integer("max_new_tokens", max_new_tokens, 1)
    check_integer("chunk_size", chunk_size, 1)
    given_lengths = lengths
    tokens, lengths = prompts(tokens, given_lengths, model.config.vocab_size)
    longest = tokens.shape[1] if given_lengths is None else given_lengths
    _warn_beyond(model.config, longest, max_new_tokens)
    sampling = _sampling(model, temperature, top_k, top_p, key)
    stop = _stop_tokens(model.config.eos_token_id if eos_token_id is None else eos_token_id)
    rows = None if batch_size is None else check_integer("batch_size", batch_size, 1)
    if rows is not None and rows < len(tokens):
        check_rows(rows, (model, drafter, sampling, stop, lengths.sum()), parallel)
        with listening(stream, progress, int(lengths.sum()), len(tokens)) as watch:
            by = Decoding(model, drafter, sampling, stop, watch)
            texts = serve(by, tokens, lengths, rows, parallel, max_new_tokens, chunk_size)
        return _generation(*texts, max_new_tokens)
    slots = tokens.shape[1] + max_new_tokens
    cache = model.empty_cache(len(tokens), slots, parallel=parallel)
    with listening(stream, progress, tokens.shape[1], len(tokens)) as watch:
        by = Decoding(model, drafter, sampling, stop, watch)
        loop = run(by, begin(by, tokens, lengths, cache, max_new_tokens, chunk_size))
    return _generation(loop.text, loop.start, loop.lengths, loop.counts, max_new_tokens)


def prompts(
    tokens: object, lengths: object, vocab: int, name: str = "lengths"
) -> tuple[Array, Array]:
    """Prompts as `[B, T]` int32, padded at the end, and their lengths; `name` is that of the argument.

    Raises `TypeError` for other types than integers; `ValueError` for no prompt or an empty one and,
    where values are known, for a token outside the vocabulary.
    """
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


def _sampling(
    model: AbstractDecoder,
    temperature: float | Array,
    top_k: int | None,
    top_p: float | Array | None,
    key: PRNGKeyArray | None,
) -> Sampling:
    is_number = isinstance(temperature, (int, float, np.number)) and not isinstance(
        temperature, bool
    )
    greedy = is_number and temperature == 0
    temperature, top_k, top_p = check_sampling(1.0 if greedy else temperature, top_k, top_p)
    if key is not None:
        check_key("key", key)
    if greedy:
        unused = [name for name, x in (("top_k", top_k), ("top_p", top_p)) if x is not None]
        if unused:
            _warn(f"{unused[0]}: wanted a temperature above 0 beside it, got 0; nothing is drawn")
        return Sampling()
    if key is None:
        shown = temperature if isinstance(temperature, float) else received(temperature)
        raise ValueError(f"key: wanted a jax.random.key at temperature {shown}, got None")
    most = None if top_k is None else min(top_k, model.config.vocab_size)
    return Sampling(key, jnp.asarray(temperature, jnp.float32), top_p, most)


def _warn_beyond(config: AbstractDecoderConfig, lengths: int | Array, more: int) -> None:
    """Warns where a row is known to end beyond the context that the model is meant for."""
    context = config.context_length
    if is_concrete(lengths) and (last := int(np.asarray(lengths).max()) + more) > context:
        _warn(
            f"tokens: wanted prompts that end with max_new_tokens within the {context} positions of "
            f"the model (max_position_embeddings), got up to {last}; what is written beyond may be "
            "worthless"
        )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)  # the caller of `generate`


def _stop_tokens(tokens: object) -> Array:
    name = "eos_token_id"
    if isinstance(tokens, (int, np.integer)):
        tokens = (tokens,)
    if isinstance(tokens, (jax.Array, np.ndarray)):
        check_shape(name, check_integral(name, tokens), ("tokens",))
        return jnp.asarray(as_int32(tokens))
    if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes)):
        raise TypeError(f"{name}: wanted a token or a sequence of tokens, got {received(tokens)}")
    return jnp.asarray([check_integer(name, token, 0) for token in tokens], jnp.int32)


@functools.partial(jax.jit, static_argnames="most")
def _generation(text: Array, start: Array, lengths: Array, counts: Array, most: int) -> Generation:
    generated = lengths - start
    each = jnp.arange(most, dtype=jnp.int32)[None]
    tokens = jnp.take_along_axis(text, start[:, None] + each, axis=1)
    tokens = jnp.where(each < generated[:, None], tokens, -1)
    return Generation(tokens, generated, *counts)
