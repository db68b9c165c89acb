"""`KVCache.reset` and `KVCache.replace`: rows that begin again, and rows of another cache, on every mesh.

The judge is a Python list of tokens per row, and dense attention over them in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import KVCache, SequenceParallel, collectives, make_mesh
from tests.support.arrays import array
from tests.support.caches import (
    B,
    H,
    K,
    Model,
    N,
    V,
    append,
    check_balanced,
    check_held,
    empty,
    started,
    stored,
    tokens,
)
from tests.support.compare import close
from tests.support.meshes import mesh_of, parallel_of
from tests.support.reference import dense
from tests.support.selection import few, few_rows

KINDS = ["8", "2x4", "2x4 explicit", "8 explicit"]
reset = jax.jit(KVCache.reset, donate_argnums=0)
replace = jax.jit(KVCache.replace, donate_argnums=0)


@pytest.mark.parametrize(
    ("kind", "window"), few_rows([("2x4 explicit", 9), ("8", None), ("8", 9), ("2x4", None)])
)
def test_a_row_that_serves_again(kind, window):
    """A token of an old row that is seen by a new one, or a row that is not replaced; a step compiled again.

    In each turn a row ends, is emptied or replaced by a prompt that was read elsewhere, and all go on.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, query, key, value):
        cache = cache.append(key, value)
        return cache, cache.attend(query)

    ring, rng = 16 if window else None, np.random.default_rng(0)
    model = Model(ring)
    with jax.set_mesh(mesh_of(kind)):
        cache = empty(kind, capacity=16, window=window, block_size=1)
        prompt = empty(kind, capacity=16, window=window, block_size=1, rows=1)
        for i in range(9):
            query, new = rng.standard_normal((B, 1, N, H)), tokens(i, 1)
            cache, state = step(cache, query, *new)
            model.append(*new, [1] * B)
            last = [[n - 1] for n in model.lengths]
            close(tuple(state), dense(model.problem(query, last, is_causal=True)), f"turn {i}")
            oldest = [max(0, n - 3) for n in model.lengths]
            cache = cache.evict(before=jnp.asarray(oldest, jnp.int32))
            model.evict(oldest)
            gone = i % B
            if i % 2:
                cache = reset(cache, jnp.asarray([gone]))
                model.reset([gone])
                continue
            given = [x[:1] for x in tokens(20 + i, 5)]
            other, read = append(prompt, *given), Model(ring, rows=1)
            read.append(*given, [5])
            cache = replace(cache, jnp.asarray([gone]), other)
            model.replace([gone], read)
            check_held(other, read)  # which stays as it is
        check_held(cache, model)
        check_balanced(cache)
    assert step._cache_size() == 1


@pytest.mark.parametrize("explicit", few([True, False], True))
@pytest.mark.parametrize("quantized", few([None, "int8"], "int8"))
def test_rows_and_heads_over_other_axes(explicit, quantized):
    """A row written on devices that have other rows; keys sent along the sequence; a copy of the cache."""
    mesh = make_mesh((2, 2, 2), ("data", "device", "head"), explicit=explicit)
    parallel = SequenceParallel("device", batch="data", heads="head")
    rows, options = 4, {"dtype": jnp.float32, "quantize": quantized, "block_size": 2}
    rng = np.random.default_rng(0)
    new = [array(rng.standard_normal((rows, 5, K, w)), jnp.float32) for w in (H, V)]
    given = [array(rng.standard_normal((3, 7, K, w)), jnp.float32) for w in (H, V)]
    with jax.set_mesh(mesh):
        cache = KVCache.empty(rows, 16, K, H, V, parallel=parallel, **options).append(*new)
        # as many rows as the batch's devices cannot share, which so lie on all of them
        alone = SequenceParallel("device", heads="head")
        other = KVCache.empty(3, 16, K, H, V, parallel=alone, **options).append(*given)
        other = other.evict(jnp.asarray([2, 0, 1]))
        before, theirs = stored(cache), stored(other)
        indices = jnp.asarray([3, 7, 1], jnp.int32)  # traced, one is out of range
        program = jax.jit(KVCache.replace, donate_argnums=0).lower(cache, indices, other).compile()
        assert not collectives(program)
        shard = cache.key.nbytes // 8
        assert program.memory_analysis().alias_size_in_bytes >= 2 * shard
        shardings = [x.sharding for x in jax.tree.leaves(cache)]
        cache = program(cache, indices, other)
        assert stored(cache) == [before[0], theirs[2], before[2], theirs[0]]
        assert cache.lengths.tolist() == [5, 7, 5, 7] and cache.starts.tolist() == [0, 1, 0, 2]
        chosen = jax.device_put(np.array([False, True, True, False]), NamedSharding(mesh, P()))
        program = jax.jit(KVCache.reset, donate_argnums=0).lower(cache, chosen).compile()
        assert not collectives(program)
        cache = program(cache, chosen)
        assert [x.sharding for x in jax.tree.leaves(cache)] == shardings
        assert stored(cache) == [before[0], {}, {}, theirs[0]]


@pytest.mark.parametrize("dtype", few(["bfloat16", "float32"], "bfloat16"))
def test_in_place(dtype):
    """A replaced row that costs a copy of the cache."""
    with jax.set_mesh(mesh_of("8")):
        options = {"dtype": dtype, "parallel": parallel_of("8")}
        cache, other = (KVCache.empty(n, 4096, 2, 64, **options) for n in (8, 1))
        program = replace.lower(cache, jnp.asarray([3]), other).compile()
        emptied = reset.lower(cache, jnp.asarray([3])).compile()
    shard = cache.key.nbytes // 8
    for compiled in (program, emptied):
        memory = compiled.memory_analysis()
        assert not collectives(compiled)
        assert memory.alias_size_in_bytes >= 2 * shard
        assert memory.temp_size_in_bytes < shard / 4


@pytest.mark.parametrize("kind", few(["2x4 explicit", "8", None], None))
def test_derivatives(kind):
    """A gradient of tokens that are gone, or one lost on the way from another cache."""
    parallel = kind and parallel_of(kind)
    first, second = tokens(0, 4), [x[:2] for x in tokens(1, 4)]
    along = [array(np.random.default_rng(2).standard_normal((B, 16, K, w))) for w in (H, V)]

    def read(first, second, rows):
        cache = empty(capacity=16, parallel=parallel).append(*first)
        other = empty(capacity=16, parallel=parallel, rows=2).append(*second)
        cache = cache.replace(rows, other)
        return cache.keys(), cache.values(), cache.positions

    @jax.jit
    def run(first, second, rows):
        def total(first, second):
            *found, positions = read(first, second, rows)
            held = (positions >= 0)[..., None, None]
            pairs = zip(found, along, strict=True)
            return sum(jnp.where(held, x * d, 0).sum() for x, d in pairs), positions

        return jax.grad(total, argnums=(0, 1), has_aux=True)(first, second)

    with jax.set_mesh(mesh_of(kind or "8")):
        (mine, theirs), positions = run(first, second, jnp.asarray([2, 0]))
    slot = np.asarray(positions).argsort(1)[:, -4:]  # of the four tokens
    for i in range(2):
        exact = np.take_along_axis(np.asarray(along[i]), slot[:, :, None, None], 1)
        close(mine[i], exact * np.array([0, 1, 0])[:, None, None, None], "kept")
        close(theirs[i], exact[[2, 0]], "given")


def test_indices_that_are_traced():
    """The last row taken for -1; of a row that is given twice, keys of one and the length of another."""
    with jax.set_mesh(mesh_of("8")):
        cache, other = started(*tokens(0, 3)), started(*tokens(1, 9), [2, 5, 9])
        for rows, kept in (([-1, 3, 2**31], []), ([5, 2**32 + 1, -(2**40)], []), ([2, -3, 2], [2])):
            found = jax.jit(KVCache.reset)(cache, jnp.asarray(rows))
            assert found.lengths.tolist() == [0 if b in kept else 3 for b in range(B)]
            found = jax.jit(KVCache.replace)(cache, jnp.asarray(rows), other)
            exact = [*stored(cache)[:2], stored(other if kept else cache)[2]]
            assert stored(found) == exact


def test_other_axes():
    """Slots copied as if they lay on the same devices: the same number of them, along another axis."""
    mesh = make_mesh((2, 2, 2), ("node", "device", "head"))
    with jax.set_mesh(mesh):
        cache, other = (
            empty(parallel=SequenceParallel(axis), rows=2) for axis in ("node", "device")
        )
        with pytest.raises(
            ValueError, match=r"other: wanted the mesh axes along the sequence .*'node'"
        ):
            cache.replace(jnp.arange(2), other)
