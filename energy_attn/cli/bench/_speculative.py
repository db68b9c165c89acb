"""Prefix trees: packing them, and verifying them over a long context."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from energy_attn.distributed import KVCache

from ...prefix_tree import PrefixTree, pack, pack_reference, tree_decode
from ._cases import JAX_NN, OURS, Run

PYTHON = "plain Python"
# Reads the same cache with as many queries and no draft: what verification should cost.
DECODE = "a decode step"


class TreeJob(NamedTuple):
    """One comparison of jobs on prefix trees.

    Attributes:
        name: the job.
        dtype: of its arrays.
        given: its sizes, by the library's shape letters.
        start: builds all sides from these sizes, ready to run.
    """

    name: str
    dtype: str
    given: dict[str, int]
    start: Callable[..., dict[str, Run]]

    @property
    def sizes(self) -> str:
        """The sizes, in short."""
        return ", ".join(f"{name}={size}" for name, size in self.given.items())

    def about(self) -> dict[str, Any]:
        """The fields of the case in the results."""
        return {"dtype": self.dtype, "shape": self.given}

    def shrunk(self, by: int) -> "TreeJob":
        """The job with sequences `by` times shorter."""
        shorter = {k: max(x // by, 1) for k, x in self.given.items() if k == "S"}
        return self._replace(given=self.given | shorter)

    def sides(self, platform: str) -> tuple[dict[str, Run], dict[str, str]]:
        """Our job and each peer's, ready to run; no peer is absent."""
        del platform
        return self.start(**self.given), {}


def _pack(B: int, M: int, C: int) -> dict[str, Run]:
    # few different tokens at first and many behind, as in drafts
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 2 + 4**level, (B, M)) for level in range(C)]
    beam = jnp.asarray(np.stack(tokens, -1), jnp.int32)
    packed = jax.jit(pack)
    return {OURS: lambda: packed(beam), PYTHON: lambda: pack_reference(beam)}


def _verify(L: int, S: int, N: int, K: int, H: int) -> dict[str, Run]:
    sizes = (L, N), (L, K), (L, K), (S, K), (S, K)
    draws = jax.random.split(jax.random.key(0), len(sizes))
    query, key, value, old_key, old_value = (
        jax.random.normal(draw, (1, *size, H)) for draw, size in zip(draws, sizes, strict=True)
    )
    # eight paths without a common node, so that all nodes are used
    tree = pack(jnp.arange(L, dtype=jnp.int32).reshape(1, 8, L // 8))
    cache = KVCache.empty(1, S, K, H, dtype=jnp.float32).append(old_key, old_value)

    @jax.jit
    def dense(query: Array, key: Array, value: Array, tree: PrefixTree, cache: KVCache) -> Array:
        there = (cache.positions >= 0)[:, None, None]
        seen = jnp.broadcast_to(there, (1, 1, L, cache.capacity))
        whole = (jnp.concatenate(x, 1) for x in ((cache.key, key), (cache.value, value)))
        mask = jnp.concatenate((seen, tree.mask[:, None]), -1)
        return jax.nn.dot_product_attention(query, *whole, mask=mask)

    verify = jax.jit(lambda q, k, v, tree, cache: tree_decode(q, k, v, tree=tree, cache=cache).out)
    decode = jax.jit(lambda query, cache: cache.attend(query, is_causal=False).out)
    args = query, key, value, tree, cache
    return {
        OURS: lambda: verify(*args),
        JAX_NN: lambda: dense(*args),
        DECODE: lambda: decode(query, cache),
    }


TREE_JOBS = (
    *(TreeJob("pack", "int32", {"B": 8, "M": rows, "C": 8}, _pack) for rows in (16, 32, 64)),
    TreeJob("verify", "float32", {"L": 64, "S": 65536, "N": 8, "K": 2, "H": 64}, _verify),
)
