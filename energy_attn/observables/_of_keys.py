"""Weights of keys, their sums, draws of keys, and the divergence of another measure."""

import abc
import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from energy_attn.distributed.internal import (
    Reduction,
    ShardingPlan,
    as_invariant,
    whole_along,
)
from energy_attn.kernels import Operands, Settings
from energy_attn.kernels.internal import (
    batches,
    checks,
    exp_from,
    holds_keys,
    is_static,
    lse_dtype,
    sampling,
)

from ..functional._free_energy import Calls, Parts, StaticCall, energy_at, row_shape, state_at
from . import _divergence
from ._at_source import HashablePartial, run_reduction, sinks_as_keys, sum_over_keys

MOST_WEIGHTS = 64_000_000

# One index, some of them, or a slice; of arrays, one axis.
Selection = int | slice | Sequence[int] | Array | np.ndarray


class AbstractWeights(eqx.Module):
    r"""The weights $P_a = e^{s_a - F}$ of each row over its keys."""

    @abc.abstractmethod
    def _prepared(self) -> tuple[Calls, Parts]:
        """The prepared calls, promoted, with the source of the measure as part of their scores."""

    @abc.abstractmethod
    def _prepared_keys(self) -> tuple[Calls, Parts]:
        """The prepared calls of the keys alone, with their sinks apart."""

    def weights(
        self, *, rows: Selection | None = None, keys: Selection | None = None
    ) -> Float[Array, "*B R N J"]:
        r"""The attention weights of some keys in some rows.

        $$P_{ia} = e^{s_{ia} - F_i}, \qquad i \in \text{rows},\ a \in \text{keys}$$

        The only observable that is a matrix, of $B R N J$ numbers, for interpretability and figures. Rows and keys are
        indices into the arrays, also on a mesh.

        Args:
            rows: indices of queries: an integer, a slice or one axis of integers, negative from the end; None: all.
            keys: indices of keys, of the same kinds; in a union the keys of the first measure come first.

        Returns:
            `[B, R, N, J]` or `[R, N, J]`, float32 or float64; zero for a key that a row does not see. With all keys a
            row sums up to 1, less the weight of a sink. NaN for a traced index that is out of range.

        Raises:
            TypeError: an index that is no integer.
            ValueError: an index out of range, or more than 64 million weights.

        Source: Vaswani et al. (arXiv 1706.03762), equation 1: the softmax.

        Examples:
            >>> import jax
            >>> import energy_attn as ea
            >>> F = ea.FreeEnergy(is_causal=True).at(*jax.random.normal(jax.random.key(0), (3, 5, 2, 4)))
            >>> F.weights(rows=-1, keys=slice(0, 3)).shape  # of the first three keys in the last row
            (1, 2, 3)
            >>> F.weights(rows=0)[0, 0].tolist()  # the first query sees the first key alone
            [1.0, 0.0, 0.0, 0.0, 0.0]
        """
        calls, parts = self._prepared_keys()
        batch, time, heads = parts[0].query.shape[:3]
        total = sum(map(_key_count, calls, parts))
        chosen, index = _indices("rows", rows, time), _indices("keys", keys, total)
        shape = batch, time if chosen is None else len(chosen), heads, len(index)
        if is_static(*shape) and np.prod(shape, dtype=object) > MOST_WEIGHTS:
            raise ValueError(
                f"rows: wanted at most {MOST_WEIGHTS} weights, which are all in memory, got {shape} of "
                "[batch, rows, heads, keys]; choose rows= and keys=, or ask importance(), sample() or "
                "entropy(), which need no matrix"
            )
        calls, parts = sinks_as_keys(calls, parts)
        # [*B, T, N]: of all rows, as a device may have some of them
        lse = lax.stop_gradient(state_at(calls, None, parts).lse)
        if chosen is not None:
            lse = jnp.take(whole_along(lse, lse.ndim - 2), chosen, lse.ndim - 2, mode="fill")
            calls, parts = zip(
                *map(functools.partial(_with_rows, chosen), calls, parts), strict=True
            )
        sizes = list(map(_key_count, calls, parts))
        if keys is None:
            index = jnp.arange(sum(sizes), dtype=jnp.int32)
        result, first = jnp.zeros((), lse.dtype), 0
        for call, operands, size in zip(calls, parts, sizes, strict=True):
            axes = () if call.plan is None else call.plan.sequence
            reduction = Reduction(HashablePartial(sampling.weights_of_keys, (axes,)), "sums")
            at = jnp.broadcast_to(index - first, (*lse.shape, len(index)))
            # the weights of the keys of one part, and zeros for the others
            result = result + run_reduction(call, reduction, None, operands, lse, at)
            first += size
        # energies and the scores of another kernel are rounded: the weights are divided by their own sum
        if keys is None:
            whole = result.sum(-1, keepdims=True)
            result, index = result[..., :total], index[:total]
        else:
            whole = sum_over_keys(calls, None, parts, _weight_sum, 1, lse[..., None])
        result = result / jnp.where(whole == 0, 1.0, whole)
        return jnp.where((index >= 0) & (index < total), result, jnp.nan)

    def importance(
        self, rows: Float[Array, "*B T N"] | None = None, *, grouped: bool = False
    ) -> Float[Array, "*B S heads"]:
        r"""Sums the weights of each key over the rows.

        $$I_a = \sum_i r_i P_{ia} = \frac{\partial}{\partial b_a} \sum_i r_i F_i$$

        for a number $b_a$ that is added to the scores of key $a$. One forward and one backward pass, in memory
        linear in the keys. For eviction from a KV cache, and to find attention sinks.

        Args:
            rows: $r$, `[B, T, N]` or `[T, N]`: a factor for each query and head; None: 1.
            grouped: whether to sum over the heads of queries that share a head of keys.

        Returns:
            `[B, S, N]` or `[S, N]`; `[B, S, K]` or `[S, K]` if `grouped`; float32 or float64. In a union the keys
            of the first measure come first. Over all keys it sums up to the number of rows that see a key,
            less the weights of sinks.

        Raises:
            TypeError: `rows` is not a floating array, or `grouped` no boolean.
            ValueError: `rows` has another shape.

        Source: H2O (arXiv 2306.14048), section 4: heavy hitters are keys of the largest accumulated weight.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> F = ea.FreeEnergy(is_causal=True).at(*jax.random.normal(jax.random.key(0), (3, 5, 2, 4)))
            >>> bool(jnp.allclose(F.importance(), F.weights().sum(0).T, atol=1e-5))
            True
        """
        calls, parts = self._prepared_keys()
        checks.check_flag("grouped", grouped)
        first, shape = parts[0], row_shape(calls[0], parts[0])
        dtype = lse_dtype(first.query.dtype)
        factor = jnp.ones(shape, dtype)
        if rows is not None:
            checks.check_shape("rows", checks.check_floating("rows", rows), shape)
            factor = jnp.asarray(rows, dtype)
        heads = first.query.shape[2]
        # a source along added values: a column for each head of a group, with the derivative of its scores
        group = heads // first.key.shape[2]
        columns = np.broadcast_to(np.tile(np.eye(group), (heads // group, 1)), (*shape, group))
        columns = jnp.asarray(columns, dtype)
        # of the type of the keys inside a `jax.shard_map`; otherwise the derivative would be a sum over devices
        zeros = [lax.full_like(x.key, 0.0, dtype, (*x.key.shape[:3], group)) for x in parts]

        def total(added: list[Array]) -> Array:
            scored = tuple(x._replace(value=y) for x, y in zip(parts, added, strict=True))
            energies = energy_at(calls, columns, scored)
            return (factor * jnp.where(holds_keys(energies), energies, 0.0)).sum()

        result = jnp.concatenate(jax.grad(total)(zeros), 1)
        result = result.sum(-1) if grouped else result.reshape(*result.shape[:2], heads)
        return batches.restored(result, calls[0].axes)

    def sample(self, *, key: PRNGKeyArray, count: int = 1) -> Int[Array, "*B T N count"]:
        r"""Draws keys for each query and head from its attention weights.

        $$a \sim P, \qquad P_a = e^{s_a - F}$$

        One pass over blocks of keys, by XLA's operations: a draw is the key with the largest sum of its score and
        Gumbel noise. The noise depends on `key`, the row, the index of the key and the draw. Draws are therefore
        equal on any mesh, and for a union or its keys in one array, unless two sums are equal up to rounding.
        Draws are independent, with replacement, and have no derivative. The mean of their values converges to
        attention.

        Args:
            key: a `jax.random.key`.
            count: draws for each query and head.

        Returns:
            int32 `[B, T, N, count]`: indices of keys (in a union, the keys of the first measure come first); sinks
            come after all keys, in the same order; -1 for a fully masked row.
            `jnp.take(..., mode="fill", fill_value=0)` reads the value of a sink.

        Raises:
            TypeError: `key` is not a key, or `count` not an integer.
            ValueError: `count` is below 1.

        Source: Maddison, Tarlow and Minka, A* Sampling (arXiv 1411.0030), section 2: the Gumbel-max trick.

        Examples:
            >>> import jax
            >>> import energy_attn as ea
            >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
            >>> drawn = ea.FreeEnergy(is_causal=True).at(q, k, v).sample(key=jax.random.key(1), count=3)
            >>> drawn.shape, drawn[0].tolist()  # the first query sees only the first key
            ((5, 2, 3), [[0, 0, 0], [0, 0, 0]])
        """
        checks.check_integer("count", count, least=1)
        checks.check_key("key", key)
        calls, parts = self._prepared()
        parts = lax.stop_gradient(parts)
        seeds = jax.random.bits(key, row_shape(calls[0], parts[0], 2), jnp.uint32)
        drawn, first = [], 0
        for call, operands in zip(calls, parts, strict=True):
            axes = () if call.plan is None else call.plan.sequence
            find = HashablePartial(_drawn, (count, first, axes))
            reduction = Reduction(find, _fold_draws)
            drawn.append(run_reduction(call, reduction, None, operands, seeds))
            first += operands.key.shape[1]
        return functools.reduce(sampling.merge_draws, drawn).indices

    def kl(self, other: "AbstractWeights") -> Float[Array, "*B T N"]:
        r"""The Kullback-Leibler divergence of another measure over the same keys from this one.

        $$\mathrm{KL}(P \| Q) = \sum_a P_a \log \frac{P_a}{Q_a}
            = \mathbb{E}_P[s_P] - \mathbb{E}_P[s_Q] - F_P + F_Q$$

        the Bregman divergence of $F$ in the scores. The other measure may have other queries and keys, of any
        width and number of key heads, and another scale, score and mask. The divergence is $+\infty$ in a row in which
        this measure sees a key that the other hides. For indexers trained on attention, distillation, and redundant
        heads.

        Two flash passes where scores are products of queries and keys, and both have the same mask (with the same
        arrays). Otherwise the second pass is a walk over blocks of both scores, by XLA's operations.

        Args:
            other: $Q$, a measure of as many rows and keys; a union is compared part by part, a sink with the sink of
                the same part.

        Returns:
            `[B, T, N]` in nats, at least 0; zero in a row that is fully masked in $P$. Its rounding grows
            as $\epsilon \lvert F \rvert$.

        Raises:
            TypeError: `other` is no measure, or its energies have another precision.
            ValueError: the number of its rows, keys or parts differs.

        Source: Bregman, USSR Comput. Math. Math. Phys. 7 (1967); Banerjee et al., JMLR 6 (2005), section 4: the
        divergence of an exponential family is that of its log partition function.

        Examples:
            >>> import jax
            >>> import energy_attn as ea
            >>> q, k, v, u = jax.random.normal(jax.random.key(0), (4, 5, 2, 4))
            >>> P, Q = (ea.FreeEnergy(is_causal=True).at(x, k, v) for x in (q, u))
            >>> P.kl(Q).shape, float(P.kl(P).max()) < 1e-6, bool((P.kl(Q) >= 0).all())
            ((5, 2), True, True)
        """
        return _divergence.kl_divergence(self._crossed(other))

    def cross_entropy(self, other: "AbstractWeights") -> Float[Array, "*B T N"]:
        r"""The cross-entropy of another measure over the same keys under this one.

        $$-\sum_a P_a \log Q_a = F_Q - \mathbb{E}_P[s_Q] = \mathrm{KL}(P \| Q) + H(P)$$

        At the cost of [`kl`][energy_attn.Gibbs.kl], with its arguments, errors and conventions. Returns `[B, T, N]`
        in nats.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> q, k, v, u = jax.random.normal(jax.random.key(0), (4, 5, 2, 4))
            >>> P, Q = (ea.FreeEnergy().at(x, k, v) for x in (q, u))
            >>> bool(jnp.allclose(P.cross_entropy(Q), P.kl(Q) + P.entropy(), atol=1e-5))
            True
        """
        return _divergence.cross_entropy(self._crossed(other))

    def _crossed(self, other: object) -> _divergence.CrossScores:
        if not isinstance(other, AbstractWeights):
            raise TypeError(f"other: wanted a Gibbs, got {checks.received(other)}")
        return _divergence.cross_scores(self._prepared_keys(), other._prepared_keys())


def _weight_sum(scores: Array, value: Array, lse: Array) -> Array:
    del value
    return exp_from(scores, jnp.where(holds_keys(lse), lse, jnp.inf)).sum(-1, keepdims=True)


def _key_count(call: StaticCall, operands: Operands) -> int:
    """Counts the keys of a part on all devices, also inside a `jax.shard_map`."""
    devices = 1 if call.plan is None or not call.plan.local else call.plan.devices
    return operands.key.shape[1] * devices


def _with_rows(chosen: Array, call: StaticCall, operands: Operands) -> tuple[StaticCall, Operands]:
    whole = {
        name: None if (x := getattr(operands, name)) is None else whole_along(x, axis)
        for name, axis in (("query", 1), ("bias", 2), ("mask", 2))
    }
    plan = call.plan
    if plan is not None and not plan.local:
        plan = plan._replace(queries=False)
    operands = sampling.take_rows(call.settings, operands._replace(**whole), chosen)
    return call._replace(plan=plan), operands


def _indices(name: str, selection: object, size: int) -> Any:
    """int32 indices from 0 on, or None for all rows; traced indices are not checked."""
    if selection is None:
        return None if name == "rows" else jnp.arange(size, dtype=jnp.int32)
    if isinstance(selection, slice):
        return jnp.arange(size, dtype=jnp.int32)[selection]
    array: Any = selection if isinstance(selection, jax.core.Tracer) else np.asarray(selection)
    if array.size == 0:
        array = array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim > 1:
        raise TypeError(
            f"{name}: wanted an integer, a slice or integers of one axis, got {checks.received(selection)}"
        )
    array = array.reshape(-1)
    if not isinstance(array, jax.core.Tracer) and not np.all((-size <= array) & (array < size)):
        raise ValueError(f"{name}: wanted indices below {size}, got {checks.received(selection)}")
    array = jnp.asarray(array, jnp.int32)
    return jnp.where(array < 0, array + size, array)


def _drawn(
    count: int,
    first: int,
    axes: tuple[str, ...],
    settings: Settings,
    operands: Operands,
    seeds: Array,
) -> sampling.Draw:
    start = jnp.asarray(first, jnp.int32)
    if axes:  # devices hold equal numbers of keys, in order
        start = start + lax.axis_index(axes).astype(jnp.int32) * operands.key.shape[1]
    return sampling.sample(count, settings, operands, seeds, start)


def _fold_draws(draw: sampling.Draw, axes: tuple[str, ...], plan: ShardingPlan) -> sampling.Draw:
    del plan
    parts: sampling.Draw = jax.tree.map(lambda x: lax.all_gather(x, axes), draw)
    each = (sampling.Draw(*(x[i] for x in parts)) for i in range(lax.axis_size(axes)))
    return as_invariant(functools.reduce(sampling.merge_draws, each), axes)
