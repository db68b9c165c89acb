"""Generates text by a decoder in one compiled loop, with or without a drafter."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from energy_attn.distributed import SequenceParallel, fetch
from energy_attn.distributed.internal import is_explicit
from energy_attn.kernels.internal import checks

from ...functional._citation import cite
from ...functional._progress import Progress
from .._tokenizer import Tokenizer, special_ids
from .._vocabulary import TextStream, stop_strings
from ..decoder._config import check_type
from ..decoder._decoder import AbstractDecoder
from ..decoder._images import Images, check_images, check_one_chunk
from ._drafters import AbstractDrafter
from ._loop import Decoding, begin, run, serve
from ._prompts import Prompts, check_padding, encoded, prompts
from ._sampling import SamplingOptions, sampling_of
from ._stream import check_untraced, listening

_MOST = 2**31 - 1  # positions and tokens have 32 bits


class Generation(NamedTuple):
    """The result of `generate`, whose documentation describes the fields."""

    tokens: Int[Array, "B max_new_tokens"]
    lengths: Int[Array, " B"]
    passes: Int[Array, " B"]
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    logprobs: Float[Array, "B max_new_tokens"] | None = None
    texts: tuple[str, ...] | None = None

    @property
    def tokens_per_pass(self) -> Float[Array, ""]:
        """Tokens per pass of the model, without the first token of each row: 1 without a drafter."""
        return (self.lengths - 1).sum() / jnp.maximum(self.passes.sum(), 1)

    @property
    def acceptance_rate(self) -> Float[Array, ""]:
        """The share of drafted nodes that were accepted; 0 if none was drafted."""
        return self.accepted.sum() / jnp.maximum(self.drafted.sum(), 1)


def generate(
    model: AbstractDecoder,
    tokens: Prompts,
    max_new_tokens: int,
    *,
    tokenizer: Tokenizer | None = None,
    lengths: Int[Array, " B"] | None = None,
    parallel: SequenceParallel | None = None,
    batch_size: int | None = None,
    eos_token_id: int | Sequence[int] | Int[Array | np.ndarray, " ends"] | None = None,
    stop: str | Sequence[str] | None = None,
    drafter: AbstractDrafter | None = None,
    return_logprobs: bool = False,
    reproducible: bool = False,
    stream: Callable[[Any], Any] | None = None,
    progress: bool | Progress | None = False,
    chunk_size: int = 1024,
    images: Images | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Generation:
    r"""Continues prompts.

    The loop over tokens is one compiled program. With a drafter, each pass of the model verifies a
    tree of candidates over the cache and may accept several tokens. A drafter does not change the
    text: at temperature 0 it is the text of greedy decoding; else tokens have the distribution
    $\mathrm{softmax}(\mathrm{logits} / \mathrm{temperature})$, restricted by `top_k`, `top_p` and
    `min_p`. Before that, the bias is added to the logits, then penalties are applied. The draw after
    position $n$ depends only on `key`, the index of the prompt and $n$: one key gives one text on any mesh, with
    any drafter and any `batch_size`, up to rounding.

    With a `batch_size` below the number of prompts, prompts are a queue (continuous batching): when a row is
    complete, the next prompt takes its place in the cache. Two compiled programs alternate: one reads a
    prompt, the other runs passes of all rows until one is complete. Neither is compiled again for
    other prompts, as long as the longest has the same length.

    Args:
        model: the decoder.
        tokens: the prompts: `[B, T]` integers, or a list of sequences of different lengths. With a
            tokenizer, also a string, or a chat: a list of mappings with `role` and `content`; or a list
            of strings and chats.
        max_new_tokens: the largest number of tokens for each row.
        tokenizer: encodes text and chats; with it, the result has `texts`, and `stream` gets text.
        lengths: `[B]`, the number of tokens that each row of an array really has, in front, at least 1.
        parallel: the axes of the current mesh to shard the cache over.
        batch_size: the number of prompts computed at a time, in their order; None: all. The cache has
            as many rows, each with room for the longest prompt and `max_new_tokens`.
        eos_token_id: a token that ends a row, or a sequence or array of several; None: those of
            `model.config`, which [`load`][energy_attn.models.load] reads from
            generation_config.json or config.json; `()`: none.
        stop: a string that ends a row, or several; it may be a special token. The token that completes it is
            kept, and the text ends before it. Needs a tokenizer; the host is called after every pass.
        drafter: drafts tokens ahead: [`PromptLookup`][energy_attn.models.PromptLookup],
            [`ModelDrafter`][energy_attn.models.ModelDrafter], or a custom one; None: a token at a time.
        return_logprobs: whether to return `logprobs`.
        reproducible: as in a call of the model; texts and `logprobs` are then the same bit for bit, on any mesh.
        stream: called with the next tokens, an int32 array `[B, n]` with a row for each prompt, as soon
            as they are known, in order; -1 where a prompt has none or has ended. With a queue, also
            where a prompt waits, and the first token of a prompt comes in a message of its own. With a
            tokenizer, called with a list of strings instead, the new text of each prompt, or "": never part of
            a character, nor text that may begin a stop string. An exception that it raises ends the generation,
            and is raised.
        progress: whether to show a bar of the tokens read on standard error; None: if that is a terminal;
            a function: called instead with the fraction read and a note.
        chunk_size: tokens of the prompts read at a time; where the cache is sharded over devices, each
            reads its share of them.
        images: the [`Images`][energy_attn.models.Images] in the prompts, which are then one chunk, and no queue. The
            model of a drafter does not see them.
        **sampling: the keys of `SamplingOptions`, which says what each does: `temperature`, `top_k`,
            `top_p`, `min_p`, `repetition_penalty`, `presence_penalty`, `logit_bias`, and the `key` of
            the draws.

    Warns:
        UserWarning: `top_k`, `top_p` or `min_p` at temperature 0, where nothing is drawn; prompts that
            end, with the new tokens, beyond the context that the model is meant for.

    Returns:
        A named tuple. `tokens` `[B, max_new_tokens]`, int32, are -1 after the end of each row; `lengths` `[B]` counts
        them, with the token that ends a row. `passes`, `drafted` and `accepted`, each `[B]`, count passes of the
        model after the prompt, drafted nodes without roots, and the drafted nodes that are part of the text;
        `tokens_per_pass` (1 without a drafter) and `acceptance_rate` are computed from them. `logprobs`
        `[B, max_new_tokens]`, float32, are the model's log-softmax of its logits, before temperature, bias, penalties
        and restrictions, and 0 after the end of a row; None unless asked for. `texts` has the text of each row,
        up to a stop string and without special tokens; None without a tokenizer. Under `jax.jit`, where values
        cannot be checked, a row whose prompt has a token outside the vocabulary, or a length not from 1 to `T`,
        gets no tokens.

    Raises:
        TypeError: an argument of another type.
        ValueError: no prompt or an empty one, tokens outside the vocabulary, an array whose rows are
            padded with the tokenizer's pad token and no `lengths`, sizes below one, a temperature
            without a key, `tokenizer`, `stream`, `progress` or a queue inside `jax.jit`, a queue where
            `parallel.batch` splits the rows or a drafter's state has none, rows over explicit axes, a tree of
            another batch by a drafter, or a mesh that [`KVCache`][energy_attn.distributed.KVCache] refuses.

    Source: Leviathan et al. (arXiv 2211.17192) and SpecInfer (arXiv 2305.09781), whose output has the
    distribution of the model; the cache and its reduction: Tree Attention (arXiv 2408.04093), section
    5; `repetition_penalty`: CTRL (arXiv 1909.05858), section 4.1; `min_p`: Nguyen et al. (arXiv
    2407.01082).

    Examples:
        >>> import jax
        >>> from energy_attn.models import Llama, LlamaConfig, PromptLookup, generate
        >>> config = LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = Llama(config, key=jax.random.key(0))
        >>> result = generate(model, [[1, 2, 3], [4]], 5, drafter=PromptLookup(length=2))
        >>> result.tokens.shape, result.lengths.tolist()
        ((2, 5), [5, 5])
        >>> queue = generate(model, [[1, 2, 3], [4], [5, 6], [7]], 5, batch_size=2)
        >>> queue.tokens.shape, bool((queue.tokens[:2] == result.tokens).all())
        ((4, 5), True)
    """
    _check_objects(model, drafter, stream, tokenizer)
    checks.check_integer("max_new_tokens", max_new_tokens, 1)
    checks.check_integer("chunk_size", chunk_size, 1)
    _check_axes(parallel)
    reproducible = checks.check_flag("reproducible", reproducible)
    stops = stop_strings(stop)
    if stops and tokenizer is None:
        raise ValueError(f"tokenizer: wanted one with stop={checks.received(stop)}, got None")
    check_padding(tokens, lengths, tokenizer)
    rows_are_full = lengths is None
    tokens, lengths = prompts(encoded(tokens, tokenizer), lengths, model.config.vocab_size)
    _check_room(
        tokens.shape[1] if rows_are_full else lengths, tokens.shape[1], model, max_new_tokens
    )
    chosen = sampling_of(
        model.config.vocab_size, sampling, checks.check_flag("return_logprobs", return_logprobs)
    )
    ends = _stop_tokens(model.config.eos_token_id if eos_token_id is None else eos_token_id)
    if tokenizer is not None:
        ends = jnp.append(ends, jnp.asarray(special_ids(tokenizer, stops), jnp.int32))
    rows = len(tokens) if batch_size is None else checks.check_integer("batch_size", batch_size, 1)
    is_queue = rows < len(tokens)
    check_images(images, tokens, None)
    check_one_chunk(images, tokens.shape[1], chunk_size)
    if images is not None and is_queue:
        raise ValueError(
            f"batch_size: wanted None with images, whose rows are no queue, got {rows}"
        )
    if is_queue:
        _check_queue(rows, (model, drafter, chosen, ends, lengths.sum()), parallel)
    texts = None
    if tokenizer is not None and (stops or stream is not None):
        texts = _text_streams(tokenizer, tokens, lengths, stops)
    total = int(lengths.sum()) if is_queue else tokens.shape[1]
    with listening(stream, progress, texts, total, len(tokens)) as watch:
        by = Decoding(model, drafter, chosen, ends, watch, reproducible)
        if is_queue:
            loop = serve(by, tokens, lengths, rows, parallel, max_new_tokens, chunk_size)
        else:
            slots = tokens.shape[1] + max_new_tokens
            cache = model.empty_cache(
                len(tokens), slots, parallel=parallel, reproducible=reproducible
            )
            sizes = max_new_tokens, chunk_size
            loop = run(by, begin(by, tokens, lengths, cache, *sizes, images=images))
    parts = loop.text, loop.start, loop.lengths, loop.counts, loop.logprobs
    generation = _generation(*parts, max_new_tokens)
    if tokenizer is None:
        return generation
    written = _text_streams(tokenizer, tokens, lengths, stops)
    for text, row in zip(written, fetch(generation.tokens), strict=True):
        text.write(row[row >= 0].tolist())
        text.end()
    return generation._replace(texts=tuple(text.text for text in written))


def _check_objects(model: object, drafter: object, stream: object, tokenizer: object) -> None:
    check_type("model", model, AbstractDecoder, "an AbstractDecoder")
    check_type("drafter", drafter, AbstractDrafter | None, "None or an AbstractDrafter")
    if drafter is not None:
        cite("speculative")
    if stream is not None and not callable(stream):
        raise TypeError(
            f"stream: wanted None or a function of tokens, got {checks.received(stream)}"
        )
    check_type("tokenizer", tokenizer, Tokenizer | None, "None or a Tokenizer")
    if tokenizer is not None:
        check_untraced("tokenizer", tokenizer)


def _check_axes(parallel: SequenceParallel | None) -> None:
    mesh: Any = jax.sharding.get_abstract_mesh()
    split = tuple(parallel.batch) if isinstance(parallel, SequenceParallel) else ()
    # the loop's own arrays do not agree with the types of rows over explicit axes
    if not mesh.empty and is_explicit(mesh, {x for x in split if x in mesh.axis_names}):
        raise ValueError(
            f"parallel: wanted batch= over automatic axes of the mesh, got the explicit {split}"
        )


def _check_room(longest: object, width: int, model: AbstractDecoder, new: int) -> None:
    """Raises for positions past 32 bits, and warns of positions beyond the model's context."""
    if width + new > _MOST:
        raise ValueError(f"max_new_tokens: wanted at most {_MOST - width} here, got {new}")
    context = model.config.context_length
    if checks.is_concrete(longest) and (last := int(np.asarray(longest).max()) + new) > context:
        warnings.warn(
            f"tokens: wanted prompts that end with max_new_tokens within the {context} positions of "
            f"the model (max_position_embeddings), got up to {last}; text beyond may be worthless",
            stacklevel=3,
        )


def _check_queue(rows: int, inputs: Any, parallel: SequenceParallel | None) -> None:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(inputs)):
        raise ValueError(
            "batch_size: wanted None or the number of prompts inside jax.jit, as the host refills "
            f"rows, got {rows}"
        )
    if parallel is not None and parallel.batch:
        raise ValueError(
            "batch_size: wanted None or the number of prompts where parallel.batch splits the rows "
            f"over {parallel.batch}, got {rows}"
        )


def _text_streams(
    tokenizer: Tokenizer, tokens: Array, lengths: Array, stops: Sequence[str]
) -> list[TextStream]:
    rows = zip(*fetch((tokens, lengths)), strict=True)
    return [tokenizer.stream(row[:length].tolist(), stop=stops) for row, length in rows]


def _stop_tokens(tokens: object) -> Array:
    name = "eos_token_id"
    if isinstance(tokens, (int, np.integer)):
        tokens = (tokens,)
    if isinstance(tokens, (jax.Array, np.ndarray)):
        checks.check_shape(name, checks.check_int32(name, tokens), ("tokens",))
        return jnp.asarray(checks.as_int32(tokens))
    if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes)):
        raise TypeError(
            f"{name}: wanted a token or a sequence of tokens, got {checks.received(tokens)}"
        )
    checked = [checks.check_integer(name, token, 0) for token in tokens]
    if max(checked, default=0) > _MOST:
        raise ValueError(f"{name}: wanted integers of 32 bits, got {max(checked)}")
    return jnp.asarray(checked, jnp.int32)


@functools.partial(jax.jit, static_argnames="most")
def _generation(
    text: Array, start: Array, lengths: Array, counts: Array, logprobs: Array | None, most: int
) -> Generation:
    each = jnp.arange(most, dtype=jnp.int32)[None]
    exists = each < (lengths - start)[:, None]

    def written(x: Array, nothing: float) -> Array:
        x = jnp.take_along_axis(x, start[:, None] + each, axis=1)
        return jnp.where(exists, x, jnp.asarray(nothing, x.dtype))

    logprobs = None if logprobs is None else written(logprobs, 0)
    return Generation(written(text, -1), lengths - start, *counts, logprobs=logprobs)
