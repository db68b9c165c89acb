"""A drafted tree made by hand over a cache, and the dense problem that it is."""

import jax.numpy as jnp
import numpy as np

from energy_attn.distributed import KVCache
from energy_attn.prefix_tree import PrefixTree, tree_decode
from tests.support.meshes import parallel_of
from tests.support.problems import Problem

B, L, S, K, N, H, V = 3, 7, 11, 2, 4, 3, 5


# A tree with two roots and slots to spare, a path that fills its row, and none at all.
PARENTS = [-1, 0, 0, 1, 1, -1], [-1, 0, 1, 2, 3, 4, 5], []
COUNTS = 11, 0, 4  # of the context: no row reaches all of eight devices, and one none of them


def line(parents, n):
    """A node and its ancestors, nearest first."""
    return [] if n < 0 else [n, *line(parents, parents[n])]


def lines(parents):
    """The same for all slots; those that are not in use see themselves alone."""
    return [line(parents, n) if n < len(parents) else [n] for n in range(L)]


def tree_of(rows=PARENTS) -> PrefixTree:
    """Made by hand, entry by entry; candidates are of no account here."""
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
    """Context and nodes behind one another; what a node sees is an array."""
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
    """The context appended to `cache`, in two parts, and the state of the nodes over it."""
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


def empty(kind, dtype=jnp.float64, capacity=48, **options):
    parallel = None if kind == "1" else parallel_of(kind)
    return KVCache.empty(
        B, capacity, K, H, V, dtype=dtype, block_size=2, parallel=parallel, **options
    )
