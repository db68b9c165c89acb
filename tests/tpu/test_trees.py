"""A drafted tree over a cache that eight TPUs share, compiled ahead of time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import KVCache, SequenceParallel
from energy_attn.prefix_tree import PrefixTree, tree_decode
from tests.support.programs import sent

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("user_settings")]


def test_a_tree_costs_what_its_queries_do():
    """A tree that costs eight TPUs a collective more than plain decoding of its queries; compiled ahead of time."""
    pod = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    mesh = Mesh(np.asarray(pod.devices), ("device",))
    rows, nodes, kv, heads, width, capacity = 2, 64, 2, 8, 128, 65536
    with jax.set_mesh(mesh):
        spread = SequenceParallel("device")
        like = jax.eval_shape(
            lambda: KVCache.empty(rows, capacity, kv, width, dtype=jnp.bfloat16, parallel=spread)
        )

        def on(x):
            spec = P(None, "device") if x.shape[1:2] == (capacity,) else P()
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        tree = jax.eval_shape(
            PrefixTree.from_beam, jax.ShapeDtypeStruct((rows, 8, nodes // 8), jnp.int32)
        )
        query, key = (
            jax.ShapeDtypeStruct((rows, nodes, heads, width), jnp.bfloat16) for heads in (heads, kv)
        )
        args = jax.tree.map(on, (query, key, key, tree, like))
        found = (
            jax.jit(lambda *x: tree_decode(*x[:3], tree=x[3], cache=x[4])).lower(*args).compile()
        )
        plain = jax.jit(lambda cache, query: cache.attend(query, is_causal=False))
        plain = plain.lower(args[-1], args[0]).compile()
    assert sent(found) and sent(found) == sent(plain)
