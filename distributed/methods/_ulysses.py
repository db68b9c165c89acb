"""Ulysses, which exchanges heads for sequence, and the hybrid of Ulysses and a ring."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, Operands
from energy_attn.kernels.internal import attend, mesh_axes

from ..cost._network import Derivatives, Topology, Transfer, Transfers
from ..cost._shape import Shape, key_copies, kv_shard, local_rows, position_gather, tangent_bytes
from ..merge._abstract import Axes, moved, transfer
from ._abstract import AbstractMethod, Axis, LocalCall, SeenPairs, Split, exchanging, gather_tokens
from ._halo import Halo, ring_pairs, ring_schedule, ring_transfers
from ._key_schedule import attend_by_schedule


@dataclasses.dataclass(frozen=True)
class Ulysses(AbstractMethod):
    r"""Heads are exchanged for sequence, and back.

    Each device receives all queries, keys and values of $N/p$ heads by an all-to-all, attends by one kernel, and
    receives the outputs of its queries by another all-to-all: each sends $\frac{p-1}{p}$ of a device's arrays. The
    derivatives exchange in the same way. Where $p$ does not divide the $K$ heads of keys, each is sent in
    $\mathrm{lcm}(K, p) / K$ copies, and $\mathrm{lcm}(K, p)$ has to divide $N$. Positions and segments are gathered.

    In [`sharded_attention`][energy_attn.distributed.sharded_attention] bias and mask are for this device's `N/p`
    heads, all queries and all keys, in the order of the devices, broadcastable to `[B, N/p, p T, p S]`.

    Raises:
        ValueError: in a call whose heads cannot be sharded over the devices.

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
        return axes

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        del operands, queries_sharded
        exchanged = self.exchanged(axes)
        around = axes[: -len(exchanged)]
        return Split(heads=exchanged, queries=around, keys=(), rows=around)

    def attend(self, call: LocalCall) -> AttentionState:
        # positions and segments are of this device, or of queries over `axes` and keys over `around + axes`
        axes = self.exchanged(call.axes)
        around = call.axes[: -len(axes)]
        policy, settings, operands, *_ = call
        to_heads = functools.partial(moved, lambda x: lax.all_to_all(x, axes, 2, 1, tiled=True))
        query_len, number = operands.query.shape[1:3]
        key_len, kv_heads = operands.key.shape[1:3]
        copies = key_copies(number, kv_heads, lax.axis_size(axes)) or 1  # None is refused before

        def keys_to_heads(x: Array) -> Array:
            if copies > 1:  # in float32, since the transpose of copies is a sum
                x = mesh_axes.apply_in_float32(lambda x: jnp.repeat(x, copies, 2), x)
            return to_heads(x)

        heads = operands.indices.heads
        if settings.score is not None:  # which may read the indices of heads
            heads = jnp.arange(number, dtype=jnp.int32) if heads is None else heads
            share = number // lax.axis_size(axes)
            heads = lax.dynamic_slice_in_dim(heads, lax.axis_index(axes) * share, share)
        tokens = operands.tokens.map_queries(lambda x: gather_tokens(x, query_len, axes))
        operands = operands._replace(
            indices=operands.indices._replace(heads=heads),
            query=to_heads(operands.query),
            key=keys_to_heads(operands.key),
            value=keys_to_heads(operands.value),
            tokens=tokens.map_keys(lambda x: gather_tokens(x, key_len, around + axes)),
        )
        if around:
            call = call._replace(operands=operands, axes=around)
            state = attend_by_schedule(call, ring_schedule(call, self._sent_keys))
        else:
            state = attend(policy.kernels, settings, operands)
        return transfer(lambda x: lax.all_to_all(x, axes, 1, 2, tiled=True), state)

    def transfers(self, shape: Shape, topology: Topology, derivatives: Derivatives) -> Transfers:
        axes = self.exchanged(topology.axes)
        around = topology.axes[: -len(axes)]
        devices, rows = exchanging(self, topology), local_rows(shape, topology)
        copies = key_copies(shape.heads, shape.kv_heads, devices) or 1
        keys = [copies * size for size in kv_shard(shape, topology)]
        sizes = (rows * shape.width * shape.bytes, *keys)
        # states over all keys: `out` is in its own dtype, except on CPUs, where lse joins it in one array
        rounded = shape.out_width * shape.bytes + shape.lse_bytes
        state = rows * (shape.state if topology.platform == "cpu" else rounded)
        if devices > 1:
            yield from position_gather(shape.queries, shape, topology, axes)
            yield from (Transfer("all-to-all", size, axes) for size in sizes)
        yield from position_gather(shape.keys, shape, topology, topology.axes)
        yield from ring_transfers(keys, self._sent_keys, around, shape, topology, derivatives)
        if devices == 1:
            return
        yield Transfer("all-to-all", state, axes)
        tangent, gradient = derivatives
        if tangent or gradient:  # an exchange's transpose is the one that undoes it
            # XLA:TPU rounds gradients before it exchanges them
            is_rounded = gradient and topology.platform == "tpu"
            back = [size if is_rounded else tangent_bytes(size, shape) for size in sizes]
            yield from (Transfer("all-to-all", size, axes) for size in back)
            yield Transfer("all-to-all", state, axes)

    @property
    def _sent_keys(self) -> Halo | None:
        return None


@dataclasses.dataclass(frozen=True)
class Hybrid(Ulysses):
    r"""Heads are exchanged for sequence along the last axis, and keys go around a ring over the others.

    Along the last axis, of $f$ devices, each device receives the tokens of all $f$ for $N/f$ of the heads, as by
    `Ulysses`. The keys of these heads then go around the $p/f$ devices of the other axes, as in a
    [`Ring`][energy_attn.distributed.methods.Ring]: $p/f - 1$ hops over the slow network in place of $p - 1$, each with
    the bytes of one device's shard. Only $f$ has to fit the heads, not $p$.

    In [`sharded_attention`][energy_attn.distributed.sharded_attention] bias and mask are for this device's `N/f`
    heads, the queries of the last axis's devices and all keys, in the order of the devices; broadcastable to
    `[B, N/f, f T, p S]`.

    Raises:
        ValueError: in a call over one mesh axis, or whose heads cannot be sharded over the last axis.

    Source: unified sequence parallelism, USP (arXiv 2405.07719).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn.distributed import SequenceParallel, make_mesh
        >>> axes, n = ("node", "device"), jax.device_count()
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2 * n, n, 4))
        >>> with jax.set_mesh(make_mesh((n // 2 or 1, min(n, 2)), axes)):
        ...     out = ea.attention(q, k, v, parallel=SequenceParallel(axes, "hybrid"))
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
        True
    """

    name = "hybrid"
    takes_halo = True
    whole_sequences = False

    def check_axes(self, axes: Sequence[object]) -> None:
        if len(axes) < 2:
            raise ValueError(
                "method: wanted two or more mesh axes for 'hybrid', slow ones first, got one; over one, "
                "there are 'ulysses' and 'ring'"
            )

    def exchanged(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return axes[-1:]

    @property
    def overlap(self) -> Literal["hops"]:
        return "hops"

    def pairs(self, seen: SeenPairs, size: int) -> list[np.ndarray]:
        return ring_pairs(seen, size)


@dataclasses.dataclass(frozen=True)
class GroupHaloExchange(Hybrid):
    """A hybrid that receives only the keys of other groups that some query may see."""

    halo: Halo

    def pairs(self, seen: SeenPairs, size: int) -> list[np.ndarray]:
        return AbstractMethod.pairs(self, seen, size)

    @property
    def _sent_keys(self) -> Halo:
        return self.halo
