"""A cache of lists that a KVCache is compared with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from energy_attn.distributed.cache._cache import KVCache
from tests.support.arrays import array
from tests.support.meshes import parallel_of
from tests.support.problems import Problem

B, K, N, H, V = 3, 2, 4, 3, 5
append = jax.jit(KVCache.append)


def empty(kind="8", capacity=48, block_size=2, rows=B, **options):
    options = {"dtype": jnp.float64, "parallel": parallel_of(kind)} | options
    return KVCache.empty(rows, capacity, K, H, V, block_size=block_size, **options)


def started(key, value, lengths=None, **options):
    """An empty cache with its first tokens, made in one program."""
    lengths = None if lengths is None else array(lengths, jnp.int32)
    return _start(tuple(options.items()))(key, value, lengths)


@functools.cache
def _start(options):
    @jax.jit
    def start(key, value, lengths):
        return empty(**dict(options)).append(key, value, lengths=lengths)

    return start


def tokens(seed, T, dtype=jnp.float64, rows=B):
    """Keys `[rows, T, K, H]` and values of `T` new tokens."""
    rng = np.random.default_rng(seed)
    return tuple(array(rng.standard_normal((rows, T, K, width)), dtype) for width in (H, V))


class Model:
    """What the cache is to hold: for each row, a dictionary from position to key and value."""

    def __init__(self, window_capacity=None, rows=B):
        self.rows, self.lengths = [{} for _ in range(rows)], [0] * rows
        self.ring = window_capacity

    def append(self, key, value, counts):
        for b, count in enumerate(counts):
            for t in range(count):
                n = self.lengths[b]
                self.rows[b][n] = np.asarray(key[b, t]), np.asarray(value[b, t])
                if self.ring:
                    self.rows[b].pop(n - self.ring, None)
                self.lengths[b] += 1

    def evict(self, before):
        for row, first in zip(self.rows, before, strict=True):
            for n in [n for n in row if n < first]:
                del row[n]

    def reset(self, rows):
        for b in rows:
            self.rows[b], self.lengths[b] = {}, 0

    def replace(self, rows, other):
        for b, row, length in zip(rows, other.rows, other.lengths, strict=True):
            self.rows[b], self.lengths[b] = dict(row), length

    def problem(self, query, query_positions, **options):
        """Attention over these tokens as the judge takes it, in the order of positions."""
        S = max(1, *map(len, self.rows))
        rows = len(self.rows)
        key, value = np.zeros((rows, S, K, H)), np.zeros((rows, S, K, V))
        positions = np.full((rows, S), -1)
        for b, row in enumerate(self.rows):
            for s, n in enumerate(sorted(row)):
                positions[b, s] = n
                key[b, s], value[b, s] = row[n]
        return Problem(
            "cache",
            np.asarray(query),
            key,
            value,
            query_positions=np.asarray(query_positions),
            key_positions=positions,
            **options,
        )


def held(cache, *arrays):
    """The same dictionaries, read from the slots; or of other arrays `[B, S, ...]` than keys and values."""
    positions = np.asarray(cache.positions)
    arrays = [np.asarray(x) for x in arrays or (cache.keys(), cache.values())]
    slots = [np.flatnonzero(row >= 0) for row in positions]
    found = [
        {int(positions[b, s]): tuple(x[b, s] for x in arrays) for s in row}
        for b, row in enumerate(slots)
    ]
    assert [len(row) for row in found] == [len(s) for s in slots], "a token in two slots"
    return found


def stored(cache):
    """The bytes of each token as they are stored."""
    rows = held(cache, *(x for x in cache._arrays()[:4] if x is not None))
    return [{n: [x.tobytes() for x in arrays] for n, arrays in row.items()} for row in rows]


def check_held(cache, model):
    found = held(cache)
    assert [sorted(row) for row in found] == [sorted(row) for row in model.rows]
    for mine, theirs in zip(found, model.rows, strict=True):
        for n, pair in mine.items():
            for x, exact in zip(pair, theirs[n], strict=True):
                np.testing.assert_array_equal(x, exact)
    assert cache.lengths.tolist() == model.lengths


def check_balanced(cache):
    """Within one block, of each row on each device; read from where the slots really lie."""
    positions = cache.positions
    loads = [(np.asarray(shard.data) >= 0).sum(1) for shard in positions.addressable_shards]
    assert (np.ptp(loads, axis=0) <= cache.slots.block).all(), loads
