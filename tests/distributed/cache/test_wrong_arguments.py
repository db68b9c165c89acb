"""Wrong arguments of a cache's methods: errors that name the argument, what was wanted and what came."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn import scores
from energy_attn.distributed import ForkedCache, KVCache
from tests.support.caches import B, H, K, N, V, empty, tokens
from tests.support.meshes import mesh_of, parallel_of

COUNT = 2  # of rows that share a prompt
NEW = np.zeros((B, 2, K, H)), np.zeros((B, 2, K, V))
QUERY = np.zeros((COUNT * B, 1, N, H))
ROWS = np.array([0, 2])
SAME = {"dtype": jnp.float64, "window": 10, "block_size": 2, "parallel": parallel_of("8")}
new_tokens = functools.partial(tokens, rows=COUNT * B)


def other(rows=2, **options):
    """Another cache, whose rows take the place of some."""
    return empty(**({"window": 10, "rows": rows} | options))


def by_row(score, at):
    return score * (1 + at.batch).astype(score.dtype)


CACHE = {
    "capacity: wanted at least 1, got 0": lambda c: empty(capacity=0),
    "width: wanted an integer, got float 1.5": lambda c: KVCache.empty(1, 8, 1, 1.5),
    "dtype: wanted float16": lambda c: empty(dtype=jnp.int32),
    "quantize: wanted None or 'int8', got str 'int4'": lambda c: empty(quantize="int4"),
    "window: wanted less than the capacity, 48": lambda c: empty(window=48),
    "window: wanted at least 0, got -1": lambda c: empty(window=-1),
    "parallel: wanted a SequenceParallel or None": lambda c: empty(parallel="device"),
    "block_size: wanted at least 1": lambda c: empty(block_size=0),
    "key: wanted a JAX or NumPy array, got list": lambda c: c.append([1.0], NEW[1]),
    "key: wanted the dtype of the cache, float64, got": lambda c: c.append(
        np.float32(NEW[0]), NEW[1]
    ),
    "key: wanted shape (3, T, 2, 3), got float64[3,2,2,5]": lambda c: c.append(NEW[1], NEW[1]),
    "value: wanted shape (3, 2, 2, 5), got": lambda c: c.append(NEW[0], NEW[1][:, :1]),
    "key: wanted 1 to 38 new tokens": lambda c: c.append(*(np.repeat(x, 20, 1) for x in NEW)),
    "lengths: wanted 0 to 2, got [0, 3": lambda c: c.append(*NEW, lengths=jnp.asarray([0, 3, 1])),
    "lengths: wanted no negative": lambda c: c.append(*NEW, lengths=jnp.asarray([0, -1, 1])),
    "lengths: wanted shape (3)": lambda c: c.append(*NEW, lengths=jnp.asarray([1, 1])),
    "lengths: wanted an integer array": lambda c: c.append(*NEW, lengths=jnp.ones(B)),
    "count: wanted either count or before": lambda c: c.evict(),
    "count: wanted at least 0": lambda c: c.evict(-1),
    "before: wanted an integer array": lambda c: c.evict(before=jnp.ones(B)),
    "query: wanted the dtype of the cache": lambda c: c.attend(QUERY[:B].astype(np.float32)),
    "query: wanted shape (3, T, N, 3)": lambda c: c.attend(QUERY[:2]),
    "lengths: wanted None with query_positions": lambda c: c.attend(
        QUERY[:B], lengths=jnp.ones(B, int), query_positions=jnp.zeros((1, 1), int)
    ),
    "local_window_size: wanted at most the cache's": lambda c: c.attend(
        QUERY[:B], local_window_size=11
    ),
    "key_value_seq_lengths: wanted one of": lambda c: c.attend(
        QUERY[:B], key_value_seq_lengths=QUERY
    ),
    "path: wanted the path of a folder": lambda c: c.save(3),
    "importance: wanted shape (3, 48)": lambda c: empty().evict(1, importance=np.zeros((B, 3))),
    "importance: wanted a float16": lambda c: empty().evict(1, importance=np.zeros((B, 48), int)),
    "importance: wanted None with before and in a cache with a window": lambda c: c.evict(
        1, importance=np.zeros((B, 48))
    ),
    "importance: wanted None with before": lambda c: empty().evict(
        before=1, importance=np.zeros((B, 48))
    ),
}
REPLACED = {
    "rows: wanted a JAX or NumPy array, got list [0]": lambda c: c.reset([0]),
    "rows: wanted an integer array": lambda c: c.reset(jnp.ones(2)),
    "rows: wanted shape (3), got bool[2]": lambda c: c.reset(jnp.ones(2, bool)),
    "rows: wanted shape (n)": lambda c: c.reset(jnp.asarray(1)),
    "rows: wanted rows from 0 to 2, got [0, 3]": lambda c: c.reset(jnp.asarray([0, 3])),
    "rows: wanted rows from 0 to 2, got [-1]": lambda c: c.reset(np.asarray([-1])),
    "rows: wanted rows from 0 to 2, got [4294967296, 1]": lambda c: c.replace(
        jnp.asarray([2**32, 1]), other()
    ),
    "rows: wanted an integer array, got bool[3]": lambda c: c.replace(jnp.ones(3, bool), other()),
    "rows: wanted different rows, got [1, 1]": lambda c: c.replace(jnp.asarray([1, 1]), other()),
    "other: wanted a KVCache, got NoneType None": lambda c: c.replace(ROWS, None),
    "other: wanted a cache of 2 rows, one for each of rows, got 1": lambda c: c.replace(
        ROWS, other(rows=1)
    ),
    "other: wanted the slots of the cache, Slots(capacity=48, block=2, devices=8), got "
    "Slots(capacity=64, block=2": lambda c: c.replace(ROWS, other(capacity=64)),
    "other: wanted the slots of the cache, Slots(capacity=48, block=2, devices=8), got "
    "Slots(capacity=48, block=2, devices=1": lambda c: c.replace(ROWS, other(parallel=None)),
    "other: wanted the window of the cache, 10, got None": lambda c: c.replace(
        ROWS, other(window=None)
    ),
    "other: wanted the dtype of the cache, float64, got float32": lambda c: c.replace(
        ROWS, other(dtype=jnp.float32)
    ),
    "other: wanted the stored dtype of the cache, float64, got int8": lambda c: c.replace(
        ROWS, other(quantize="int8")
    ),
    "other: wanted the heads and width of key of the cache, (2, 3), got (2, 5)": lambda c: (
        c.replace(ROWS, KVCache.empty(2, 48, K, V, V, **SAME))
    ),
    "other: wanted the heads and width of value of the cache, (2, 5), got (2, 3)": lambda c: (
        c.replace(ROWS, KVCache.empty(2, 48, K, H, H, **SAME))
    ),
}
FORKED = {
    "count: wanted at least 1, got 0": lambda c: c.prompt.fork(0, capacity=8),
    "count: wanted an integer, got float 2.0": lambda c: c.prompt.fork(2.0, capacity=8),
    "capacity: wanted at least 1, got 0": lambda c: c.prompt.fork(2, capacity=0),
    "block_size: wanted at least 1": lambda c: c.prompt.fork(2, capacity=8, block_size=0),
    "own: wanted a multiple of the prompt's 6 rows, got 3 rows": lambda c: ForkedCache(
        c.own, c.prompt
    ),
    "key: wanted shape (6, T, 2, 3)": lambda c: c.append(*tokens(0, 1)),
    "key: wanted 1 to 8 new tokens": lambda c: c.append(*new_tokens(0, 9)),
    "rows: wanted rows from 0 to 5, got [6]": lambda c: c.reset(np.array([6])),
    "count: wanted either count or before": lambda c: c.evict(),
    "query: wanted shape (6, T, N, 3)": lambda c: c.attend(QUERY[:3]),
    "sink: wanted a score for each head": lambda c: c.attend(QUERY, sink=np.zeros(3)),
    "source: wanted shape (6, 1, 4, 5)": lambda c: c.attend(QUERY, source=QUERY),
    "local_window_size: wanted at most the cache's window, 10": lambda c: c.attend(
        QUERY, local_window_size=11
    ),
    "mask: wanted one of": lambda c: c.attend(QUERY, mask=None),
    "score: wanted one that is the same in all rows": lambda c: c.attend(
        QUERY, score=scores.Function(by_row)
    ),
}


@pytest.mark.parametrize("message", [*CACHE, *REPLACED])
def test_cache(message, unchecked):
    """An error that does not name the argument, what came and what was wanted."""
    with jax.set_mesh(mesh_of("8")):
        cache = empty(window=10)
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            (CACHE | REPLACED)[message](cache)


@pytest.mark.parametrize("message", FORKED)
def test_fork(message, unchecked):
    """The same of rows that share a prompt; a score of a row that is several."""
    with jax.set_mesh(mesh_of("8")):
        cache = empty(window=10).fork(COUNT, capacity=8)
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=re.escape(message)):
            FORKED[message](cache)
