"""Cross-entropies over a vocabulary from hidden states."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from energy_attn.kernels.internal import checks, lse_dtype

from ._categorical import Categorical, at_least_zero, check_labels
from ._evaluate import allowed_count, with_nan
from ._parallel import VocabularyParallel
from ._statistics import Asked, LayerStatistics
from ._summed import summed
from ._tiles import measure, of_tiles, ordered_sum, tile_statistics


class TokenStatistics(NamedTuple):
    """Statistics of each token, from the pass of its loss; all `[*batch]`.

    Attributes:
        log_prob: the log-probability of the label, in nats; NaN where it is ignored.
        log_partition: the log-partition function of the logits.
        entropy: the entropy of the distribution, in nats.
        is_correct: whether the label is the likeliest word; False where it is ignored.
    """

    log_prob: Float[Array, "*batch"]
    log_partition: Float[Array, "*batch"]
    entropy: Float[Array, "*batch"]
    is_correct: Bool[Array, "*batch"]


def softmax_cross_entropy(
    hidden: Float[Array, "*batch D"],
    weight: Float[Array, "V D"],
    labels: Int[Array, "*batch"],
    *,
    bias: Float[Array, " V"] | None = None,
    mask: Bool[Array, " V"] | None = None,
    weights: Float[Array, "*#batch"] | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float | Float[Array, "..."] = 1.0,
    temperature: float | Float[Array, "..."] = 1.0,
    soft_cap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    parallel: VocabularyParallel | None = None,
    return_statistics: bool = False,
    reproducible: bool = False,
) -> Any:
    r"""The cross-entropy of labels with the softmax of `hidden @ weight.T`, without the logits.

    $$L_t = (1 - \varepsilon) (F_t - s_{t y_t}) + \varepsilon\, \Big(F_t - \frac{1}{V} \sum_a s_{ta}\Big) + z F_t^2,
      \qquad F_t = \log \sum_a e^{s_{ta}}$$

    The fused linear cross-entropy, with memory for the gradients and blocks. The gradient of a sum or mean takes three
    matrix products, as with an array of logits. It takes four in 16 bits, over a sharded vocabulary, and on several
    devices unless `parallel` or an explicit mesh says how tokens are sharded.
    `optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T, labels)` has the same
    values, and an array of tokens $\times$ words. Differentiable to any order, in both modes.

    Args:
        hidden: hidden states, `[*batch, D]`, of any floating dtype; sums and results are float32, or float64.
        weight: the output matrix, `[V, D]`, for tied embeddings their matrix.
        labels: numbers of words, `[*batch]`, of any integer dtype.
        bias: `[V]`; None: no bias.
        mask: `[V]` booleans, whether a word is allowed: False for padding of the vocabulary. None: all are.
        weights: of the tokens, broadcastable to `[*batch]`; 0 leaves a token out. None: all are 1.
        ignore_index: labels of this value, as -100, have no loss and no gradient.
        label_smoothing: $\varepsilon$, from 0 to 1: the share of the uniform distribution over all allowed words.
        z_loss: $z$, the factor of the square of the log-partition function.
        scale, temperature, soft_cap: of the logits, as in [`Categorical`][energy_attn.Categorical].
        reduction: `"mean"`, of all tokens by their weights, those that are ignored left out; `"sum"`; or `"none"`.
        parallel: as in [`Categorical`][energy_attn.Categorical].
        return_statistics: whether to return statistics of the tokens, too, from the same pass.
        reproducible: as in [`Categorical`][energy_attn.Categorical]; a sum is added in pairs of tokens.

    Returns:
        A number, or `[*batch]` without a reduction; with `return_statistics` a pair with a named tuple of `log_prob`,
        `log_partition`, `entropy` and `is_correct`. A mean of no tokens is 0. The loss of a traced label that is no
        word is NaN.

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes that do not fit, a number out of range, a label that is known to be no word, or as
            `Categorical`.

    Source: cut cross-entropy (arXiv 2411.09009) for the idea of blocks; label smoothing (arXiv 1512.00567), section 7;
    z-loss: PaLM (arXiv 2204.02311), section 5.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> import energy_attn as ea
        >>> keys = jax.random.split(jax.random.key(0), 2)
        >>> hidden, weight = jax.random.normal(keys[0], (6, 8)), jax.random.normal(keys[1], (500, 8))
        >>> labels = jnp.array([3, 1, 4, 1, 5, 9])
        >>> loss = ea.softmax_cross_entropy(hidden, weight, labels)
        >>> dense = optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T, labels).mean()
        >>> bool(jnp.allclose(loss, dense))
        True
    """
    options: Any = {"mask": mask, "scale": scale, "temperature": temperature}
    options |= {"soft_cap": soft_cap, "parallel": parallel, "reproducible": reproducible}
    p = Categorical(hidden, weight, bias, **options)
    shape = p.hidden.shape[:-1]
    smoothing = checks.check_finite_number("label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing: wanted a number from 0 to 1, got {label_smoothing}")
    z_factor = checks.check_finite_number("z_loss", z_loss)
    checks.check_choice("reduction", reduction, ("mean", "sum", "none"))
    checks.check_flag("return_statistics", return_statistics)
    labels, counts = _without_ignored(labels, ignore_index)
    labels = check_labels(labels, shape, p.vocab_size)
    token_loss = _TokenLoss(smoothing, z_factor)
    counts = jnp.broadcast_to(counts, shape)
    total = ordered_sum if reproducible else jnp.sum
    factor = _factors(counts, weights, lse_dtype(p.hidden.dtype, p.weight.dtype))
    if reduction == "mean":
        number = total(factor)
        factor = factor / jnp.where(number == 0, 1.0, number)
    if reduction != "none" and not return_statistics and not reproducible:
        return summed(token_loss, p, labels, factor)
    losses, found = token_loss.with_statistics(p, labels, factor, return_statistics)
    loss = losses if reduction == "none" else total(losses)
    if not return_statistics:
        return loss
    (lse,), label = found.lse, found.label
    return loss, TokenStatistics(
        log_prob=jnp.where(counts, label - lse, jnp.nan),
        log_partition=lse,
        entropy=at_least_zero(-found.mean[0]),
        is_correct=counts & (found.mode == labels),
    )


class _TokenLoss(NamedTuple):
    r"""The loss of a token, $(1 - \varepsilon) (F - s_y) + \varepsilon (F - \bar s) + z F^2$; static."""

    smoothing: float
    z_loss: float

    def __call__(self, p: Categorical, labels: Array, factor: Array) -> Array:
        return self.with_statistics(p, labels, factor, False)[0]

    def with_statistics(
        self, p: Categorical, labels: Array, factor: Array, more: bool
    ) -> tuple[Array, LayerStatistics]:
        """The losses times their factors, and the statistics that they need, or more of them."""
        asked = Asked(((0, 0),) * more, label=True, total=self.smoothing > 0, mode=more)
        allowed, size = allowed_count(p), p.vocab_size

        def of_tile(scores: list[Array], arrays: tuple[Array, Array]) -> Any:
            label, factor = arrays
            found = with_nan(tile_statistics(scores, asked, label), size, label)
            return self._losses(found, allowed, factor), found

        if p.reproducible:
            return of_tiles((p,), of_tile, labels, factor)
        found = measure((p,), asked, labels)
        return self._losses(found, allowed, factor), found

    def _losses(self, found: LayerStatistics, allowed: Array, factor: Array) -> Array:
        (lse,), label = found.lse, found.label
        losses = lse - label
        if self.smoothing:
            mean = found.total / allowed.astype(lse.dtype)
            losses = (1 - self.smoothing) * losses + self.smoothing * (lse - mean)
        if self.z_loss:
            losses = losses + self.z_loss * lse**2
        # a token without weight may have the loss NaN
        return factor * jnp.where(factor == 0, 0.0, losses)


def _without_ignored(labels: Any, ignored: int | None) -> tuple[Any, Any]:
    """Labels with 0 in the place of those that are ignored, and which are not."""
    if ignored is None:
        return labels, jnp.ones((), bool)
    checks.check_integer("ignore_index", ignored)
    counts = checks.check_integral("labels", labels) != ignored
    library = np if isinstance(labels, np.ndarray) else jnp
    return library.where(counts, labels, 0), counts


def _factors(counts: Array, weights: Any, dtype: jnp.dtype) -> Array:
    """The weight of each token, 0 for those that are ignored."""
    result = counts.astype(dtype)
    if weights is None:
        return result
    checks.check_floating("weights", weights)
    checks.check_broadcastable("weights", weights, counts.shape, leading=False)
    return result * jnp.broadcast_to(weights, counts.shape).astype(dtype)
