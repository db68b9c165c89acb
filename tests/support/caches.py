"""Model of a KVCache in Python's dictionaries, drafted trees over a cache, and ways that eight bits are read."""

import functools
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from energy_attn.distributed import KVCache
from energy_attn.kernels import internal
from energy_attn.kernels.call import _kernel
from energy_attn.prefix_tree import PrefixTree, tree_decode
from tests.support.arrays import array
from tests.support.meshes import parallel_of
from tests.support.problems import Problem

B, K, N, H, V = 3, 2, 4, 3, 5
append = jax.jit(KVCache.append)


def empty(kind="8", capacity=48, block_size=2, rows=B, **options):
    parallel = None if kind == "1" else parallel_of(kind)
    options = {"dtype": jnp.float64, "parallel": parallel} | options
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
    """Tokens that a cache is to hold: for each row, a dictionary from position to key and value."""

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
        """Attention over these tokens as a problem, in the order of positions."""
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
    """Reads a model's dictionaries from the slots of a cache: of keys and values, or of other arrays `[B, S, ...]`."""
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
    """Checks that devices hold equally many tokens of each row, within one block, by where the slots really lie."""
    positions = cache.positions
    loads = [(np.asarray(shard.data) >= 0).sum(1) for shard in positions.addressable_shards]
    assert (np.ptp(loads, axis=0) <= cache.slots.block).all(), loads


L, S = 7, 11  # slots of the tree, and of the context


# A tree with two roots and slots to spare, a path that fills its row, and none at all.
PARENTS = [-1, 0, 0, 1, 1, -1], [-1, 0, 1, 2, 3, 4, 5], []
COUNTS = 11, 0, 4  # of the context: no row reaches all of eight devices, and one none of them


def line(parents, n):
    """A node and its ancestors, nearest first."""
    return [] if n < 0 else [n, *line(parents, parents[n])]


def lines(parents):
    """The `line` of each slot; an unused slot sees itself alone."""
    return [line(parents, n) if n < len(parents) else [n] for n in range(L)]


def tree_of(rows=PARENTS) -> PrefixTree:
    """A PrefixTree made entry by entry, without its candidates."""
    mask = np.zeros((len(rows), L, L), bool)
    depth, parent = np.zeros((2, len(rows), L), np.int32)
    for b, parents in enumerate(rows):
        parent[b] = [*parents, *[-1] * (L - len(parents))]
        for n, seen in enumerate(lines(parents)):
            mask[b, n, seen], depth[b, n] = True, len(seen) - 1
    none = np.full((len(rows), 1, 1), -1, np.int32)
    size = np.asarray([len(parents) for parents in rows], np.int32)
    return PrefixTree(*map(jnp.asarray, (0 * depth, mask, depth, parent, none, size)))


def problem_of(name="tree", counts=COUNTS, rows=PARENTS, window=None, S=S, **options) -> Problem:
    """Attention over a context and the nodes behind it, by an array mask."""
    rng = np.random.default_rng(len(name))
    B = len(rows)
    mask = np.zeros((B, 1, L, S + L), bool)
    for b, parents in enumerate(rows):
        for n, seen in enumerate(lines(parents)):
            position = counts[b] + len(seen) - 1
            near = [a for i, a in enumerate(seen) if window is None or i <= window]
            mask[b, 0, n, [S + a for a in near]] = True
            first = 0 if window is None else max(0, position - window)
            if n < len(parents):
                mask[b, 0, n, first : counts[b]] = True
    shapes = {"query": (L, N, H), "key": (S + L, K, H), "value": (S + L, K, V), "source": (L, N, V)}
    arrays = {name: rng.standard_normal((B, *shape)) for name, shape in shapes.items()}
    return Problem(name, **arrays, mask=mask, scale=0.7, **options)


def decoded(cache, arrays, counts, **options):
    """The state of a tree's nodes over a context, which is appended to `cache` in two parts."""
    split = {name: (x[:, :-L], x[:, -L:]) for name, x in arrays.items() if name in ("key", "value")}
    (old_key, key), (old_value, value) = split["key"], split["value"]
    half = old_key.shape[1] // 2
    first = jnp.minimum(counts, half)
    cache = cache.append(old_key[:, :half], old_value[:, :half], lengths=first)
    # what each row gets second follows what it got first
    at = first[:, None] + jnp.arange(old_key.shape[1] - half, dtype=jnp.int32)[None]
    later = (
        jnp.take_along_axis(x, at[:, :, None, None], axis=1, mode="clip")
        for x in (old_key, old_value)
    )
    cache = cache.append(*later, lengths=counts - first)
    source = arrays.get("source")
    options = {"scale": 0.7, "source": source, **options}
    return tree_decode(arrays["query"], key, value, tree=tree_of(), cache=cache, **options)


def read_as_stored(monkeypatch) -> Iterator[list]:
    """Makes calls read eight bits as TPUs do, for a fixture; yields the list of operands that they read."""
    given = []

    def branch(operands, *, tpu, default):
        given.append(operands)
        return tpu(operands)

    with monkeypatch.context() as patch:
        patch.setattr(internal.derivatives, "lax", types.SimpleNamespace(platform_dependent=branch))
        internal.attend.clear_cache()  # calls traced with the other branch, and then with this one
        yield given
    internal.attend.clear_cache()


def read_by_kernels(monkeypatch) -> Iterator[None]:
    """Raises where a kernel gets dequantized keys and values, for a fixture."""

    def fail(operands):
        raise AssertionError(f"dequantized keys of {operands.key.shape}")

    jax.clear_caches()  # of programs that dequantize
    with monkeypatch.context() as patch:
        patch.setattr(_kernel, "dequantized", fail)
        yield
