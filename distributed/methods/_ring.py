"""Ring attention and the gather: methods in which keys of all devices arrive step by step."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, Operands, Settings
from energy_attn.kernels.internal import (
    attend,
    attend_and_merge,
    blockwise,
    checks,
    empty_like,
    lse_dtype,
    mesh_axes,
)

from ..cost._network import Derivatives, Topology, Transfer, Transfers
from ..cost._shape import (
    Shape,
    halves,
    kv_shard,
    local_rows,
    pieces,
    position_gather,
    tangent_bytes,
)
from ..merge._abstract import Axes, joined, transfer
from ..merge._across import fold_across
from ..merge._strategies import STRATEGIES
from ._abstract import (
    AbstractKeySchedule,
    AbstractMethod,
    Arrays,
    Gradients,
    Keys,
    LocalCall,
    SeenPairs,
    Split,
    StepFn,
    device_slice,
    gather_tokens,
    hop,
    rounded,
    source_device,
)
from ._halo import Halo, ring_pairs, ring_schedule, ring_transfers
from ._key_schedule import Names, attend_by_schedule

ROTATED = ("keys", "queries")


@dataclasses.dataclass(frozen=True)
class Ring(AbstractMethod):
    r"""Keys, or queries with their states, are passed around a ring.

    $$\mathrm{state} = \mathrm{state}_{i} \oplus \mathrm{state}_{i-1} \oplus \dots
      \oplus \mathrm{state}_{i-p+1}$$

    with $\oplus$ the [`merge`][energy_attn.kernels.merge] of states, and shards of keys numbered
    by device modulo $p$.

    `rotate="keys"`: each device keeps its queries and passes the keys and values that it holds to the next
    device, $p - 1$ times. In programs for TPU v5p and v6e and for H200, each transfer overlaps the
    attention of its step. The derivative goes around once more: in forward mode with the directions of keys
    and values, in reverse mode with gradients that travel with their keys. A last hop returns the gradients
    to their device, during the products of half of its own keys. Memory is $O(T + S)$ per device, in second
    derivatives by forward over reverse, too, which send twice as much as the gradient. Reverse over either
    mode keeps the keys of all devices on each, $O(T + p S)$.

    `rotate="queries"`: keys stay, and queries go around with their states, $p$ times. Where queries are
    replicated only the states go around, $p - 1$ times. That is little where queries are few.

    Positions and segments are gathered once, and do not go around. A window limits
    [which keys are sent](../choosing.md#windows).

    In [`sharded_attention`][energy_attn.distributed.sharded_attention] bias and mask are for this device's queries
    and all keys in the order of the devices, broadcastable to `[B, N, T, p S]`; if queries rotate, for all queries and
    this device's keys, `[B, N, p T, S]`.

    Attributes:
        rotate: `"keys"`, `"queries"`, or `"auto"`: for sharded queries the one with fewer bytes, for
            replicated ones queries, so that the results of all devices are bitwise equal.

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
    takes_halo = True

    def __post_init__(self) -> None:
        checks.check_choice("rotate", self.rotate, (*ROTATED, "auto"))

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        # bias, mask, positions and segments of what rotates are replicated
        if self._rotates_keys(operands, queries_sharded):
            rows = axes if queries_sharded else ()
            return Split(heads=(), queries=rows, keys=(), rows=rows)
        return Split(heads=(), queries=(), keys=axes, rows=())

    def attend(self, call: LocalCall) -> AttentionState:
        policy, settings, operands, axes, queries_sharded, _ = call
        if self._rotates_keys(operands, queries_sharded):
            return attend_by_schedule(call, ring_schedule(call))
        names, operands = policy.kernels, mesh_axes.vary_together(operands, axes)
        if queries_sharded:
            return _rotate_queries(names, settings, axes, operands)
        state = fold_across("ring", axes, attend(names, settings.needing(unrounded=True), operands))
        return rounded(state, operands, settings)

    def transfers(self, shape: Shape, topology: Topology, derivatives: Derivatives) -> Transfers:
        devices, axes, keys = topology.devices, topology.axes, kv_shard(shape, topology)
        rows = local_rows(shape, topology)
        query, state = rows * shape.width * shape.bytes, rows * shape.state
        if self._moves_keys(sum(keys), query + state, shape.queries_sharded):
            every = HaloExchange(Halo(devices, ()))
            yield from every.transfers(shape, topology, derivatives)
        elif not shape.queries_sharded:
            yield from STRATEGIES["ring"].transfers(shape, topology)
            yield from [Transfer("all-reduce", state, axes)] * derivatives.tangent
        else:
            yield from position_gather(shape.queries, shape, topology, axes)
            sizes = (query, state, tangent_bytes(query, shape), state)
            # queries with the states over the keys so far; the last hop returns them
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

    def _rotates_keys(self, operands: Operands, queries_sharded: bool) -> bool:
        query, key, value = operands.qkv
        state = (value.shape[-1] + 1) * lse_dtype(value.dtype).itemsize
        queries = query.nbytes + math.prod(query.shape[:-1]) * state
        return self._moves_keys(key.nbytes + value.nbytes, queries, queries_sharded)

    def _moves_keys(self, keys: int, queries: int, queries_sharded: bool) -> bool:
        """Whether keys rotate, from the bytes of keys and the bytes of queries with their states."""
        if self.rotate != "auto":
            return self.rotate == "keys"
        # with rotating keys, each device would fold the states of replicated queries in another order
        return queries_sharded and keys <= queries


@dataclasses.dataclass(frozen=True)
class HaloExchange(AbstractMethod):
    """Receives only the keys that some query may see.

    It replaces a ring, a gather, and a tree of sharded queries where a window allows it. Gradients of keys return
    by the same transfers.
    """

    # With S / p keys on a device and a window of w, contiguous shards need ⌈(w - 1) p / S⌉ hops, the last one with a
    # part of the keys.
    halo: Halo

    name = "ring"

    def attend(self, call: LocalCall) -> AttentionState:
        return attend_by_schedule(call, ring_schedule(call, self.halo))

    def transfers(self, shape: Shape, topology: Topology, derivatives: Derivatives) -> Transfers:
        yield from position_gather(shape.keys, shape, topology, topology.axes)
        keys, axes = kv_shard(shape, topology), topology.axes
        yield from ring_transfers(keys, self.halo, axes, shape, topology, derivatives)


def _rotate_queries(
    names: Names, settings: Settings, axes: Axes, operands: Operands
) -> AttentionState:
    query_len, unrounded = operands.query.shape[1], settings.needing(unrounded=True)
    tokens = operands.tokens.map_queries(lambda x: gather_tokens(x, query_len, axes))

    def body(carry: tuple[AttentionState, Array], i: Array) -> Any:
        state, query = carry
        place = source_device(i, axes)
        part = operands._replace(
            query=query,
            tokens=tokens.map_queries(lambda x: device_slice(x, 1, place, query_len)),
            bias=device_slice(operands.bias, 2, place, query_len),
            mask=device_slice(operands.mask, 2, place, query_len),
        )
        # the hop of the queries overlaps the attention; their states follow them
        state, following = attend_and_merge(state, names, unrounded, part, hop(query, axes))
        return (transfer(lambda x: hop(x, axes), state), following), None

    steps = jnp.arange(lax.axis_size(axes), dtype=jnp.int32)
    start = empty_like(unrounded, operands), operands.query
    (state, _), _ = lax.scan(body, start, steps)
    return rounded(state, operands, settings)


@dataclasses.dataclass(frozen=True)
class Gather(AbstractMethod):
    r"""Keys and values are gathered, piece by piece.

    $$\mathrm{state} = \mathrm{state}_{1} \oplus \mathrm{state}_{2} \oplus \dots \oplus \mathrm{state}_{C}$$

    with $\oplus$ the [`merge`][energy_attn.kernels.merge] of states. Queries stay, and keys and values
    are gathered, $C$ pieces of every device's shard one after the other. $C$ is the largest number up to 8 that
    divides $S$, so that a device holds its shard and two pieces of all keys, a quarter of them for long
    sequences. A piece has keys of both halves of each shard, so that in the order `"zigzag"` all devices have
    equal work in each step. It sends the bytes of a ring, in $C$ steps in place of $p - 1$ hops.

    The derivative gathers keys again: in forward mode with the directions of keys and values. In reverse mode
    gradients are reduced and scattered piece by piece in `lse`'s dtype. Reverse over either mode keeps the keys
    of all devices. Positions and segments of keys are gathered once. A window limits
    [which keys are sent](../choosing.md#windows).

    In programs for H200 a gather overlaps the attention over the piece before, and in the backward the scatter of
    gradients does. XLA:TPU's gathers are synchronous: on v5p and v6e they overlap nothing, while the transfers of a
    ring are hidden.

    In [`sharded_attention`][energy_attn.distributed.sharded_attention] bias and mask are for this device's queries
    and all keys in the order of the devices, broadcastable to `[B, N, T, p S]`.

    Source: context parallelism of Llama 3 (arXiv 2407.21783, section 3.3.2), which gathers all keys at
        once.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn.distributed import SequenceParallel, make_mesh
        >>> n = jax.device_count()
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2 * n, 2, 4))
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     out = ea.attention(q, k, v, parallel=SequenceParallel("device", "gather"))
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
        True
    """

    name = "gather"
    takes_halo = True

    def attend(self, call: LocalCall) -> AttentionState:
        return attend_by_schedule(call, GatherSchedule(call.axes, call.operands.key.shape[1]))

    def transfers(self, shape: Shape, topology: Topology, derivatives: Derivatives) -> Transfers:
        axes, (tangent, gradient) = topology.axes, derivatives
        count = pieces(-(-shape.keys // topology.devices))
        yield from position_gather(shape.keys, shape, topology, axes)
        for size in kv_shard(shape, topology):
            # A tangent gathers the keys again, except the first piece, whose gathers XLA merges, and the directions.
            counts = (count, count - 1, count) if tangent else (count,)
            yield from (Transfer("all-gather", size // count, axes, n) for n in counts if n)
            if gradient:
                # The backward gathers the keys again; XLA merges the first gather with the forward's, or all of two.
                if count > 2:
                    yield Transfer("all-gather", size // count, axes, count - 1)
                piece = tangent_bytes(size, shape) * topology.devices // count
                yield Transfer("reduce-scatter", piece, axes, count)

    @property
    def overlap(self) -> Literal["pieces"]:
        return "pieces"

    def pairs(self, seen: SeenPairs, size: int) -> list[np.ndarray]:
        count, parts = pieces(size), halves(size)
        piece = size // (parts * count)
        starts = [[(j * count + i) * piece for j in range(parts)] for i in range(count)]
        return [np.sum([seen(x, x + piece).sum(1) for x in runs], axis=0) for runs in starts]


@dataclasses.dataclass(frozen=True)
class GatherSchedule(AbstractKeySchedule):
    """An equal piece of every device's keys in each step; gradients are scattered step by step."""

    # A piece has a part of each half of a shard. In the order "zigzag" the halves are from both ends of the sequence,
    # so that the queries of all devices see equally many keys of a piece.
    axes: Axes
    size: int

    @property
    def count(self) -> int:
        return pieces(self.size)

    @property
    def _halves(self) -> int:
        return halves(self.size)

    def first(self, shard: Arrays) -> Arrays:
        return self._fetch(shard, 0)

    def advance(self, held: Arrays, shard: Arrays, step: int | Array) -> Arrays:
        del held
        return self._fetch(shard, step + 1)

    def slice_step(self, x: Array, axis: int, step: int | Array) -> Array:
        size = self.size // (self._halves * self.count)
        parts = lax.axis_size(self.axes), self._halves, self.count, size
        pieces = x.reshape(*x.shape[:axis], *parts, *x.shape[axis + 1 :])
        piece = lax.dynamic_index_in_dim(pieces, step, axis + 2, keepdims=False)
        return piece.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def backward(self, run_step: StepFn, shard: Keys) -> Gradients:
        # Gradients are scattered one step later: no transfer needs the result of its own step.
        def body(carry: tuple[Keys, Gradients], step: Array) -> tuple[tuple[Keys, Gradients], Keys]:
            held, so_far = carry
            coming = blockwise.InFlight(self._fetch(shard, step + 1), self._scatter(so_far.keys))
            arrived, result = run_step(held, so_far, step, coming)
            return (arrived.others, result), arrived.sums

        last, first = self.count - 1, self.first(shard)
        if last == 0:
            _, result = run_step(first, None, 0, blockwise.InFlight())
            return result._replace(keys=self._scatter(result.keys))
        arrived, result = run_step(first, None, 0, blockwise.InFlight(self._fetch(shard, 1)))
        middle = jnp.arange(1, last, dtype=jnp.int32)
        (held, so_far), scattered = lax.scan(body, (arrived.others, result), middle)
        coming = blockwise.InFlight(None, self._scatter(so_far.keys))
        arrived, result = run_step(held, so_far, last, coming)

        def concat(scattered: Array, *last: Array) -> Array:
            x = jnp.concatenate([scattered, *(x[None] for x in last)])  # [steps, B, keys, ...]
            halves = x.reshape(*x.shape[:2], self._halves, -1, *x.shape[3:])
            return jnp.moveaxis(halves, 0, 2).reshape(x.shape[1], -1, *x.shape[3:])

        keys = jax.tree.map(concat, scattered, arrived.sums, self._scatter(result.keys))
        return result._replace(keys=keys)

    def _fetch(self, shard: Arrays, step: int | Array) -> Arrays:
        def gather(x: Array) -> Array:
            pieces = x.reshape(len(x), self._halves, self.count, -1, *x.shape[2:])
            piece = lax.dynamic_index_in_dim(pieces, step, 2, keepdims=False)
            return joined(piece.reshape(len(x), -1, *x.shape[2:]), self.axes, 1)

        return jax.tree.map(gather, shard)

    def _scatter(self, gradients: Keys) -> Keys:
        def scatter(x: Array) -> Array:
            if x.size == 0:  # HLO scatters no empty arrays
                shape = x.shape[0], x.shape[1] // lax.axis_size(self.axes), *x.shape[2:]
                return lax.full_like(x, 0.0, shape=shape)
            return lax.psum_scatter(x, self.axes, scatter_dimension=1, tiled=True)

        return jax.tree.map(scatter, gradients)
