"""Ulysses and the ring together: heads exchanged along the fast axis, keys around the slow ones."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import Operands, vary_together

from ..cost._shape import Shape
from ..cost._topology import Topology
from ..cost._transfer import SentDerivatives, Transfers
from ._abstract import AbstractMethod, Axis, LocalCall, SeenPairs, Split, exchanging
from ._arguments import Axes
from ._halo import Halo
from ._ring import ring_pairs
from ._ring_keys import around_transfers, keys_around
from ._ulysses import exchange_heads, exchange_transfers


@dataclasses.dataclass(frozen=True)
class Hybrid(AbstractMethod):
    r"""Heads are exchanged for sequence along the last axis, and keys go around a ring over the others.

    Along the last axis, of $f$ devices, each device gets the sequence of all $f$, and $N/f$ of the heads, as by
    [`Ulysses`][energy_attn.distributed.methods.Ulysses]. Keys of these heads then go around the $p/f$ devices of the
    other axes, as in a [`Ring`][energy_attn.distributed.methods.Ring]. So there are
    $p/f - 1$ hops in place of $p - 1$, each over the slow network with what
    one device of a ring holds, and $f$ has to fit the heads, not $p$. The derivatives are those of the two.

    In [`sharded_attention`][energy_attn.distributed.sharded_attention] bias and mask are for this device's `N/f`
    heads, the queries of the last axis's devices and all keys, in the order of the devices; broadcastable to
    `[B, N/f, f T, p S]`.

    Raises:
        ValueError: in a call over one mesh axis, or whose heads the devices of the last one cannot share out.

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

    def check_axes(self, axes: Sequence[object]) -> None:
        """Raises `ValueError` for one axis."""
        if len(axes) < 2:
            raise ValueError(
                "method: wanted two or more mesh axes for 'hybrid', slow ones first, got one; over one, "
                "there are 'ulysses' and 'ring'"
            )

    def exchanged(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """The last axis."""
        return axes[-1:]

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        """Each device has its heads' part of bias and mask, for the queries of the last axis."""
        del operands, queries_sharded
        return Split(heads=axes[-1:], queries=axes[:-1], keys=(), rows=axes[:-1])

    def attend(self, call: LocalCall) -> AttentionState:
        """Raises as `attend` does."""
        around, exchanged = call.axes[:-1], call.axes[-1:]

        def run(operands: Operands) -> AttentionState:
            operands = vary_together(operands, around)
            around_call = call._replace(operands=operands, axes=around)
            return keys_around(around_call, self._sent_keys)

        return exchange_heads(run, call._replace(axes=exchanged), around)

    def transfers(
        self, shape: Shape, topology: Topology, derivatives: SentDerivatives
    ) -> Transfers:
        around, exchanged = topology.axes[:-1], topology.axes[-1:]
        shared = exchanging(self, topology)
        halo = self._sent_keys or Halo(topology.devices // shared, ())
        run = functools.partial(
            around_transfers,
            length=-(-shape.keys // topology.devices) * shared,
            halo=halo,
            axes=around,
            shape=shape,
            derivatives=derivatives,
        )
        return exchange_transfers(exchanged, shape, topology, derivatives, run)

    @property
    def overlap(self) -> Literal["hops"]:
        return "hops"

    def pairs(self, seen: SeenPairs, size: int) -> list[np.ndarray]:
        return ring_pairs(seen, size)

    def near(self, halo: Halo) -> AbstractMethod:
        return NeighbouringGroups(halo)

    @property
    def _sent_keys(self) -> Halo | None:
        return None


@dataclasses.dataclass(frozen=True)
class NeighbouringGroups(Hybrid):
    """A hybrid in which keys come from those groups of devices alone whose keys some query may see.

    Attributes:
        halo: which keys of a group.
    """

    halo: Halo

    def pairs(self, seen: SeenPairs, size: int) -> list[np.ndarray]:
        return AbstractMethod.pairs(self, seen, size)

    @property
    def _sent_keys(self) -> Halo:
        return self.halo
