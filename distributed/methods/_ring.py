"""Ring attention: keys, or queries with their states, pass every device once; or keys those that may see them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
from ..cost._shape import Shape, kv_shard, local_rows, position_gather, tangent_bytes
from ..merge._abstract import Axes, transfer
from ..merge._strategies import STRATEGIES
from ._abstract import AbstractMethod, LocalCall, SeenPairs, Split, rounded
from ._halo import Halo, Span
from ._in_turn import (
    ALL,
    AbstractTurns,
    Gradients,
    Keys,
    Names,
    Tree,
    Visit,
    added,
    among,
    attend_in_turn,
    hop,
    origin,
    part,
    whole,
)
from ._merge import fold_across

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
            return keys_around(call)
        names, operands = policy.kernels, mesh_axes.vary_together(operands, axes)
        if queries_sharded:
            return _queries_around(names, settings, axes, operands)
        state = fold_across("ring", axes, attend(names, settings.needing(unrounded=True), operands))
        return rounded(state, operands, settings)

    def transfers(self, shape: Shape, topology: Topology, derivatives: Derivatives) -> Transfers:
        devices, axes, keys = topology.devices, topology.axes, kv_shard(shape, topology)
        rows = local_rows(shape, topology)
        query, state = rows * shape.width * shape.bytes, rows * shape.state
        if self._moves_keys(sum(keys), query + state, shape.queries_sharded):
            every = Neighbours(Halo(devices, ()))
            yield from every.transfers(shape, topology, derivatives)
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


@dataclasses.dataclass(frozen=True)
class Neighbours(AbstractMethod):
    r"""Keys come from those devices alone whose keys some query may see, and no more of them than that.

    It takes the place of a ring, of a gather, and of a tree of sharded queries, where a window says so: with $S / p$
    keys on a device and a window of $w$, contiguous shards need $\lceil (w - 1) p / S \rceil$ hops, the last one of a
    part of the keys. Gradients of keys return as the keys came.
    """

    halo: Halo

    name = "ring"

    def attend(self, call: LocalCall) -> AttentionState:
        return keys_around(call, self.halo)

    def transfers(self, shape: Shape, topology: Topology, derivatives: Derivatives) -> Transfers:
        yield from position_gather(shape.keys, shape, topology, topology.axes)
        keys, axes = kv_shard(shape, topology), topology.axes
        yield from around_transfers(keys, self.halo, axes, shape, topology, derivatives)


def ring_pairs(seen: SeenPairs, size: int) -> list[np.ndarray]:
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


def keys_around(call: LocalCall, halo: Halo | None = None) -> AttentionState:
    """The state of this device's queries, as the keys of `halo` go around; None: all keys."""
    halo = halo or Halo(lax.axis_size(call.axes), ())
    turns = Around(call.axes, call.operands.key.shape[1], halo)
    return attend_in_turn(call, turns)


def around_transfers(
    sizes: Sequence[int],
    halo: Halo | None,
    axes: tuple[int, ...],
    shape: Shape,
    topology: Topology,
    derivatives: Derivatives,
) -> Transfers:
    """The transfers of `keys_around`, of keys and values of `sizes` bytes on each device.

    Gradients return in the dtypes of keys and values, or behind keys that go around.
    """
    devices = math.prod(topology.links[axis].devices for axis in axes)
    length = -(-shape.keys // topology.devices) * (topology.devices // devices)
    halo = halo or Halo(devices, ())
    hops, (tangent, gradient) = halo.around - 1, derivatives
    for size in sizes:
        if hops:
            # again for a derivative, but XLA merges an only hop with the same one before; and directions
            count = 1 + ((tangent or gradient) and hops > 1) + tangent
            yield from [Transfer("collective-permute", size, axes, hops)] * count
        if hops and gradient:  # gradients follow their keys, and return to their devices
            moving = tangent_bytes(size, shape)
            yield Transfer("collective-permute", moving, axes, hops)
            yield Transfer("collective-permute", moving, axes)
        for span in halo.spans:
            part = size // length * (span.stop - span.start)
            # the backward's keys are the forward's, which XLA sends once
            count = 1 + tangent + gradient
            yield from [Transfer("collective-permute", part, axes)] * count


@dataclasses.dataclass(frozen=True)
class Around(AbstractTurns):
    """First the keys that go around whole, the own ones in front, then spans, each straight from its device.

    Gradients travel with the keys that go around; those of spans return as they came, in the dtypes of keys.
    """

    axes: Axes
    size: int
    halo: Halo

    @property
    def count(self) -> int:
        return self.halo.around

    @property
    def others(self) -> int:
        return len(self.halo.spans)

    def first(self, own: Tree) -> Tree:
        return own

    def following(self, here: Tree, own: Tree, turn: int | Array) -> Tree:
        if isinstance(turn, int) and turn + 1 >= self.count:
            return self._fetch(own, self.halo.spans[turn + 1 - self.count])
        return hop(here, self.axes)

    def cut(self, x: Array, axis: int, turn: int | Array) -> Array:
        span = self._span(turn)
        place = origin(turn if span is None else span.distance, self.axes)
        found = lax.dynamic_slice_in_dim(x, place * self.size, self.size, axis)
        return found if span is None else lax.slice_in_dim(found, span.start, span.stop, axis=axis)

    def backward(self, visit: Visit, own: Keys) -> Gradients:
        found = self._backward_around(visit, own)
        # each span comes beside the products of the turn before, and its gradients return beside those of the next
        spans, keys, home = self.halo.spans, found.keys, Keys(None, None)
        here = self._fetch(own, spans[0]) if spans else own
        for turn, span in enumerate(spans, self.count):
            more = turn + 1 - self.count < len(spans)
            coming = self._fetch(own, spans[turn + 1 - self.count]) if more else None
            arrived, found = visit(here, found, turn, blockwise.InFlight(coming, home))
            keys = self._with(keys, arrived.sums, spans[turn - 1 - self.count], turn > self.count)
            home = hop(_as_like(found.keys, own), self.axes, -span.distance)
            here = arrived.others
        if spans:
            keys = self._with(keys, home, spans[-1], True)
        return found._replace(keys=keys)

    def _backward_around(self, visit: Visit, own: Keys) -> Gradients:
        # Gradients follow their keys one hop behind: no transfer needs the result of its own step.
        def turn(
            keys: Any, so_far: Gradients | None, step: int | Array, onward: bool, some: slice = ALL
        ) -> tuple[Any, Gradients]:
            sums = None if so_far is None else so_far.keys
            going = blockwise.InFlight(keys if onward else None, sums)
            arrived, found = visit(keys, so_far, step, hop(going, self.axes), some)
            if so_far is not None:
                found = found._replace(keys=added(arrived.sums, found.keys))
            return arrived.others, found

        half, last = self.size // 2, self.count - 1
        if last == 0:
            return visit(own, None, 0, blockwise.InFlight())[1]
        # Of the own keys the first half comes first, beside whose products they leave, and the second half last, beside
        # whose products gradients come home.
        carry = turn(own, None, 0, onward=True, some=slice(0, half))
        middle = jnp.arange(1, last, dtype=jnp.int32)
        carry, _ = lax.scan(lambda x, i: (turn(*x, i, onward=True), None), carry, middle)
        _, so_far = turn(*carry, last, onward=False)
        home = hop(so_far.keys, self.axes, -last)
        # else XLA cuts the second half before the loop, and keeps it
        here, so_far = lax.optimization_barrier((own, so_far))
        arrived, found = visit(
            here, so_far, 0, blockwise.InFlight(None, home), slice(half, self.size)
        )
        return found._replace(keys=added(arrived.sums, found.keys))

    def _span(self, turn: int | Array) -> Span | None:
        is_later = isinstance(turn, int) and turn >= self.count
        return self.halo.spans[turn - self.count] if is_later else None

    def _fetch(self, own: Tree, span: Span) -> Tree:
        cut = jax.tree.map(lambda x: lax.slice_in_dim(x, span.start, span.stop, axis=1), own)
        return hop(cut, self.axes, span.distance)

    def _with(self, keys: Keys, more: Any, span: Span, is_there: bool) -> Keys:
        if not is_there:
            return keys

        def whole(x: Array, like: Array) -> Array:
            return among(x.astype(like.dtype), 1, span.start, self.size)

        return added(keys, jax.tree.map(whole, more, keys))


def _as_like(gradients: Keys, like: Keys) -> Keys:
    pairs = zip(gradients, like, strict=True)
    return Keys(*(x if x is None or y is None else x.astype(y.dtype) for x, y in pairs))
