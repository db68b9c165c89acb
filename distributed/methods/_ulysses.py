"""Ulysses: heads exchanged for sequence, and back."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import Operands, apply_in_float32, attend

from ..cost._shape import Shape, key_copies, kv_shard, local_rows, tangent_bytes
from ..cost._topology import Topology
from ..cost._transfer import SentDerivatives, Transfer, Transfers, position_gather
from ..merge._packing import moved, transfer
from ._abstract import AbstractMethod, Axis, LocalCall, Split
from ._arguments import Axes
from ._hops import whole


@dataclasses.dataclass(frozen=True)
class Ulysses(AbstractMethod):
    r"""Heads are exchanged for sequence, and back.

    Each device gets all queries, keys and values of $N/p$ heads by an all-to-all, attends by one kernel, and gets the
    outputs of its queries by another: $\frac{p-1}{p}$ of its arrays each time, whatever the number of devices. The
    derivatives exchange likewise. Where $p$ does not divide the $K$ heads of keys, each of these is sent in as many
    copies as make them $\mathrm{lcm}(K, p)$, which has to divide $N$. Positions and segments are gathered.

    In [`sharded_attention`][energy_attn.distributed.sharded_attention] bias and mask are for this device's `N/p`
    heads, all queries and all keys, in the order of the devices, broadcastable to `[B, N/p, p T, p S]`.

    Raises:
        ValueError: in a call whose heads the devices cannot share out.

    Source: DeepSpeed Ulysses (arXiv 2309.14509).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn.distributed import SequenceParallel, make_mesh
        >>> n = jax.device_count()
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2 * n, n, 4))
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     out = ea.attention(q, k, v, parallel=SequenceParallel("device", "ulysses"))
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
        True
    """

    name = "ulysses"
    whole_sequences = True

    def exchanged(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """All axes."""
        return axes

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        """Each device has its heads' part of bias and mask."""
        del operands, queries_sharded
        return Split(heads=axes, queries=(), keys=(), rows=())

    def attend(self, call: LocalCall) -> AttentionState:
        """Raises as `attend` does."""
        run = functools.partial(attend, call.policy.kernels, call.settings)
        return exchange_heads(run, call)

    def transfers(
        self, shape: Shape, topology: Topology, derivatives: SentDerivatives
    ) -> Transfers:
        return exchange_transfers(
            topology.axes, shape, topology, derivatives, lambda keys: iter(())
        )


def exchange_heads(
    over_sequence: Callable[[Operands], AttentionState], call: LocalCall, around: Axes = ()
) -> AttentionState:
    """The state of this device's queries, by `over_sequence` for its heads, of which the axes hold the sequence.

    Bias and mask are for these heads. Positions and segments of keys are those of all devices of `axes` and `around`,
    those of queries of all on `axes`; or they are its own. Raises as `over_sequence` does.
    """
    _, settings, operands, axes, *_ = call

    def exchange(x: Array) -> Array:
        return lax.all_to_all(x, axes, 2, 1, tiled=True)

    to_heads = functools.partial(moved, exchange)
    query_len, number = operands.query.shape[1:3]
    key_len, kv_heads = operands.key.shape[1:3]
    copies = key_copies(number, kv_heads, lax.axis_size(axes)) or 1  # None is refused before

    def keys_to_heads(x: Array) -> Array:
        # the derivative of copies is a sum
        return to_heads(
            x if copies == 1 else apply_in_float32(lambda x: jnp.repeat(x, copies, 2), x)
        )

    heads = operands.indices.heads
    if settings.score is not None:
        heads = jnp.arange(number, dtype=jnp.int32) if heads is None else heads
        mine = number // lax.axis_size(axes)
        heads = lax.dynamic_slice_in_dim(heads, lax.axis_index(axes) * mine, mine)
    tokens = operands.tokens.map_queries(lambda x: whole(x, query_len, axes))
    here = operands._replace(
        indices=operands.indices._replace(heads=heads),
        query=to_heads(operands.query),
        key=keys_to_heads(operands.key),
        value=keys_to_heads(operands.value),
        tokens=tokens.map_keys(lambda x: whole(x, key_len, around + axes)),
    )
    state = over_sequence(here)
    return transfer(lambda x: lax.all_to_all(x, axes, 1, 2, tiled=True), state)


def exchange_transfers(
    axes: tuple[int, ...],
    shape: Shape,
    topology: Topology,
    derivatives: SentDerivatives,
    over_sequence: Callable[[Sequence[int]], Transfers],
) -> Transfers:
    """The transfers of `exchange_heads` along these axes, and of `over_sequence(keys)` in between.

    `keys` are the bytes of a device's keys and values after the exchange.
    """
    devices, rows = math.prod(topology.links[x].devices for x in axes), local_rows(shape, topology)
    copies = key_copies(shape.heads, shape.kv_heads, devices) or 1
    keys = [copies * size for size in kv_shard(shape, topology)]
    sizes = (rows * shape.width * shape.bytes, *keys)
    # the state of all keys: `out` in its own dtype, unless packed
    rounded = shape.out_width * shape.bytes + shape.lse_bytes
    state = rows * (shape.state if topology.platform == "cpu" else rounded)
    if devices > 1:
        yield from position_gather(shape.queries, shape, topology, axes)
        yield from (Transfer("all-to-all", size, axes) for size in sizes)
    yield from position_gather(shape.keys, shape, topology, topology.axes)
    yield from over_sequence(keys)
    if devices == 1:
        return
    yield Transfer("all-to-all", state, axes)
    tangent, gradient = derivatives
    if tangent or gradient:  # an exchange's transpose is the one that undoes it
        # XLA:TPU rounds gradients before it exchanges them
        is_rounded = gradient and topology.platform == "tpu"
        for size in sizes:
            yield Transfer("all-to-all", size if is_rounded else tangent_bytes(size, shape), axes)
        yield Transfer("all-to-all", state, axes)
