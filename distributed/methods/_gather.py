"""Attention over keys of all devices, gathered piece by piece."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import blockwise

from ..cost._network import Derivatives, Topology, Transfer, Transfers
from ..cost._shape import Shape, halves, kv_shard, pieces, position_gather, tangent_bytes
from ..merge._abstract import Axes, joined
from ._abstract import AbstractMethod, LocalCall, SeenPairs
from ._halo import Halo
from ._in_turn import AbstractTurns, Gradients, Keys, Tree, Visit, attend_in_turn
from ._ring import Neighbours


@dataclasses.dataclass(frozen=True)
class Gather(AbstractMethod):
    r"""Keys and values are gathered, piece by piece.

    $$\mathrm{state} = \mathrm{state}_{1} \oplus \mathrm{state}_{2} \oplus \dots \oplus \mathrm{state}_{C}$$

    with $\oplus$ the [`merge`][energy_attn.kernels.merge] of states. Queries stay, and keys and values
    are gathered, $C$ pieces of every device's shard one after the other; no gather needs the attention
    over the piece before. A piece has keys of both halves of each shard, so that in the order `"zigzag"` all devices
    have as much to do in each. $C$ is the largest number up to 8 that divides $S$, so that a device holds its shard
    and two pieces of all keys, a quarter of them for long sequences. The same bytes as a ring's, in $C$ steps in place
    of $p - 1$ hops. The derivative gathers them again: in forward mode with the directions of
    keys and values, in reverse mode gradients are reduced and scattered piece by piece in `lse`'s dtype.
    Reverse over either mode keeps the keys of all devices. Positions and segments of keys are gathered once.
    Where a window tells which keys queries see, [no others are sent](../choosing.md#windows).

    In programs for H200 a gather starts before the attention over the piece before and ends after it; in
    the backward the scatter of gradients does, and gathers wait. XLA:TPU's gathers are synchronous: on
    v5p and v6e nothing is computed beside them, while the transfers of a ring are hidden.

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

    def attend(self, call: LocalCall) -> AttentionState:
        return attend_in_turn(call, Pieces(call.axes, call.operands.key.shape[1]))

    def transfers(self, shape: Shape, topology: Topology, derivatives: Derivatives) -> Transfers:
        axes, (tangent, gradient) = topology.axes, derivatives
        count = pieces(-(-shape.keys // topology.devices))
        yield from position_gather(shape.keys, shape, topology, axes)
        for size in kv_shard(shape, topology):
            # for a tangent again, but for the first piece, whose gathers XLA merges; and directions
            counts = (count, count - 1, count) if tangent else (count,)
            yield from (Transfer("all-gather", size // count, axes, n) for n in counts if n)
            if gradient:
                # the backward's gathers, of which XLA merges the first, or all of two, and scatters
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

    def near(self, halo: Halo) -> AbstractMethod:
        return Neighbours(halo)


@dataclasses.dataclass(frozen=True)
class Pieces(AbstractTurns):
    """An equal part of every device's keys in each turn; gradients are scattered as they come.

    It is made of a part of each half, which in the order `"zigzag"` are from both ends of the sequence: so that every
    device's queries see as many keys of a piece.
    """

    axes: Axes
    size: int

    @property
    def count(self) -> int:
        return pieces(self.size)

    @property
    def _halves(self) -> int:
        return halves(self.size)

    def first(self, own: Tree) -> Tree:
        return self._fetch(own, 0)

    def following(self, here: Tree, own: Tree, turn: int | Array) -> Tree:
        del here
        return self._fetch(own, turn + 1)

    def cut(self, x: Array, axis: int, turn: int | Array) -> Array:
        size = self.size // (self._halves * self.count)
        parts = lax.axis_size(self.axes), self._halves, self.count, size
        apart = x.reshape(*x.shape[:axis], *parts, *x.shape[axis + 1 :])
        found = lax.dynamic_index_in_dim(apart, turn, axis + 2, keepdims=False)
        return found.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def backward(self, visit: Visit, own: Keys) -> Gradients:
        # Gradients are scattered one turn later: no transfer needs the result of its own turn.
        def step(carry: tuple[Keys, Gradients], turn: Array) -> tuple[tuple[Keys, Gradients], Keys]:
            here, so_far = carry
            coming = blockwise.InFlight(self._fetch(own, turn + 1), self._scatter(so_far.keys))
            arrived, found = visit(here, so_far, turn, coming)
            return (arrived.others, found), arrived.sums

        last = self.count - 1
        if last == 0:
            _, found = visit(self.first(own), None, 0, blockwise.InFlight())
            return found._replace(keys=self._scatter(found.keys))
        arrived, found = visit(self.first(own), None, 0, blockwise.InFlight(self._fetch(own, 1)))
        middle = jnp.arange(1, last, dtype=jnp.int32)
        (here, so_far), homes = lax.scan(step, (arrived.others, found), middle)
        arrived, found = visit(
            here, so_far, last, blockwise.InFlight(None, self._scatter(so_far.keys))
        )

        def together(home: Array, *last: Array) -> Array:
            turns = jnp.concatenate([home, *(x[None] for x in last)])
            apart = turns.reshape(*turns.shape[:2], self._halves, -1, *turns.shape[3:])
            return jnp.moveaxis(apart, 0, 2).reshape(turns.shape[1], -1, *turns.shape[3:])

        keys = jax.tree.map(together, homes, arrived.sums, self._scatter(found.keys))
        return found._replace(keys=keys)

    def _fetch(self, tree: Tree, turn: int | Array) -> Tree:
        def of(x: Array) -> Array:
            apart = x.reshape(len(x), self._halves, self.count, -1, *x.shape[2:])
            mine = lax.dynamic_index_in_dim(apart, turn, 2, keepdims=False)
            return joined(mine.reshape(len(x), -1, *x.shape[2:]), self.axes, 1)

        return jax.tree.map(of, tree)

    def _scatter(self, gradients: Keys) -> Keys:
        """The sums over devices of gradients of a piece, each device its own part."""

        def of(x: Array) -> Array:
            if x.size == 0:  # HLO scatters no empty arrays
                shape = x.shape[0], x.shape[1] // lax.axis_size(self.axes), *x.shape[2:]
                return lax.full_like(x, 0.0, shape=shape)
            return lax.psum_scatter(x, self.axes, scatter_dimension=1, tiled=True)

        return jax.tree.map(of, gradients)
