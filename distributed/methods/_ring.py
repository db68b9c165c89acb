"""Ring attention: keys, or queries with their states, pass every device once."""

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    Operands,
    Settings,
    attend,
    attend_and_merge,
    check_choice,
    check_flag,
    check_floating_dtype,
    empty_like,
    lse_dtype,
    vary_together,
)

from ..merge._packing import transfer
from ._abstract import AbstractMethod, LocalCall, Split
from ._arguments import Axes, rounded
from ._direction import BothWays, OneWay, by_halves, check_both_ways, joined_halves
from ._hops import hop, origin, part, whole
from ._in_turn import Names, attend_in_turn
from ._merge import fold_across
from ._ring_keys import Around

ROTATED = ("keys", "queries", "auto")


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
        gradient_dtype: in which gradients of keys and values travel: bfloat16 sends half of the bytes, and rounds
            in each of $p - 1$ hops; None: that of `lse`. For keys that rotate, by any implementation but
            `"reference"`.
        bidirectional: whether keys and values of the first half of the heads go around in one direction, those of the
            second half in the other, so that both links of a torus axis (TPU) carry half of the bytes; queries
            and outputs are copied once, to lie by halves. For keys that rotate. Raises `ValueError` in a call with an
            odd number of heads of keys, or with a score.

    Raises:
        TypeError: `bidirectional` is not a boolean, or `gradient_dtype` no floating dtype.
        ValueError: `rotate` is none of these.

    Source: Ring Attention (arXiv 2310.01889); for queries that rotate, Context Parallelism for
    Scalable Million-Token Inference (arXiv 2411.01783).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn.distributed import SequenceParallel, make_mesh, methods
        >>> n = jax.device_count()
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2 * n, 2, 4))
        >>> ring = SequenceParallel("device", methods.Ring(gradient_dtype=jnp.bfloat16))
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     out = ea.attention(q, k, v, parallel=ring)
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
        True
    """

    rotate: Literal["keys", "queries", "auto"] = "auto"
    gradient_dtype: DTypeLike | None = None
    bidirectional: bool = False

    name = "ring"
    replicated_queries = True

    def __post_init__(self) -> None:
        check_choice("rotate", self.rotate, ROTATED)
        check_ring(self)

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        """Of what goes around, bias, mask, positions and segments are on all devices."""
        if self._rotates_keys(operands, queries_sharded):
            rows = axes if queries_sharded else ()
            return Split(heads=(), queries=rows, keys=(), rows=rows)
        return Split(heads=(), queries=(), keys=axes, rows=())

    def attend(self, call: LocalCall) -> AttentionState:
        """Raises as `attend` does, and as `check_both_ways` where keys go around both ways."""
        call = call._replace(operands=vary_together(call.operands, call.axes))
        names, settings, operands, axes, queries_sharded, _ = call
        if self._rotates_keys(operands, queries_sharded):
            return keys_around(self, call)
        if queries_sharded:
            return _queries_around(names, settings, axes, operands)
        state = fold_across("ring", axes, attend(names, settings.needing(unrounded=True), operands))
        return rounded(state, operands, settings)

    def _rotates_keys(self, operands: Operands, queries_sharded: bool) -> bool:
        if self.rotate != "auto":
            return self.rotate == "keys"
        if (
            not queries_sharded
        ):  # around with the keys, each device would fold them in another order
            return False
        query, key, value = operands.qkv
        state = (value.shape[-1] + 1) * lse_dtype(value.dtype).itemsize
        queries = query.nbytes + math.prod(query.shape[:-1]) * state
        return key.nbytes + value.nbytes <= queries


def check_ring(method: Any) -> None:
    """Checks the fields of a method whose keys go around, and makes a dtype of `gradient_dtype`."""
    check_flag("bidirectional", method.bidirectional)
    if method.gradient_dtype is not None:
        dtype = check_floating_dtype("gradient_dtype", method.gradient_dtype)
        object.__setattr__(method, "gradient_dtype", dtype)


def keys_around(method: Any, call: LocalCall) -> AttentionState:
    """The state of this device's queries, as keys go around, by a `Ring` or a `Hybrid`."""
    names, settings, operands, axes, *_ = call
    size, dtype = operands.key.shape[1], method.gradient_dtype
    if not method.bidirectional:
        return attend_in_turn(names, settings, Around(axes, size, dtype, OneWay()), operands)
    check_both_ways(settings, operands)
    turns = Around(axes, size, dtype, BothWays(operands.query.shape[0]))
    return joined_halves(attend_in_turn(names, settings, turns, by_halves(operands)))


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
