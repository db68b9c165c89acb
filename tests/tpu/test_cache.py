"""What XLA:TPU makes of steps over caches, compiled ahead of time: no TPU is needed, only libtpu.

A cache of Llama 3's heads (32 of queries share 8 of 128) and 131072 tokens a chip. Programs are read, never run.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn import masks
from energy_attn.distributed import KVCache, SequenceParallel
from energy_attn.prefix_tree import PrefixTree, tree_decode
from tests.support.programs import cache_and_query, sent
from tests.support.selection import few
from tests.support.tpu import devices, every_chip, temporary

TOKENS, HEADS, KV_HEADS, WIDTH = 131072, 32, 8, 128
WIDENED = 2 * TOKENS * KV_HEADS * WIDTH * 2  # bytes, in bfloat16
pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("user_settings")]


def compiled(chip, number, quantize="int8", rows=1, queries=1, **options):
    """One step over a cache on so many chips of a kind."""
    mesh = Mesh(np.array(devices(chip)[:number]), ("device",))
    parallel = SequenceParallel("device", "tree", "allreduce") if number > 1 else None
    sizes = rows, number * TOKENS // rows, KV_HEADS, WIDTH
    empty = functools.partial(KVCache.empty, *sizes, quantize=quantize, parallel=parallel)
    with jax.set_mesh(mesh):
        step = jax.jit(functools.partial(KVCache.attend, **options))
        given = cache_and_query(mesh, empty, (rows, queries, HEADS, WIDTH))
        return step.lower(*given).compile()


@every_chip
@pytest.mark.parametrize("rows", [1, 8])
def test_nothing_is_dequantized(chip, rows):
    """Keys or values in the query's dtype; float32 scores, and once more as weights, are 1/32 of these."""
    assert temporary(compiled(chip, 1, rows=rows)) < WIDENED / 30


@pytest.mark.parametrize("queries", few([2, 8], 8))
def test_more_queries(queries):
    """Scores in float32, of which there are two arrays at most, for each query."""
    scores = HEADS * queries * TOKENS * 4
    assert temporary(compiled("v5p", 1, queries=queries)) < 2.1 * scores


@pytest.mark.parametrize("chip", few(["v5e", "v5p", "v6e"], "v5e"))
def test_over_a_mesh(chip):
    """Keys or values that a chip widens or sends; other collectives than over a cache that is not quantised."""
    program, plain = (compiled(chip, 4, quantize=x) for x in ("int8", None))
    assert temporary(program) < WIDENED / 30
    assert sent(program) == sent(plain) != []


def test_masks_and_windows():
    """A mask of slots and a window, which are computed inside the products, too."""
    mask = masks.Window(4096, 0)
    assert temporary(compiled("v5p", 1, mask=mask)) < WIDENED / 30


def test_a_tree_costs_what_its_queries_do():
    """A tree that costs eight TPUs a collective more than plain decoding of its queries; compiled ahead of time."""
    pod = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    mesh = Mesh(np.asarray(pod.devices), ("device",))
    rows, nodes, kv, heads, width, capacity = 2, 64, 2, 8, 128, 65536
    spread = SequenceParallel("device")
    empty = functools.partial(KVCache.empty, rows, capacity, kv, width, parallel=spread)
    cache, query = cache_and_query(mesh, empty, (rows, nodes, heads, width))

    def on(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))

    with jax.set_mesh(mesh):
        tree = jax.eval_shape(
            PrefixTree.from_beam, jax.ShapeDtypeStruct((rows, 8, nodes // 8), jnp.int32)
        )
        key = jax.ShapeDtypeStruct((rows, nodes, kv, width), jnp.bfloat16)
        key, tree = jax.tree.map(on, (key, tree))
        run = jax.jit(lambda *x: tree_decode(*x[:3], tree=x[3], cache=x[4]))
        found = run.lower(query, key, key, tree, cache).compile()
        plain = jax.jit(lambda cache, query: cache.attend(query, is_causal=False))
        plain = plain.lower(cache, query).compile()
    assert sent(found) and sent(found) == sent(plain)
