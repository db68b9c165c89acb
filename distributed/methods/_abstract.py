"""The abstract class of a sharding method: how devices that share a sequence attend to all of its keys."""

import abc
import math
from typing import ClassVar, NamedTuple

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import Candidate, Operands, Settings

from ..cost._shape import key_copies
from ._arguments import Axes


class LocalCall(NamedTuple):
    """A call on one device, inside `jax.shard_map`.

    Attributes:
        names: the implementations to try, or kernels.
        settings: the static options.
        operands: the arrays of this device, split as `AbstractMethod.split` says.
        axes: the mesh axes that share the sequence.
        queries_sharded: whether queries are a part, or equal on all devices.
        others: the mesh axes that share batch and heads, of which the operands' indices say which are this device's.
    """

    names: tuple[Candidate, ...]
    settings: Settings
    operands: Operands
    axes: Axes
    queries_sharded: bool
    others: Axes = ()


class Split(NamedTuple):
    """The mesh axes along which one device has a part, of those that share the sequence.

    Attributes:
        heads: of the heads of bias and mask, beside the axes that shard all heads.
        queries: of the queries of bias and mask.
        keys: of the keys of bias and mask, and of the positions and segments of keys.
        rows: of the positions and segments of queries.
    """

    heads: Axes
    queries: Axes
    keys: Axes
    rows: Axes


class AbstractMethod(abc.ABC):
    """How devices that share a sequence attend to all of its keys; a frozen dataclass.

    A method of the library is one class in a module of its own, in the list of `methods/_methods.py`, and has a model
    of what it sends in `cost/_methods.py`.

    Attributes:
        name: its name in `method=`.
        replicated_queries: whether queries may be equal on all devices; if not, each device has a part of them.
        whole_sequences: whether each device attends to whole sequences, so that causal work is balanced.

    Examples:
        >>> from energy_attn.distributed import SequenceParallel, methods
        >>> ring = methods.Ring(rotate="keys")
        >>> isinstance(ring, methods.AbstractMethod), SequenceParallel("device", method=ring).method.name
        (True, 'ring')
    """

    name: ClassVar[str]
    replicated_queries: ClassVar[bool] = False
    whole_sequences: ClassVar[bool] = False

    @abc.abstractmethod
    def attend(self, call: LocalCall) -> AttentionState:
        """The state of this device's queries. Raises as kernels do."""

    @abc.abstractmethod
    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        """How the operands of a device are split; `operands` are one device's, or those of all together."""

    def exchanged(self, axes: Axes) -> Axes:
        """The axes along which heads are exchanged for sequence."""
        del axes
        return ()

    def check_axes(self, axes: Axes) -> None:
        """Raises `ValueError` for axes that the method cannot use."""
        del axes


def check_heads(method: AbstractMethod, heads: int, kv_heads: int, devices: int) -> None:
    """Raises `ValueError` unless the devices that exchange heads can share them out."""
    if key_copies(heads, kv_heads, devices) is None:
        wanted = math.lcm(kv_heads, devices)
        raise ValueError(
            f"query: wanted a number of heads that is a multiple of {wanted}, so that {devices} devices "
            f"share them and the {kv_heads} heads of keys for {method.name!r}, got {heads}; 'ring', "
            "'gather' and 'tree' take any"
        )
