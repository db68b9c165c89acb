"""Tokens in the slots of a cache, and the operations that change which ones it holds."""

import dataclasses
from typing import Any, NoReturn, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, Shaped

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    LEAF,
    CallPolicy,
    MergedScoreOptions,
    Scales,
    arguments,
    autodiff,
    checks,
    dequantize,
)
from energy_attn.kernels.masks import AbstractMask

from ..methods._parallel import SequenceParallel, sharding_plan
from ..methods._sharded import attend_sharded
from ._arguments import (
    check_counts,
    check_importance,
    check_indices,
    check_rows,
    check_stored,
    check_whole,
)
from ._layout import CacheArrays, CacheSharding, Slots, cache_sharding
from ._write import append as write_tokens
from ._write import empty_rows, fitting, keep_important, positions, replace_rows

Tokens = TypeVar("Tokens", bound="AbstractTokens")

_LEVELS = 127  # of 8 bits


class AbstractTokens(eqx.Module):
    """The slots of a cache and the tokens in them; a [`KVCache`][energy_attn.distributed.KVCache] reads them, too."""

    key: Shaped[Array, "B S K H"]
    value: Shaped[Array, "B S K Hv"]
    key_scale: Float[Array, "B S K"] | None
    value_scale: Float[Array, "B S K"] | None
    starts: Int[Array, " B"]
    lengths: Int[Array, " B"]
    slots: Slots = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    dtype: jnp.dtype = eqx.field(static=True)
    parallel: SequenceParallel | None = eqx.field(static=True)

    @property
    def capacity(self) -> int:
        """The number of tokens that each row has room for."""
        return self.slots.capacity

    @property
    def positions(self) -> Int[Array, "B S"]:
        """The token in each slot, `[B, capacity]` int32; -1 in empty slots.

        For `key_positions=` of [`attention`][energy_attn.attention] and other functions. Raises
        `ValueError` as `append` does for the mesh.
        """
        return positions(self._sharding(), self.slots, self.starts, self.lengths)

    def keys(self) -> Float[Array, "B S K H"]:
        """The keys of all slots, in `dtype`."""
        return dequantize(self.key, self.key_scale, self.dtype)

    def values(self) -> Float[Array, "B S K Hv"]:
        """The values of all slots, in `dtype`."""
        return dequantize(self.value, self.value_scale, self.dtype)

    def append(
        self: Tokens,
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K Hv"],
        *,
        lengths: Int[Array, " B"] | None = None,
    ) -> Tokens:
        """The cache with new tokens after the tokens of each row.

        Each device writes its own tokens, without communication. Rows may have different lengths.
        Differentiable from what is read to what was appended.

        Args:
            key: `[B, T, K, H]` in the cache's `dtype`, equal on all devices that share a row.
            value: `[B, T, K, Hv]`.
            lengths: `[B]`, the number of tokens of each row that are present, 0 to `T`, in front; None
                means `T`.

        Raises:
            TypeError: no array, or of another dtype.
            ValueError: shapes that do not fit the cache; more tokens at once than it has room for
                in addition to its window; another number of devices than it was made for, or no mesh.
            RuntimeError: (Equinox's, when it runs, on CPUs and outside of `jax.jit`) a row has no room
                for its tokens; nothing is written. In programs for GPUs and TPUs, where each step would wait
                for the host, in programs of `jax.export`, and with `EQX_ON_ERROR=off`, the newest token of
                such a row becomes NaN instead, and so do all later results for the row.
        """
        self._check_new(key, value)
        # a ring buffer must not overwrite tokens in the window of the new ones
        tokens, room = key.shape[1], self.capacity - (self.window or 0)
        if not 1 <= tokens <= room:
            raise ValueError(
                f"key: wanted 1 to {room} new tokens, for which the cache has room besides its "
                f"window, got {checks.received(key)}"
            )
        counts = check_counts(lengths, len(self.lengths), tokens)
        return self._written(key, value, self._fitting(counts, tokens))

    def _check_new(self, key: Array, value: Array, tokens: int | str = "T") -> None:
        for name, x, stored in (("key", key, self.key), ("value", value, self.value)):
            check_stored(name, x, self.dtype)
            checks.check_shape(name, x, (len(self.lengths), tokens, *stored.shape[2:]))
        checks.check_shape("value", value, (*key.shape[:2], *self.value.shape[2:]))

    def _fitting(self, counts: Array, tokens: int) -> Array:
        starts = None if self.window is not None else self.starts
        return fitting(self._sharding(), self.capacity, starts, self.lengths, counts, tokens)

    def _written(self: Tokens, key: Array, value: Array, counts: Array) -> Tokens:
        """`append` without its checks."""
        new = jnp.asarray(key), jnp.asarray(value), None, None
        if self.key_scale is not None:  # int8
            (key, key_scale), (value, value_scale) = map(quantize, new[:2])
            new = key, value, key_scale, value_scale
        layout = self._sharding(), self.slots, self.window is not None
        return self._with(write_tokens(*layout, self._arrays(), new, counts))

    def evict(
        self: Tokens,
        count: int | Int[Array, " B"] | None = None,
        *,
        before: int | Int[Array, " B"] | None = None,
        importance: Float[Array, "..."] | None = None,
    ) -> Tokens:
        """The cache without some of its tokens, whose slots become free: the oldest, or the least important.

        Without `importance` no data moves. With it the remaining tokens move, in order, to the slots of the
        newest ones, and take their `positions`: later queries see them all, and rotary embeddings of keys stay.
        Each device gathers the slots of all devices for a moment. Of equally important tokens the newer one stays.

        Args:
            count: the number of tokens of each row to evict, for all rows or `[B]`; all if there are fewer.
            before: in place of `count`, the position before which tokens are evicted, for all rows or `[B]`.
            importance: a number for each slot, `[B, capacity]`, or for each head, `[B, capacity, K]`, such as the
                [`importance`][energy_attn.Gibbs.importance] for the queries so far; infinity for tokens that have
                to stay.

        Raises:
            TypeError: no integers; `importance` is no floating array.
            ValueError: both of `count` and `before` or none, negative numbers, or another number of rows; an
                `importance` of another shape, with `before`, or for a cache with a window, whose positions count.

        Source: of the importance, H2O (arXiv 2306.14048).

        Examples:
            >>> import jax.numpy as jnp
            >>> from energy_attn.distributed import KVCache
            >>> cache = KVCache.empty(1, 4, 1, 1, dtype=jnp.float32, block_size=4)
            >>> cache = cache.append(*[jnp.arange(4.0).reshape(1, 4, 1, 1)] * 2)
            >>> kept = cache.evict(2, importance=jnp.array([[0.9, 0.1, 0.2, 0.8]]))
            >>> kept.keys()[kept.positions >= 0].ravel().tolist(), kept.lengths.tolist()
            ([0.0, 3.0], [4])
        """
        if (count is None) == (before is None):
            raise ValueError(
                f"count: wanted either count or before, got {checks.received(count)} and {checks.received(before)}"
            )
        rows = len(self.lengths)
        if count is None:
            first = check_whole("before", before, rows)
        else:
            stored = self.lengths - self.starts
            first = self.starts + jnp.minimum(check_whole("count", count, rows), stored)
        starts = jnp.clip(first, self.starts, self.lengths)
        # without importance the oldest tokens go: their slots are empty once they are before `starts`
        if importance is None:
            return dataclasses.replace(self, starts=starts)
        if before is not None or self.window is not None:
            raise ValueError(
                "importance: wanted None with before and in a cache with a window, "
                f"got {checks.received(importance)}"
            )
        numbers = check_importance(importance, self.key)
        kept = keep_important(self._sharding(), self.slots, self._arrays(), starts, numbers)
        return self._with(kept)

    def reset(self: Tokens, rows: Bool[Array, " B"] | Int[Array, " n"]) -> Tokens:
        """The cache with some of its rows empty, which begin at position 0 again.

        No data moves, nothing is sent between devices, and nothing is compiled again.

        Args:
            rows: True for each row to empty, `[B]`; or indices of rows, `[n]`. An index out of range is
                dropped where it is traced.

        Raises:
            TypeError: neither booleans nor integers.
            ValueError: booleans of another number of rows; an index that is known to be out of range.

        Examples:
            >>> import jax.numpy as jnp
            >>> from energy_attn.distributed import KVCache
            >>> cache = KVCache.empty(3, 64, 2, 8, dtype=jnp.float32)
            >>> cache = cache.append(jnp.ones((3, 5, 2, 8)), jnp.ones((3, 5, 2, 8)))
            >>> cache.reset(jnp.array([1])).lengths.tolist()
            [5, 0, 5]
        """
        return self._reset(rows, jnp.zeros_like(self.lengths))

    def _reset(self: Tokens, rows: Array, begins: Array) -> Tokens:
        emptied = check_rows("rows", rows, len(self.lengths))
        starts, lengths = empty_rows(self._sharding(), emptied, begins, self.starts, self.lengths)
        return dataclasses.replace(self, starts=starts, lengths=lengths)

    def replace(self: Tokens, rows: Int[Array, " n"], other: Tokens) -> Tokens:
        """The cache with some of its rows replaced by the rows of another cache.

        For a prompt in a cache of one row that joins a batch which is being decoded. It is in place
        inside `jax.jit` with the cache donated. Each device copies its own slots, so that nothing is sent
        along the sequence. Differentiable in both caches.

        Args:
            rows: `[n]`, the rows to replace. A traced index that is out of range is dropped with its row of
                `other`; of traced indices that repeat, the last counts.
            other: a cache of `n` rows, with the same slots over the same mesh axes, window, dtype, heads,
                widths and quantization. Its rows may be sharded in another way, or replicated.

        Raises:
            TypeError: `rows` are no integers; `other` is no cache, or one of another dtype or quantization.
            ValueError: indices that are known to be out of range, or to repeat; a cache of another number
                of rows, or other slots, window, heads or widths.

        Examples:
            >>> import jax.numpy as jnp
            >>> from energy_attn.distributed import KVCache
            >>> batch, prompt = (KVCache.empty(n, 64, 2, 8, dtype=jnp.float32) for n in (3, 1))
            >>> prompt = prompt.append(jnp.ones((1, 5, 2, 8)), jnp.ones((1, 5, 2, 8)))
            >>> batch.replace(jnp.array([2]), prompt).lengths.tolist()
            [0, 0, 5]
        """
        if not isinstance(other, AbstractTokens):
            raise TypeError(f"other: wanted a KVCache, got {checks.received(other)}")
        traits = other._traits()
        for name, x in self._traits().items():
            if x != traits[name]:
                error = TypeError if "dtype" in name else ValueError
                raise error(f"other: wanted the {name} of the cache, {x}, got {traits[name]}")
        indices = check_indices("rows", rows, len(self.lengths), unique=True)
        if len(indices) != len(other.lengths):
            raise ValueError(
                f"other: wanted a cache of {len(indices)} rows, one for each of rows, got {len(other.lengths)}"
            )
        return self._with(replace_rows(self._sharding(), self._arrays(), other._arrays(), indices))

    def _state(
        self,
        query: Array,
        positions: Array,
        policy: CallPolicy,
        options: MergedScoreOptions,
        *,
        source: Any = None,
        mask: Array | AbstractMask | None = None,
        unrounded: bool = False,
    ) -> AttentionState:
        scored: Any = {"query_positions": positions, "key_positions": self.positions, **options}
        stored, scales = (self.key, self.value), Scales(self.key_scale, self.value_scale)
        call = arguments.check_call(query, *stored, source, None, mask, scales, **scored)
        plan = sharding_plan(self.parallel, *call.operands.qkv)
        settings = call.settings.needing(unrounded=unrounded)
        return attend_sharded(plan, policy.laid_out(self._run_length), settings, call.operands)

    @property
    def _run_length(self) -> int | None:
        """The number of consecutive tokens in consecutive slots; None if there is no such number."""
        if self.window is not None:  # slots of a ring buffer hold tokens of two laps
            return None
        capacity, block, devices = self.slots
        # on one device, token n is in slot n
        return block if devices > 1 else max(LEAF, 1 << (capacity - 1).bit_length())

    def _sharding(self) -> CacheSharding:
        return cache_sharding(self.parallel, self.key, self.slots.devices)

    def _arrays(self) -> CacheArrays:
        return CacheArrays(*(getattr(self, name) for name in CacheArrays._fields))

    def _with(self: Tokens, arrays: CacheArrays) -> Tokens:
        return dataclasses.replace(self, **arrays._asdict())

    def _traits(self) -> dict[str, object]:
        """The properties that caches have in common if one replaces rows of the other."""
        return {
            "slots": self.slots,
            "mesh axes along the sequence": self._sharding().sequence,
            "window": self.window,
            "dtype": self.dtype,
            "stored dtype": self.key.dtype,
            "heads and width of key": self.key.shape[2:],
            "heads and width of value": self.value.shape[2:],
        }


def quantize(
    x: Float[Array, "*batch width"],
) -> tuple[Int8[Array, "*batch width"], Float[Array, "*batch"]]:
    r"""Rounds every vector to multiples of 1/127 of its largest entry.

    $$s = \max_h |x_h| / 127, \qquad |x_h - s\, q_h| \le s / 2 = \max_h |x_h| / 254$$

    up to the rounding of float32. A vector with a NaN or an infinity is read back as NaN. A derivative raises
    `TypeError`.
    """
    return autodiff.function_call(_Quantize(), x)


@dataclasses.dataclass(frozen=True)
class _Quantize(autodiff.AbstractFunction):
    def apply(self, args: Array) -> tuple[Array, Array]:
        # s = max |x| / 127 and q = round(x / s); a vector of zeros has the scale 0
        x = args.astype(jnp.float32)
        scale = jnp.abs(x).max(-1) / _LEVELS
        steps = jnp.round(x / jnp.where(scale > 0, scale, 1.0)[..., None])
        return jnp.clip(steps, -_LEVELS, _LEVELS).astype(jnp.int8), scale

    def jvp(self, primals: Array, tangents: Array) -> NoReturn:
        raise TypeError(
            "quantize: wanted a cache that stores floating numbers where it is differentiated, got "
            "'int8', whose rounding has no derivative; stop the gradient or use quantize=None"
        )
