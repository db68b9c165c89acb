"""Text from a decoder: the whole loop one compiled program, with or without a drafter."""

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
    check_integer,
    check_integral,
    check_key,
    check_shape,
    received,
)

from ...core._citation import cite
from ...core._progress import Progress
from ...prefix_tree._sampling import check_sampling
from ...prefix_tree._tree import is_known
from ..decoder._config import AbstractDecoderConfig
from ..decoder._decoder import AbstractDecoder
from ..decoder._read import check_tokens
from ._drafters import AbstractDrafter
from ._loop import Sampling, begin, run
from ._stream import listening


class Generation(NamedTuple):
    """What was generated, and what it took.

    Attributes:
        tokens: `[B, max_new_tokens]` int32; -1 behind each row's end.
        lengths: `[B]`, the tokens generated; a token that ends a row is its last.
        passes: `[B]`, how often the model read tokens to verify; the prompt is not counted.
        drafted: `[B]`, the nodes drafted in these passes, roots not counted.
        accepted: `[B]`, how many of them are part of the text.

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
        """Tokens for each time that the model read: 1 without a drafter. Raises nothing.

        The first token of each row, which the prompt gives, is not counted.
        """
        return (self.lengths - 1).sum() / jnp.maximum(self.passes.sum(), 1)

    @property
    def acceptance_rate(self) -> Float[Array, ""]:
        """The share of the drafted nodes that was accepted; 0 where there was none. Raises nothing."""
        return self.accepted.sum() / jnp.maximum(self.drafted.sum(), 1)


def generate(
    model: AbstractDecoder,
    tokens: Int[Array, "B T"] | Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    lengths: Int[Array, " B"] | None = None,
    parallel: SequenceParallel | None = None,
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

    The loop over tokens is one compiled program. With a drafter each pass of the model verifies a
    tree of candidates over the cache, and several tokens may come of it. The text is the same: that
    of greedy decoding at temperature 0, else one of the law
    $\mathrm{softmax}(\mathrm{logits} / \mathrm{temperature})$, cut to `top_k` and `top_p`. The draw
    after position $n$ depends on `key`, the row and $n$ alone, so that one key gives one text, on
    any mesh and with any drafter, but for rounding.

    Args:
        model: the decoder.
        tokens: the prompts: `[B, T]` integers, or a list of sequences of different lengths.
        max_new_tokens: how many tokens each row gets at most.
        lengths: `[B]`, how many of an array's tokens each row really has, in front; at least one.
        parallel: the axes of the mesh in force to spread the cache over.
        temperature: 0, a number, chooses the likeliest token; an array is above 0.
        top_k: draw from that many likeliest tokens; None: from all.
        top_p: draw from the likeliest tokens that have this probability together; None: from all.
        eos_token_id: a token that ends a row, or several, an array too; None: those of
            `model.config`, which [`Llama.load`][energy_attn.models.Llama.load] has from
            generation_config.json, or config.json; `()`: none.
        key: of the draws; needed where `temperature` is not 0.
        drafter: what guesses ahead, [`PromptLookup`][energy_attn.models.PromptLookup] or
            [`ModelDrafter`][energy_attn.models.ModelDrafter]; None: a token at a time.
        stream: is called with the tokens that follow, an int32 array `[B, n]`, as soon as they are
            known, in order; -1 where a row has none or ends. An exception that it raises ends the
            generation, and is raised.
        progress: whether to show on standard error how far the prompts have been read; None: where
            that is a terminal; a function: called instead with the share that is read and a note.
        chunk_size: tokens of the prompts that are read at a time, at least; where the cache is
            spread over devices, each reads its share of them.

    Warns:
        UserWarning: `top_k` or `top_p` at temperature 0, where nothing is drawn; prompts that end,
            with the new tokens, beyond the context that the model is meant for.

    Returns:
        The tokens, and how many passes they took. Under `jax.jit`, where that cannot be refused, a
        row whose prompt has a token outside the vocabulary, or no length from 1 to `T`, gets none.

    Raises:
        TypeError: an argument of another type.
        ValueError: no prompt or an empty one, tokens outside the vocabulary, sizes below one, a
            temperature without a key, `stream` or `progress` inside `jax.jit`, a tree of another
            batch by a drafter, or the mesh, as for
            [`KVCache`][energy_attn.distributed.KVCache].

    Source: Leviathan et al. (arXiv 2211.17192) and SpecInfer (arXiv 2305.09781), whose output law
    is the model's; the cache and its reduction: Tree Attention (arXiv 2408.04093), section 5.

    Examples:
        >>> import jax
        >>> from energy_attn.models import Llama, LlamaConfig, PromptLookup, generate
        >>> config = LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = Llama(config, key=jax.random.key(0))
        >>> found = generate(model, [[1, 2, 3], [4]], 5, drafter=PromptLookup(length=2))
        >>> found.tokens.shape, found.lengths.tolist()
        ((2, 5), [5, 5])
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
    given = lengths
    tokens, lengths = prompts(tokens, given, model.config.vocab_size)
    longest = tokens.shape[1] if given is None else given
    _warn_beyond(model.config, longest, max_new_tokens)
    sampling = _sampling(model, temperature, top_k, top_p, key)
    slots = tokens.shape[1] + max_new_tokens
    cache = model.empty_cache(len(tokens), slots, parallel=parallel)
    ends = _ends(model.config.eos_token_id if eos_token_id is None else eos_token_id)
    with listening(stream, progress, tokens.shape[1]) as watch:
        loop = begin(
            *(model, drafter, tokens, lengths, cache, sampling),
            *(ends, watch, max_new_tokens, chunk_size),
        )
        loop = run(model, drafter, sampling, ends, watch, loop)
    return _generation(loop.text, loop.start, loop.known, loop.counts, max_new_tokens)


def prompts(tokens: Any, lengths: Any, vocab: int, name: str = "lengths") -> tuple[Array, Array]:
    """Prompts as `[B, T]` int32, padded behind, and the tokens that each has, said in `name`.

    Raises `TypeError` for no integers; `ValueError` for no prompt or an empty one and, where values
    are known, for a token outside the vocabulary.
    """
    if isinstance(tokens, (list, tuple)):
        if lengths is not None:
            raise ValueError(f"{name}: wanted None beside a list, got {received(lengths)}")
        tokens, lengths = _padded(tokens)
    batch, time = check_tokens("tokens", tokens).shape
    if batch < 1 or time < 1:
        raise ValueError(f"tokens: wanted at least one prompt of one token, got {received(tokens)}")
    counts = check_counts(lengths, batch, time, name)
    if is_known(counts) and (np.asarray(counts) < 1).any():
        raise ValueError(f"{name}: wanted at least 1, got {np.asarray(counts).tolist()}")
    check_vocabulary("tokens", tokens, counts, vocab)
    return jnp.asarray(tokens).astype(jnp.int32), counts


def check_vocabulary(name: str, tokens: Any, counts: Any, vocab: int) -> None:
    """Raises `ValueError` where one of the first `counts` of `tokens` is known to be none of `vocab`."""
    if is_known(tokens) and is_known(counts):
        tokens = np.asarray(tokens)
        there = np.arange(tokens.shape[-1]) < np.asarray(counts)[..., None]
        outside = tokens[there & ((tokens < 0) | (tokens >= vocab))]
        if outside.size:
            raise ValueError(
                f"{name}: wanted tokens from 0 to {vocab - 1}, the model's vocabulary, "
                f"got {outside[0]}"
            )


def _padded(rows: Any) -> tuple[Any, Any]:
    if any(isinstance(row, jax.core.Tracer) for row in rows):
        raise TypeError("tokens: wanted an array [B, T] inside jax.jit, got a list of traced rows")
    found = [np.asarray(row) for row in rows]
    for index, row in enumerate(found):
        if row.ndim != 1 or row.size == 0 or not np.issubdtype(row.dtype, np.integer):
            raise ValueError(
                f"tokens: wanted sequences of at least one integer, got "
                f"{received(rows[index])} as number {index}"
            )
    counts = np.array([len(row) for row in found], np.int32)
    padded = np.zeros((len(found), counts.max(initial=0)), np.int64)
    for place, row in zip(padded, found, strict=True):
        place[: len(row)] = row
    return padded, counts


def _sampling(
    model: AbstractDecoder, temperature: Any, top_k: Any, top_p: Any, key: Any
) -> Sampling:
    number = isinstance(temperature, (int, float, np.number)) and not isinstance(temperature, bool)
    greedy = number and temperature == 0
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


def _warn_beyond(config: AbstractDecoderConfig, lengths: Any, more: int) -> None:
    """Warns where a row is known to end beyond the context that the model is meant for."""
    context = config.context_length
    if is_known(lengths) and (last := int(np.asarray(lengths).max()) + more) > context:
        _warn(
            f"tokens: wanted prompts that end with max_new_tokens within the {context} positions of "
            f"the model (max_position_embeddings), got up to {last}; what is written beyond may be "
            "worthless"
        )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)  # the caller of `generate`


def _ends(tokens: Any) -> Array:
    name = "eos_token_id"
    if isinstance(tokens, (int, np.integer)):
        tokens = (tokens,)
    if isinstance(tokens, (jax.Array, np.ndarray)):
        check_shape(name, check_integral(name, tokens), ("tokens",))
        return jnp.asarray(tokens).astype(jnp.int32)
    if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes)):
        raise TypeError(f"{name}: wanted a token or a sequence of tokens, got {received(tokens)}")
    return jnp.asarray([check_integer(name, token, 0) for token in tokens], jnp.int32)


@functools.partial(jax.jit, static_argnames="most")
def _generation(text: Array, start: Array, known: Array, counts: Array, most: int) -> Generation:
    generated = known - start
    each = jnp.arange(most, dtype=jnp.int32)[None]
    tokens = jnp.take_along_axis(text, start[:, None] + each, axis=1)
    tokens = jnp.where(each < generated[:, None], tokens, -1)
    return Generation(tokens, generated, *counts)
