"""Many continuations of one context, scored in one pass."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import (
    CallPolicy,
    as_int32,
    call_policy,
    check_integer,
    check_shape,
    received,
)

from ...prefix_tree import pack, unpack
from ...prefix_tree._tree import check_beam, gather_slots
from ..decoder._by_rows import rows_of
from ..decoder._cache import DecoderCache
from ..decoder._decoder import AbstractDecoder
from ..decoder._read import read_chunks, read_tree
from ._prompts import check_vocabulary, prompts


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
        prompt_lengths: `[B]`, the number of tokens of each prompt in an array, in front.
        lengths: `[B, M]`, the number of tokens of each continuation, in front; None means `C`.
        parallel: the axes of the mesh in force to shard the cache of the context over.
        chunk_size: tokens of the prompts read at a time.
        reproducible: as in a call of the model.

    Returns:
        `[B, M, C]`, float32, or float64 where the weights are; 0 behind the end of a continuation, so
        that the sum over `C` is its log-probability. Under `jax.jit`, where bad values cannot be
        refused, NaN from the first token outside the vocabulary on, and for a prompt whose length is
        not from 1 to `T`.

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
        >>> found = score_continuations(model, [[1, 2, 3]], answers, lengths=jnp.array([[2, 2, 1]]))
        >>> found.shape, bool(found[0, 0, 0] == found[0, 1, 0]), float(found[0, 2, 1])
        ((1, 3, 2), True, 0.0)
    """
    if not isinstance(model, AbstractDecoder):
        raise TypeError(f"model: wanted an AbstractDecoder, got {received(model)}")
    check_integer("chunk_size", chunk_size, 1)
    vocab = model.config.vocab_size
    tokens, context_lengths = prompts(tokens, prompt_lengths, vocab, "prompt_lengths")
    beam, counts = check_beam(continuations, lengths, "continuations")
    check_shape("continuations", beam, (len(tokens), "M", "C"))
    check_vocabulary("continuations", continuations, counts, vocab)
    policy = call_policy(None, reproducible)
    # paths over a mesh are written behind the prompt, for a moment
    is_written = parallel is not None and not policy.reads_trees
    slots = tokens.shape[1] + (beam.shape[2] if is_written else 0)
    cache = model.empty_cache(len(tokens), slots, parallel=parallel, reproducible=reproducible)
    return _score(model, tokens, context_lengths, as_int32(beam), counts, cache, chunk_size, policy)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _score(
    model: AbstractDecoder,
    tokens: Array,
    context_lengths: Array,
    beam: Array,
    counts: Array,
    cache: DecoderCache,
    chunk_size: int,
    policy: CallPolicy,
) -> Array:
    # the last token of the prompt is the root: its logits are for the first tokens
    _, cache = read_chunks(model, tokens, cache, context_lengths - 1, chunk_size, policy)
    root = jnp.take_along_axis(tokens, context_lengths[:, None] - 1, axis=1)[:, :, None]
    root = jnp.broadcast_to(root, (*beam.shape[:2], 1))
    tree = pack(jnp.concatenate([root, beam], 2), lengths=counts + 1)
    # a token outside the vocabulary is read as NaN, which other branches would see
    clipped = jnp.clip(tree.tokens, 0, model.config.vocab_size - 1)
    tree_of_vocabulary = tree._replace(tokens=clipped)
    read = read_tree(model, tree_of_vocabulary, cache, policy)
    log_p = gather_slots(rows_of(policy)(jax.nn.log_softmax, read.logits), tree.parent)
    token_log_p = jnp.take_along_axis(log_p, clipped[:, :, None], axis=2)[:, :, 0]
    invalid = (tree.mask & (clipped != tree.tokens)[:, None]).any(-1)
    invalid |= ((context_lengths < 1) | (context_lengths > tokens.shape[1]))[:, None]
    token_log_p = jnp.where(invalid, jnp.asarray(jnp.nan, token_log_p.dtype), token_log_p)
    return unpack(token_log_p, tree)[:, :, 1:]
