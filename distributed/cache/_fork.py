"""A cache whose rows share the tokens of a prompt, which is stored and read once."""

import dataclasses
from typing import Any, Unpack

import equinox as eqx
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from energy_attn.kernels import AttentionState, merge
from energy_attn.kernels.internal import BoundScore, MergedScoreOptions, checks, jaxprs, split_score
from energy_attn.kernels.scores import AbstractScore, ScoreIndices

from ._arguments import check_queries, check_scores
from ._tokens import AbstractTokens
from ._write import repeat_rows


class ForkedCache(eqx.Module):
    r"""A cache whose rows continue prompts that several of them share.

    Made by [`KVCache.fork`][energy_attn.distributed.KVCache.fork]. Attention merges the states of the prompt and
    of a row's own tokens,

    $$F = \log\big(e^{F_{prompt}} + e^{F_{own}}\big), \qquad
      \mathrm{out} = e^{F_{prompt} - F}\, \mathrm{out}_{prompt} + e^{F_{own} - F}\, \mathrm{out}_{own}$$

    The result equals attention over a cache in which every row holds the prompt. The prompt is stored once, and
    read once for all rows that share it: their queries are more queries of one row.

    Every method returns a new cache; `append` is in place where the cache is donated, as for a `KVCache`.

    Attributes:
        prompt: a [`KVCache`][energy_attn.distributed.KVCache] of `R` rows.
        own: a `KVCache` of `B` rows, a multiple of `R`, each of which begins at the position where its
            prompt ends. Rows that share a prompt are consecutive. It may be saved, and loaded, by itself.

    Raises:
        ValueError: a number of rows that is not a multiple of the number of prompts.

    Source: the merge of the states of a shared prefix and a suffix, as in Hydragen (arXiv 2402.05099) and
    Tree Attention (arXiv 2408.04093), section 5.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.distributed import KVCache
        >>> prompt = KVCache.empty(1, 4096, 2, 8, dtype=jnp.float32)
        >>> prompt = prompt.append(jnp.ones((1, 4000, 2, 8)), jnp.ones((1, 4000, 2, 8)))
        >>> cache = prompt.fork(64, capacity=128)
        >>> new = jnp.ones((64, 1, 2, 8))
        >>> cache = cache.append(new, new)
        >>> state = cache.attend(jnp.zeros((64, 1, 4, 8)))
        >>> float(jnp.exp(state.lse[5, 0, 0]).round()), cache.own.key.shape  # of 4,001 tokens
        (4001.0, (64, 128, 2, 8))
    """

    prompt: AbstractTokens
    own: AbstractTokens

    def __check_init__(self) -> None:
        rows, prompts = len(self.own.lengths), len(self.prompt.lengths)
        if rows % prompts:
            raise ValueError(
                f"own: wanted a multiple of the prompt's {prompts} rows, got {rows} rows"
            )

    @property
    def count(self) -> int:
        """Rows per prompt."""
        return len(self.own.lengths) // len(self.prompt.lengths)

    @property
    def capacity(self) -> int:
        """The number of tokens after the prompt for which each row has room."""
        return self.own.capacity

    @property
    def lengths(self) -> Int[Array, " B"]:
        """The number of tokens of each row and its prompt, which is the position of the next token."""
        return self.own.lengths

    def append(
        self,
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K Hv"],
        *,
        lengths: Int[Array, " B"] | None = None,
    ) -> "ForkedCache":
        """The cache with new tokens after the tokens of each row.

        Arguments and errors are those of [`KVCache.append`][energy_attn.distributed.KVCache.append].
        """
        return dataclasses.replace(self, own=self.own.append(key, value, lengths=lengths))

    def _written(self, key: Array, value: Array, counts: Array) -> "ForkedCache":
        """`append` without its checks."""
        return dataclasses.replace(self, own=self.own._written(key, value, counts))

    def evict(
        self,
        count: int | Int[Array, " B"] | None = None,
        *,
        before: int | Int[Array, " B"] | None = None,
    ) -> "ForkedCache":
        """The cache without the oldest of the rows' own tokens; the prompt, which rows share, stays.

        Arguments and errors are those of [`KVCache.evict`][energy_attn.distributed.KVCache.evict].
        """
        return dataclasses.replace(self, own=self.own.evict(count, before=before))

    def reset(self, rows: Bool[Array, " B"] | Int[Array, " n"]) -> "ForkedCache":
        """The cache with some of its rows at the end of their prompts again, for other continuations.

        Arguments and errors are those of [`KVCache.reset`][energy_attn.distributed.KVCache.reset].
        """
        begins = repeat_rows(self.own._sharding(), self.prompt.lengths, self.count)
        return dataclasses.replace(self, own=self.own._reset(rows, begins))

    def attend(
        self,
        query: Float[Array, "B T N H"],
        *,
        source: Float[Array, "B T N Hv"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        query_positions: Int[Array, "..."] | None = None,
        **options: Unpack[MergedScoreOptions],
    ) -> AttentionState:
        """The attention of queries over the tokens of their prompts and their rows' own.

        Arguments, result and errors are those of
        [`KVCache.attend`][energy_attn.distributed.KVCache.attend], but for `mask`. A score that reads
        `at.batch` raises `NotImplementedError`: rows that share a prompt are one row of it.
        """
        policy, options = check_scores(options, None, self.prompt.window)
        own = self.own
        places = check_queries(query, own.key, own.dtype, own.lengths, lengths, query_positions)
        settings: Any = {"policy": policy, "unrounded": True, "options": options}
        own_state = own._state(query, places, source=source, **settings)
        settings["options"] = {**options, "sink": None}  # the state of the row's own tokens has it
        _check_score(options.get("score"), own_state.lse.dtype)
        places = jnp.broadcast_to(jnp.asarray(places), query.shape[:2])
        if source is not None:
            settings["source"] = self._grouped(jnp.asarray(source))
        prompt = self.prompt
        if prompt.parallel is not None and prompt.parallel.queries_sharded is None:
            # queries are replicated, also where there are as many as keys by chance
            whole = dataclasses.replace(prompt.parallel, queries_sharded=False)
            prompt = dataclasses.replace(prompt, parallel=whole)
        query, places = self._grouped(jnp.asarray(query)), self._grouped(places)
        shared = prompt._state(query, places, **settings)
        # F = log(e^{F_prompt} + e^{F_own}), out = e^{F_prompt - F} out_prompt + e^{F_own - F} out_own
        state = merge(AttentionState(*(self._grouped(x, back=True) for x in shared)), own_state)
        return AttentionState(state.out.astype(own.dtype), state.lse)

    # [R * count, T, ...] to [R, count * T, ...]: the tokens of rows that share a prompt become tokens of one row
    def _grouped(self, x: Array, *, back: bool = False) -> Array:
        def local(x: Array) -> Array:
            rows, tokens, *others = x.shape
            if back:
                return x.reshape(rows * self.count, tokens // self.count, *others)
            return x.reshape(rows // self.count, tokens * self.count, *others)

        sharding = self.own._sharding()
        spec = PartitionSpec(*[*sharding.new, None][: x.ndim])
        return sharding.map(local, (spec,), spec, x)


def _check_score(score: AbstractScore | None, dtype: jnp.dtype) -> None:
    """Raises `NotImplementedError` for a score that reads the row of the batch."""
    if score is None:
        return
    structure, arrays = split_score(score)
    assert structure is not None
    bound, zero = BoundScore(structure, arrays), jnp.zeros((1, 1, 1, 1), jnp.int32)
    raw = zero.astype(dtype)
    if jaxprs.reads_first(lambda row: bound(raw, ScoreIndices(row, zero, zero, zero)), zero):
        raise NotImplementedError(
            f"score: wanted one that is the same in all rows, which share a prompt, got {checks.received(score)}"
        )
