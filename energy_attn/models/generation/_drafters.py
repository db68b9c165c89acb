"""Drafters: cheap guesses of the next tokens, which a model verifies in one pass."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import checks

from ...prefix_tree import PrefixTree, grow
from ..decoder._cache import DecoderCache
from ..decoder._config import check_type
from ..decoder._decoder import AbstractDecoder
from ..decoder._read import read_chunks, read_on

_CHUNK = 1024  # of a prompt, read at a time
_Tokens = Int[Array, "batch slots"]
_Lengths = Int[Array, " batch"]


class AbstractDrafter(eqx.Module):
    """Drafts trees of candidate tokens that continue a text; drafts never change the generated text.

    `depth` is the largest number of nodes on a path, including the root, which is the last known
    token. The methods run inside the compiled loop of [`generate`][energy_attn.models.generate].

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.models import AbstractDrafter
        >>> from energy_attn.prefix_tree import PrefixTree
        >>> class Again(AbstractDrafter):  # drafts the last token once more
        ...     depth: int = 2
        ...     def start(self, tokens, lengths, slots, parallel):
        ...         return None
        ...     def draft(self, text, lengths, state):
        ...         last = jnp.take_along_axis(text, lengths[:, None] - 1, axis=1)
        ...         return PrefixTree.from_beam(jnp.stack([last, last], axis=2)), state
        >>> tree, _ = Again().draft(jnp.array([[1, 2, 0]]), jnp.array([2]), None)
        >>> tree.tokens.tolist()
        [[2, 2]]
    """

    depth: eqx.AbstractVar[int]

    @abc.abstractmethod
    def start(
        self, tokens: _Tokens, lengths: _Lengths, slots: int, parallel: SequenceParallel | None
    ) -> Any:
        """The state that the drafter carries from draft to draft, in arrays of fixed shapes.

        Args:
            tokens: the prompts, `[batch, time]`.
            lengths: the number of tokens that each row really has, in front.
            slots: the largest number of tokens that a row will ever have.
            parallel: the mesh axes to shard a cache over.
        """

    @abc.abstractmethod
    def draft(self, text: _Tokens, lengths: _Lengths, state: PyTree) -> tuple[PrefixTree, PyTree]:
        """A tree whose only root is the last token of each row, and the new state.

        Args:
            text: the known tokens, prompt and generated, `[batch, slots]`.
            lengths: the number of known tokens in each row; up to `depth` more than at the last draft.
            state: from `start` or the last draft.
        """


class PromptLookup(AbstractDrafter):
    """Drafts what followed earlier occurrences of the last tokens: no second model, no weights.

    Looks for the longest ending of the text, of at most `ngram` tokens, that occurred before; each of
    its latest occurrences gives a candidate.

    Args:
        ngram: the largest number of tokens to compare.
        candidates: the number of occurrences to draft from.
        length: tokens drafted from each.
        capacity: nodes of the tree; None: room for all.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is below one.

    Source: prompt lookup decoding, as LLMA (arXiv 2304.04487) copies spans from references.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.models import PromptLookup
        >>> text = jnp.array([[1, 2, 3, 4, 1, 2, 0, 0]], jnp.int32)
        >>> tree, _ = PromptLookup(candidates=1, length=3).draft(text, jnp.array([6]), None)
        >>> tree.tokens.tolist()  # the last known token, and what followed 1, 2
        [[2, 3, 4, 1]]
    """

    ngram: int = eqx.field(static=True)
    candidates: int = eqx.field(static=True)
    capacity: int = eqx.field(static=True)
    depth: int = eqx.field(static=True)

    def __init__(
        self, ngram: int = 3, candidates: int = 2, length: int = 6, capacity: int | None = None
    ):
        self.ngram = checks.check_integer("ngram", ngram, 1)
        self.candidates = checks.check_integer("candidates", candidates, 1)
        self.depth = checks.check_integer("length", length, 1) + 1
        most = candidates * length + 1
        self.capacity = most if capacity is None else checks.check_integer("capacity", capacity, 1)

    def start(
        self, tokens: _Tokens, lengths: _Lengths, slots: int, parallel: SequenceParallel | None
    ) -> None:
        """Returns None, as drafts depend on the text alone."""

    def draft(self, text: _Tokens, lengths: _Lengths, state: PyTree) -> tuple[PrefixTree, PyTree]:
        """A tree of the tokens that follow earlier occurrences of the last ones."""
        slots = text.shape[1]
        position = jnp.arange(slots, dtype=jnp.int32)[None]
        # matched[e]: how many tokens before position e equal those before the end of the text
        matched = jnp.zeros(text.shape, jnp.int32)
        all_equal = jnp.ones(text.shape, bool)
        for back in range(1, min(self.ngram, slots) + 1):
            expected = _gather_tokens(text, lengths[:, None] - back)
            all_equal &= (jnp.roll(text, back, 1) == expected) & (position >= back)
            matched += all_equal.astype(jnp.int32)
        candidate = (position < lengths[:, None]) & (matched > 0)
        # the longest ending first, then the latest occurrence
        scores = jnp.where(candidate, matched * slots + position, -1)
        score, _ = lax.top_k(scores, min(self.candidates, slots))
        start = jnp.where(score >= 0, score % slots, lengths[:, None])
        follows = start[:, :, None] + jnp.arange(self.depth - 1, dtype=jnp.int32)[None, None]
        drafted = _gather_tokens(text, follows.reshape(len(text), -1)).reshape(follows.shape)
        last = last_of(text, lengths)[:, :, None]
        beam = jnp.concatenate([jnp.broadcast_to(last, (*start.shape, 1)), drafted], 2)
        counts = 1 + jnp.clip(lengths[:, None] - start, 0, self.depth - 1)
        return PrefixTree.from_beam(beam, capacity=self.capacity, lengths=counts), state


class ModelDrafter(AbstractDrafter):
    """Drafts the likeliest continuations by a smaller model, as a tree.

    The tree grows level by level: each time the small model reads it, the continuations of highest
    joint probability are added.

    Args:
        model: a decoder with the vocabulary of the model that verifies.
        length: the largest number of tokens ahead, and how often the small model reads the tree.
        nodes: of the tree, including the root.

    Raises:
        TypeError: `model` is not an `AbstractDecoder`, or a size not an integer.
        ValueError: a size is below one, or there are fewer nodes than `length` and the root.

    Source: Leviathan et al. (arXiv 2211.17192); trees by joint probability as in EAGLE-2
    (arXiv 2406.16858).

    Examples:
        >>> import jax
        >>> from energy_attn.models import Llama, LlamaConfig, ModelDrafter
        >>> config = LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> ModelDrafter(Llama(config, key=jax.random.key(0)), length=3, nodes=7).depth
        4
    """

    model: AbstractDecoder
    nodes: int = eqx.field(static=True)
    depth: int = eqx.field(static=True)

    def __init__(self, model: AbstractDecoder, length: int = 4, nodes: int = 16):
        check_type("model", model, AbstractDecoder, "an AbstractDecoder")
        self.model = model
        self.depth = checks.check_integer("length", length, 1) + 1
        self.nodes = checks.check_integer("nodes", nodes, self.depth)

    def start(
        self, tokens: _Tokens, lengths: _Lengths, slots: int, parallel: SequenceParallel | None
    ) -> DecoderCache:
        """The cache of the small model, with the prompts."""
        cache = self.model.empty_cache(len(tokens), slots, parallel=parallel)
        return read_chunks(self.model, tokens, cache, lengths, _CHUNK)[1]

    def draft(
        self, text: _Tokens, lengths: _Lengths, state: DecoderCache
    ) -> tuple[PrefixTree, DecoderCache]:
        """A tree of the likeliest continuations of each row."""
        # the cache lacks the tokens accepted since the last draft; the last token is the root
        missing = lengths - 1 - state.lengths
        position = state.lengths[:, None] + jnp.arange(self.depth, dtype=jnp.int32)[None]
        _, state, _ = read_on(self.model, _gather_tokens(text, position), state, missing)
        tokens = jnp.pad(last_of(text, lengths), ((0, 0), (0, self.nodes - 1)))
        parent = jnp.full(tokens.shape, -1, jnp.int32)
        ones = jnp.ones(len(text), jnp.int32)
        tree = PrefixTree.from_parents(tokens, parent, self.depth, ones)
        levels = self.depth - 1
        for level in range(levels):
            count = (self.nodes - 1) * (level + 1) // levels - (self.nodes - 1) * level // levels
            tree = grow(tree, self.model.read_tree(tree, state).logits, count)
        return tree, state


def last_of(text: Array, lengths: Array) -> Array:
    return _gather_tokens(text, lengths[:, None] - 1)


def _gather_tokens(text: Array, index: Array) -> Array:
    return jnp.take_along_axis(text, jnp.clip(index, 0, text.shape[1] - 1), axis=1)
