"""Ring attention: keys, or queries with their states, pass every device once."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    Operands,
    Settings,
    attend,
    attend_and_merge,
    check_choice,
    empty_like,
    lse_dtype,
    vary_together,
)

from ..cost._shape import Shape, kv_shard, local_rows, tangent_bytes
from ..cost._topology import Topology
from ..cost._transfer import SentDerivatives, Transfer, Transfers, position_gather
from ..merge._packing import transfer
from ..merge._strategies import STRATEGIES
from ._abstract import AbstractMethod, LocalCall, SeenPairs, Split
from ._arguments import Axes, rounded
from ._halo import Halo
from ._hops import hop, origin, part, whole
from ._in_turn import Names
from ._merge import fold_across
from ._ring_keys import Neighbours, around_transfers, keys_around

ROTATED = ("keys", "queries")


@dataclasses.dataclass(frozen=True)
class Ring(AbstractMethod):
    r"""Keys, or queries with their states, are passed around a ring.

    $$\mathrm{state} = \mathrm{state}_{i} \oplus \mathrm{state}_{i-1} \oplus \dots
      \oplus \mathrm{state}_{i-p+1}$$

    with $\oplus$ the [`merge`][energy_attn.kernels.merge] of states and the shards of keys numbered
    by device, counted modulo $p$. `rotate="keys"`: each device keeps its queries and passes the
    keys and values that it holds to the next one, $p - 1$ times. In programs for TPU v5p and v6e and
    for H200, each transfer starts before the attention of its step and ends after it. The derivative
    goes around once more: in forward mode with the directions of keys and values, in reverse mode
    with gradients that travel with their keys, likewise beside the products, and
    then make one hop home, beside the products of half of the device's own keys, which are left until then.
    Memory is $O(T + S)$ per device in all, and in second derivatives by forward over reverse, which
    send twice what the gradient does; reverse over either mode keeps the keys of all devices on
    each, $O(T + p S)$. `rotate="queries"`: keys
    stay, and queries go around with their states and come home, $p$ times; or, where all devices
    have the same queries, only the states, $p - 1$ times. That is little where queries are few.
    Positions and segments of what goes around are gathered once, and do not go around.
    Where a window tells which keys queries see, [no others are sent](../choosing.md#windows).

    In [`sharded_attention`][energy_attn.distributed.sharded_attention] bias and mask are for this device's queries
    and all keys in the order of the devices, broadcastable to `[B, N, T, p S]`; if queries rotate, for all queries and
    this device's keys, `[B, N, p T, S]`.

    Attributes:
        rotate: `"keys"`, `"queries"`, or `"auto"`: whichever is fewer bytes where queries are
            sharded, else queries, so that all devices find the same to the last bit.

    Raises:
        ValueError: `rotate` is none of these.

    Source: Ring Attention (arXiv 2310.01889); for queries that rotate, Context Parallelism for
    Scalable Million-Token Inference (arXiv 2411.01783).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn.distributed import SequenceParallel, make_mesh, methods
        >>> n = jax.device_count()
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2 * n, 2, 4))
        >>> ring = SequenceParallel("device", methods.Ring(rotate="keys"))
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     out = ea.attention(q, k, v, parallel=ring)
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
        True
    """

    rotate: Literal["keys", "queries", "auto"] = "auto"

    name = "ring"
    replicated_queries = True

    def __post_init__(self) -> None:
        check_choice("rotate", self.rotate, (*ROTATED, "auto"))

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        """Of what goes around, bias, mask, positions and segments are on all devices."""
        if self._rotates_keys(operands, queries_sharded):
            rows = axes if queries_sharded else ()
            return Split(heads=(), queries=rows, keys=(), rows=rows)
        return Split(heads=(), queries=(), keys=axes, rows=())

    def attend(self, call: LocalCall) -> AttentionState:
        """Raises as `attend` does."""
        call = call._replace(operands=vary_together(call.operands, call.axes))
        policy, settings, operands, axes, queries_sharded, _ = call
        names = policy.kernels
        if self._rotates_keys(operands, queries_sharded):
            return keys_around(call)
        if queries_sharded:
            return _queries_around(names, settings, axes, operands)
        state = fold_across("ring", axes, attend(names, settings.needing(unrounded=True), operands))
        return rounded(state, operands, settings)

    def transfers(
        self, shape: Shape, topology: Topology, derivatives: SentDerivatives
    ) -> Transfers:
        devices, axes, keys = topology.devices, topology.axes, kv_shard(shape, topology)
        rows = local_rows(shape, topology)
        query, state = rows * shape.width * shape.bytes, rows * shape.state
        if self._moves_keys(sum(keys), query + state, shape.queries_sharded):
            yield from position_gather(shape.keys, shape, topology, axes)
            yield from around_transfers(keys, 1, Halo(devices, ()), axes, shape, derivatives)
        elif not shape.queries_sharded:
            yield from STRATEGIES["ring"].transfers(shape, topology)
            yield from [Transfer("all-reduce", state, axes)] * derivatives.tangent
        else:
            yield from position_gather(shape.queries, shape, topology, axes)
            sizes = (query, state, tangent_bytes(query, shape), state)
            # queries with the states of the keys that they have seen; the last hop brings them home
            for size in sizes if derivatives.tangent else sizes[:2]:
                yield Transfer("collective-permute", size, axes, devices)

    @classmethod
    def variants(cls) -> Mapping[str | None, AbstractMethod]:
        return {"keys": cls("keys"), "queries": cls("queries")}

    @property
    def sends_gradient(self) -> bool:
        return self.rotate == "keys"

    @property
    def overlap(self) -> Literal["none", "hops"]:
        return "hops" if self.rotate == "keys" else "none"

    def pairs(self, seen: SeenPairs, size: int) -> list[np.ndarray]:
        return ring_pairs(seen, size)

    def near(self, halo: Halo) -> AbstractMethod:
        return Neighbours(halo)

    def _rotates_keys(self, operands: Operands, queries_sharded: bool) -> bool:
        query, key, value = operands.qkv
        state = (value.shape[-1] + 1) * lse_dtype(value.dtype).itemsize
        queries = query.nbytes + math.prod(query.shape[:-1]) * state
        return self._moves_keys(key.nbytes + value.nbytes, queries, queries_sharded)

    def _moves_keys(self, keys: int, queries: int, queries_sharded: bool) -> bool:
        """Whether keys rotate, from the bytes of keys and the bytes of queries with their states."""
        if self.rotate != "auto":
            return self.rotate == "keys"
        # around with the keys, each device would fold those of equal queries in another order
        return queries_sharded and keys <= queries


def ring_pairs(seen: SeenPairs, size: int) -> list[np.ndarray]:
    """The pairs of each device in each step of a ring of keys."""
    pairs = seen(0, size)
    here = np.arange(len(pairs))
    return [pairs[here, here - step] for step in range(len(pairs))]


def _queries_around(
    names: Names, settings: Settings, axes: Axes, operands: Operands
) -> AttentionState:
    query_len, unrounded = operands.query.shape[1], settings.needing(unrounded=True)
    tokens = operands.tokens.map_queries(lambda x: whole(x, query_len, axes))

    def step(carry: tuple[AttentionState, Array], i: Array) -> Any:
        state, query = carry
        place = origin(i, axes)
        here = operands._replace(
            query=query,
            tokens=tokens.map_queries(lambda x: part(x, 1, place, query_len)),
            bias=part(operands.bias, 2, place, query_len),
            mask=part(operands.mask, 2, place, query_len),
        )
        state, following = attend_and_merge(state, names, unrounded, here, hop(query, axes))
        return (transfer(lambda x: hop(x, axes), state), following), None

    steps = jnp.arange(lax.axis_size(axes), dtype=jnp.int32)
    start = empty_like(unrounded, operands), operands.query
    (state, _), _ = lax.scan(step, start, steps)
    return rounded(state, operands, settings)
