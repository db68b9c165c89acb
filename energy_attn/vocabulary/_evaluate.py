"""Evaluates output layers on each device, with one flat axis of tokens."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from energy_attn.kernels.internal import lse_dtype, mesh_axes

from ._blocks import Block, BlockSize, WordBlocks, block_size, over_blocks
from ._logits import Layer, Rows, Scores, Words, logits, logits_at
from ._parallel import VocabularyParallel, over_devices, plan_of
from ._statistics import (
    Arguments,
    Asked,
    LayerStatistics,
    merged,
    mixture_divergence,
    scores_of,
    statistics,
)


class OutputLayer(eqx.Module):
    """The arrays and options of an output layer, which are a `Categorical`'s."""

    hidden: Float[Array, "*batch D"]
    weight: Float[Array, "V D"]
    bias: Float[Array, " V"] | None
    mask: Bool[Array, " V"] | None
    scale: float | Float[Array, "..."]
    temperature: float | Float[Array, "..."]
    soft_cap: float | None = eqx.field(static=True)
    parallel: VocabularyParallel | None = eqx.field(static=True)
    reproducible: bool = eqx.field(static=True)
    scores: Float[Array, "V T"] | None = None  # the logits, where they are there already

    @property
    def vocab_size(self) -> int:
        """The number of words, also inside a `jax.shard_map`, where a device has some of them."""
        plan = plan_of(self.parallel, self.hidden, self.weight)
        parts = math.prod(plan.mesh.shape[x] for x in plan.words) if plan and plan.local else 1
        return len(self.weight) * parts


def allowed_count(layer: OutputLayer) -> Array:
    """The number of words that the mask allows."""
    if layer.mask is None:
        return jnp.asarray(layer.vocab_size)
    plan, count = plan_of(layer.parallel, layer.hidden, layer.weight), layer.mask.sum()
    return lax.psum(count, plan.words) if plan and plan.local and plan.words else count


def with_nan(found: LayerStatistics, size: int, label: Array | None) -> LayerStatistics:
    """Statistics with NaN as the logit of a label that is none of `size` words."""
    if label is None:
        return found
    is_word = (label >= 0) & (label < size)
    return found._replace(label=jnp.where(is_word, found.label, jnp.nan))


class Local(NamedTuple):
    """Output layers on one device: its tokens and its words."""

    layers: tuple[Layer, ...]
    args: Arguments
    blocks: WordBlocks
    merged: tuple[str, ...]  # mesh axes whose devices have other words of the same tokens
    tokens: tuple[str, ...]  # mesh axes of tokens, if rows count from 0 on each device
    key: PRNGKeyArray | None  # of draws

    def statistics(self, asked: Asked) -> LayerStatistics:
        part = statistics(self.layers, asked, self.args, self.blocks)
        return merged(part, asked, self.merged)

    def mixture_divergence(self) -> Array:
        lse = self.statistics(Asked()).lse
        result = mixture_divergence(self.layers, self.args, lse, self.blocks)
        return self._sum(result)

    def top_k(self, k: int) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
        """The log-probabilities of the `k` likeliest words and their numbers."""
        index = self._likeliest(k)
        first = lax.axis_index(self.blocks.split) * self._word_count if self.blocks.split else 0
        rows, words = mesh_axes.vary_together((self.args.rows[0], self.args.words[0]))
        chosen = self._sum(logits_at(self.layers[0], rows, words, index - first))
        return (chosen - self.statistics(Asked()).lse[0][None]).T, index.T

    def draw(self) -> Int[Array, " T"]:
        """A word for each token: the largest of its logits with Gumbel noise."""
        rows, key = self.args.label, self.key
        assert rows is not None and key is not None
        if self.tokens:
            rows = rows + lax.axis_index(self.tokens) * len(rows)

        @jax.vmap
        def of_words(word: Array) -> Array:
            def noise(row: Array) -> Array:
                return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, row), word))

            return jax.vmap(noise)(rows)

        return self._largest(1, lambda block: of_words(block.number))[1][0]

    def _likeliest(self, k: int) -> Int[Array, "k T"]:
        return self._largest(k)[1]

    def _largest(
        self, k: int, noise: Callable[[Block], Array] | None = None
    ) -> tuple[Float[Array, "k T"], Int[Array, "k T"]]:
        args = jax.tree.map(lax.stop_gradient, mesh_axes.vary_together(self.args))
        like = args.rows[0].hidden

        def step(carry: tuple[Array, Array], block: Block) -> tuple[Array, Array]:
            block = self.blocks.whole(block)
            (scores,) = scores_of(self.layers, args.rows, block)
            if noise is not None:
                scores = scores + noise(block)
            index = jnp.broadcast_to(block.number[:, None], scores.shape)
            return _top(carry[0], carry[1], scores, index, k)

        begin = (
            lax.full_like(like, -jnp.inf, shape=(k, len(like))),
            lax.full_like(like, -1, jnp.int32, (k, len(like))),
        )
        found = over_blocks(step, begin, args.words, self.blocks)
        if not self.merged:
            return found
        parts, index = (lax.all_gather(x, self.merged, tiled=True) for x in found)
        values, index = _top(parts[:0], index[:0], parts, index, k)
        # the same on all of these devices, which their types do not say
        return lax.pmax(values, self.merged), lax.pmax(index, self.merged)

    def _sum(self, x: Array) -> Array:
        return lax.psum(x, self.merged) if self.merged else x

    @property
    def _word_count(self) -> int:
        return len(self.args.words[0][0])


def _top(x: Array, x_index: Array, y: Array, y_index: Array, k: int) -> tuple[Array, Array]:
    values, index = jnp.concatenate([x, y]), jnp.concatenate([x_index, y_index])
    values, places = lax.top_k(values.T, k)
    return values.T, jnp.take_along_axis(index, places.T, 0)


def evaluate(
    layers: tuple[OutputLayer, ...],
    f: Callable[[Local], Any],
    label: Array | None = None,
    key: PRNGKeyArray | None = None,
) -> Any:
    """`f` of the layers on each device, whose results `[T, ...]` get the leading axes of hidden states."""
    first = layers[0]
    plan = plan_of(first.parallel, first.hidden, first.weight)
    shape = first.hidden.shape[:-1]
    tokens = tuple(
        (x.hidden, *(spread(y, shape) for y in (x.scale, x.temperature))) for x in layers
    )
    words = tuple(
        Words(x.weight, x.bias, x.mask) if x.scores is None else Scores(x.scores) for x in layers
    )
    static = tuple(map(static_layer, layers))
    split, gathered, axes = (plan.words, plan.gathered, plan.merged) if plan else ((), (), ())

    def run(tokens: PyTree, words: tuple[Words, ...], key: PRNGKeyArray | None) -> Any:
        tokens, label = tokens
        shape = tokens[0][0].shape[:-1]
        rows = tuple(_rows(*x) for x in zip(static, tokens, strict=True))
        flat = Arguments(rows, words, None if label is None else label.reshape(-1))
        count = len(words[0][0])
        whole = BlockSize(count, count)
        size = block_size(len(rows[0].hidden), count) if first.scores is None else whole
        blocks = WordBlocks(size, split, gathered)
        of_rows = tuple(x for part in plan.tokens for x in part) if plan and plan.local else ()
        result = f(Local(static, flat, blocks, axes, of_rows, key))
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), result)

    return over_devices(plan, run, (tokens, label), words, key)


def dense_logits(layer: OutputLayer) -> Float[Array, "V T"]:
    """The logits of tokens in one axis."""
    scale, temperature = (
        spread(x, layer.hidden.shape[:-1]) for x in (layer.scale, layer.temperature)
    )
    rows = _rows(static_layer(layer), (layer.hidden, scale, temperature))
    words = Words(layer.weight, layer.bias, layer.mask)
    index = jnp.arange(len(layer.weight), dtype=jnp.int32)
    return logits(static_layer(layer), rows, words, Block(words, index, None))


def _rows(layer: Layer, arrays: tuple[Array, Array | None, Array | None]) -> Rows:
    hidden, *factors = arrays
    out = lse_dtype(layer.dtype)
    hidden = hidden.reshape(-1, hidden.shape[-1]).astype(out)
    return Rows(hidden, *(None if x is None else x.reshape(-1).astype(out) for x in factors))


def static_layer(layer: OutputLayer) -> Layer:
    return Layer(layer.soft_cap, _wider(layer.hidden.dtype, layer.weight.dtype))


def _wider(x: jnp.dtype, y: jnp.dtype) -> jnp.dtype:
    return x if x == y else lse_dtype(x, y)


def spread(x: Any, shape: tuple[int, ...]) -> Array | None:
    """A factor of logits for each token; None for the number 1."""
    return None if isinstance(x, float) and x == 1.0 else jnp.broadcast_to(jnp.asarray(x), shape)
