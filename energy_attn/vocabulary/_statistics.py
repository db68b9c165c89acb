"""Statistics of softmaxes over a vocabulary, in one pass over blocks of words and with a derivative of one pass."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from energy_attn.kernels.internal import autodiff, mesh_axes, safe_shift

from ._blocks import Block, TangentOfSums, WordBlocks, over_blocks, sums_over_words
from ._logits import Layer, Rows, Scores, Words, logits


class Asked(NamedTuple):
    """The statistics that a pass computes with the log-partition functions; static."""

    pairs: tuple[tuple[int, int], ...] = ()  # layers i and j, for the mean of log p_j under p_i
    label: bool = False  # the first layer's logits of labels
    total: bool = False  # the sums of the first layer's logits
    mode: bool = False  # the first layer's likeliest words


class Arguments(NamedTuple):
    """The arrays of one output layer, or of several with one vocabulary."""

    rows: tuple[Rows, ...]
    words: tuple[Words | Scores, ...]
    label: Int[Array, " T"] | None


class LayerStatistics(NamedTuple):
    r"""Statistics of each token, `[T]`.

    Attributes:
        lse: $F_i = \log \sum_a e^{s_{ia}}$ of each layer.
        mean: $\sum_a p_{ia} \log p_{ja}$ of each pair of layers; minus infinity where j hides a word that i allows.
        label: the first layer's logit of the label, 0 for a label that no word has.
        total: the sum of the first layer's logits, of words that are allowed.
        mode: the number of the first layer's likeliest word.
        largest: its logit, held constant in derivatives.
    """

    lse: tuple[Float[Array, " T"], ...]
    mean: tuple[Float[Array, " T"], ...]
    # None unless asked for
    label: Any
    total: Any
    mode: Any
    largest: Any


def statistics(
    layers: tuple[Layer, ...], asked: Asked, args: Arguments, blocks: WordBlocks
) -> LayerStatistics:
    """The statistics of each token, differentiable to any order in both modes."""
    function = _StatisticsFunction(layers, asked, blocks)
    return autodiff.function_call(function, mesh_axes.vary_together(args))


def merged(part: LayerStatistics, asked: Asked, axes: tuple[str, ...]) -> LayerStatistics:
    """Merges the statistics of the words of each device of the mesh axes."""
    if not axes:
        return part
    # F = log Σ_d e^{F_d} over the devices
    top = [lax.pmax(lax.stop_gradient(x), axes) for x in part.lse]
    top = list(map(safe_shift, top))
    sums, label, total = lax.psum(
        ([jnp.exp(f - m) for f, m in zip(part.lse, top, strict=True)], part.label, part.total), axes
    )
    lse = [m + jnp.log(x) for m, x in zip(top, sums, strict=True)]
    means = []
    for (i, j), x in zip(asked.pairs, part.mean, strict=True):
        # E_i[log p_j] = Σ_d e^{F_id - F_i} (E_id[log p_jd] + F_jd - F_j)
        share = jnp.exp(part.lse[i] - safe_shift(lse[i]))
        means.append(share * jnp.where(share > 0, x + part.lse[j] - lse[j], 0.0))
    mode = largest = None
    if part.largest is not None:
        largest = lax.pmax(lax.stop_gradient(part.largest), axes)
        last = jnp.iinfo(jnp.int32).max
        mode = lax.pmin(jnp.where(part.largest == largest, part.mode, last), axes)
    return LayerStatistics(tuple(lse), tuple(lax.psum(means, axes)), label, total, mode, largest)


def mixture_divergence(
    layers: tuple[Layer, ...], args: Arguments, lse: tuple[Array, ...], blocks: WordBlocks
) -> Float[Array, " T"]:
    r"""Half of $\sum_a p_a \log (p_a / m_a) + q_a \log (q_a / m_a)$, with $m = (p + q) / 2$, over a device's words."""
    rows = args.rows, lse
    return sums_over_words(_MixtureTerm(layers, blocks), rows, args.words, blocks)


@dataclasses.dataclass(frozen=True)
class _MixtureTerm:
    layers: tuple[Layer, ...]
    blocks: WordBlocks

    def __call__(self, rows: PyTree, block: Block) -> tuple[Array, tuple[()]]:
        rows, lse = rows
        block = self.blocks.whole(block)
        scores = scores_of(self.layers, rows, block)
        hidden = [jnp.isneginf(s) for s in scores]
        logs = [
            jnp.where(x, -jnp.inf, jnp.where(x, 0.0, s) - safe_shift(f)[None])
            for s, x, f in zip(scores, hidden, lse, strict=True)
        ]
        # a word that one of them hides has half the other's probability
        seen = [jnp.where(x, 0.0, log) for x, log in zip(hidden, logs, strict=True)]
        either = jnp.where(hidden[0], seen[1], jnp.where(hidden[1], seen[0], jnp.logaddexp(*seen)))
        terms = (
            jnp.where(x, 0.0, jnp.exp(log) * (log - either + jnp.log(2.0).astype(log.dtype)))
            for x, log in zip(hidden, seen, strict=True)
        )
        first, second = terms
        return 0.5 * (first + second).sum(0), ()


def scores_of(
    layers: tuple[Layer, ...], rows: tuple[Rows, ...], block: Block
) -> list[Float[Array, "words T"]]:
    """The logits of each layer."""
    triples = zip(layers, rows, block.words, strict=True)
    return [logits(layer, row, words, block) for layer, row, words in triples]


class _Carry(NamedTuple):
    largest: list[Array]  # m_i, the largest logit of each layer
    weight: list[Array]  # z_i = Σ e^{s_i - m_i}
    weighted: list[Array]  # Σ e^{s_i - m_i} (s_j - m_j) of each pair
    misses: list[Array]  # whether j hides a word that i allows
    label: Array
    total: Array
    mode: Array


@dataclasses.dataclass(frozen=True)
class _StatisticsFunction(autodiff.AbstractFunction):
    layers: tuple[Layer, ...]
    asked: Asked
    blocks: WordBlocks

    def apply(self, args: PyTree) -> LayerStatistics:
        rows, words, label = args
        count, like = len(rows[0].hidden), rows[0].hidden

        def full(value: float, dtype: Any = like.dtype) -> Array:
            return lax.full_like(like, value, dtype, (count,))

        zero, layers, pairs = full(0.0), range(len(self.layers)), self.asked.pairs
        carry = _Carry(
            [full(-jnp.inf) for _ in layers],
            [zero for _ in layers],
            [zero for _ in pairs],
            [full(False, bool) for _ in pairs],
            *(zero, zero, full(0, jnp.int32)),
        )
        found = over_blocks(
            lambda carry, block: self._step(rows, label, carry, block), carry, words, self.blocks
        )
        logs = [jnp.log(z) for z in found.weight]
        lse = tuple(m + log for m, log in zip(found.largest, logs, strict=True))
        mean = tuple(
            jnp.where(
                misses, -jnp.inf, jnp.where(found.weight[i] > 0, x / found.weight[i] - logs[j], 0.0)
            )
            for (i, j), x, misses in zip(pairs, found.weighted, found.misses, strict=True)
        )
        asked = self.asked
        return LayerStatistics(
            lse,
            mean,
            found.label if asked.label else None,
            found.total if asked.total else None,
            *((found.mode, found.largest[0]) if asked.mode else (None, None)),
        )

    def _step(
        self, rows: tuple[Rows, ...], label: Array | None, carry: _Carry, block: Block
    ) -> _Carry:
        block = self.blocks.whole(block)
        scores = scores_of(self.layers, rows, block)
        tops = [s.max(0) for s in scores]
        largest = [jnp.maximum(m, top) for m, top in zip(carry.largest, tops, strict=True)]
        shifts, old = map(safe_shift, largest), list(map(safe_shift, carry.largest))
        shifts = list(shifts)
        decay = [jnp.exp(m - shift) for m, shift in zip(carry.largest, shifts, strict=True)]
        weights = [jnp.exp(s - shift[None]) for s, shift in zip(scores, shifts, strict=True)]
        weighted, misses = [], []
        for (i, j), x, missed in zip(self.asked.pairs, carry.weighted, carry.misses, strict=True):
            hidden = jnp.isneginf(scores[j])
            terms = weights[i] * jnp.where(hidden, 0.0, scores[j] - shifts[j][None])
            weighted.append(decay[i] * (x + carry.weight[i] * (old[j] - shifts[j])) + terms.sum(0))
            if i != j:
                missed = missed | (hidden & ~jnp.isneginf(scores[i])).any(0)
            misses.append(missed)
        return _Carry(
            largest,
            [z * d + w.sum(0) for z, d, w in zip(carry.weight, decay, weights, strict=True)],
            weighted,
            misses,
            carry.label + self._label(scores[0], label, block) if self.asked.label else carry.label,
            carry.total + _total(scores[0]) if self.asked.total else carry.total,
            jnp.where(tops[0] > carry.largest[0], block.number[scores[0].argmax(0)], carry.mode)
            if self.asked.mode
            else carry.mode,
        )

    def _label(self, scores: Array, label: Any, block: Block) -> Array:
        def summed(scores: Array, label: Array) -> Array:
            return _of_label(scores, label, block)

        def gathered(scores: Array, label: Array) -> Array:
            at = label - block.number[0]
            is_here = (at >= 0) & (at < len(scores))
            at = jnp.where(is_here, at, 0)
            if block.is_new is not None:
                is_here &= block.is_new[at]
            return jnp.where(is_here, jnp.take_along_axis(scores, at[None], 0)[0], 0.0)

        if self.blocks.gathered:  # numbers of words do not follow each other
            return summed(scores, label)
        # XLA:CPU makes an array of the block's size for the sum
        return lax.platform_dependent(scores, label, cpu=gathered, default=summed)

    def jvp(self, primals: PyTree, tangents: PyTree) -> tuple[Any, Any]:
        result = autodiff.function_call(self, primals)
        rows = primals.rows, primals.label, result.lse, result.mean
        moving = tangents.rows, None, (None,) * len(result.lse), (None,) * len(result.mean)
        slope = TangentOfSums(_Slope(self), self.blocks)
        change = autodiff.linear_call(slope, (rows, primals.words), (moving, tangents.words))
        return result, change[0]


@dataclasses.dataclass(frozen=True)
class _Slope:
    """Sums over words with the derivatives of the statistics, where F and the means are held constant."""

    statistics: _StatisticsFunction

    def __call__(self, rows: PyTree, block: Block) -> tuple[LayerStatistics, tuple[()]]:
        rows, label, lse, mean = rows
        block = self.statistics.blocks.whole(block)
        scores = scores_of(self.statistics.layers, rows, block)
        asked = self.statistics.asked
        logs = [
            jnp.where(jnp.isneginf(s), 0.0, s) - safe_shift(f)[None]
            for s, f in zip(scores, lse, strict=True)
        ]
        weights = [
            jnp.where(jnp.isneginf(s), 0.0, jnp.exp(log))
            for s, log in zip(scores, logs, strict=True)
        ]
        return LayerStatistics(
            # dF = Σ_a p_a ds_a
            tuple(w.sum(0) for w in weights),
            # d E_i[log p_j] = Σ_a p_ia (log p_ja - E_i[log p_j]) ds_ia + Σ_a (p_ia - p_ja) ds_ja
            tuple(
                (weights[i] * (logs[j] - x[None]) - weights[j]).sum(0)
                for (i, j), x in zip(asked.pairs, mean, strict=True)
            ),
            _of_label(scores[0], label, block) if asked.label else None,
            _total(scores[0]) if asked.total else None,
            *(None, None),
        ), ()


def _of_label(scores: Array, label: Any, block: Block) -> Array:
    is_label = block.number[:, None] == label[None]
    if block.is_new is not None:
        is_label &= block.is_new[:, None]
    return jnp.where(is_label, scores, 0.0).sum(0)


def _total(scores: Array) -> Array:
    return jnp.where(jnp.isneginf(scores), 0.0, scores).sum(0)
