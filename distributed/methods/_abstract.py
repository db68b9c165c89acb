"""The abstract classes of a sharding method and of a key schedule, and the types that they share."""

import abc
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, Operands, Settings
from energy_attn.kernels.internal import CallPolicy, additions, blockwise, out_dtype

from ..cost._network import Derivatives, Topology, Transfers
from ..cost._shape import Shape, key_copies, local_rows
from ..merge._abstract import Axes, joined, moved

Axis = TypeVar("Axis")


# Of some keys of each device, from a first to a last one, exclusive: the pairs of queries on device (or group of
# devices that exchange heads) i and keys on j, `[devices, devices]`.
SeenPairs = Callable[[int, int], np.ndarray]


ALL = slice(None)


Arrays = TypeVar("Arrays")


class LocalCall(NamedTuple):
    """A call on one device, inside `jax.shard_map`.

    Attributes:
        policy: which kernels compute it.
        settings: the static options.
        operands: the arrays of this device, split as `AbstractMethod.split` says.
        axes: the mesh axes that share the sequence.
        queries_sharded: whether queries are a part, or equal on all devices.
        others: the mesh axes that share batch and heads, of which the operands' indices say which are this device's.
    """

    policy: CallPolicy
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

    A method of the library is one class, in the list of `methods/_parallel.py`.

    Attributes:
        name: its name in `method=`.
        is_option: whether `method=` takes the name.
        replicated_queries: whether queries may be equal on all devices; if not, each device has a part of them.
        whole_sequences: whether each device attends to whole sequences, so that causal work is balanced.
        reads_positions: whether it reads the positions of all tokens, even where mask and score do not.
        receive_buffers: how many equal transfers, one after the other, arrive in buffers of their own.
        takes_halo: whether an exchange of a halo may take its place, where queries see few keys of other devices.

    Examples:
        >>> from energy_attn.distributed import SequenceParallel, methods
        >>> ring = methods.Ring(rotate="keys")
        >>> SequenceParallel("device", method=ring).method.name
        'ring'
    """

    name: ClassVar[str]
    is_option: ClassVar[bool] = True
    replicated_queries: ClassVar[bool] = False
    whole_sequences: ClassVar[bool] = False
    reads_positions: ClassVar[bool] = False
    receive_buffers: ClassVar[int] = 2
    takes_halo: ClassVar[bool] = False

    @abc.abstractmethod
    def attend(self, call: LocalCall) -> AttentionState:
        """The state of this device's queries. Raises as kernels do."""

    @abc.abstractmethod
    def transfers(self, shape: Shape, topology: Topology, derivatives: Derivatives) -> Transfers:
        """The collectives of `attend` over several devices, in the order in which they run."""

    @classmethod
    def variants(cls) -> Mapping[str | None, "AbstractMethod"]:
        """The methods of this class, by the names that `merge` has for them in the cost model."""
        return {None: cls()}

    @property
    def is_automatic(self) -> bool:
        """Whether `method="auto"` considers it."""
        return self.is_option

    @property
    def sends_gradient(self) -> bool:
        """Whether `transfers` knows the transfers of gradients in query, key and value."""
        return True

    @property
    def overlap(self) -> Literal["none", "hops", "pieces"]:
        """Whether no transfers, hops around a ring or gathered pieces overlap products."""
        return "none"

    def pairs(self, seen: SeenPairs, size: int) -> list[np.ndarray]:
        """The pairs that each device computes in each step, where devices have `size` keys; by default, in one."""
        return [seen(0, size).sum(1)]

    def state_rows(self, shape: Shape, topology: Topology) -> int:
        """The rows whose states a device holds."""
        return local_rows(shape, topology)

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        """How operands, of a device or of all together, are split.

        By default queries, and what belongs to them; bias, mask, positions and segments are of all keys.
        """
        del operands, queries_sharded
        return Split(heads=(), queries=axes, keys=(), rows=axes)

    def replaces_kernels(self, operands: Operands) -> bool:
        """Whether it computes these operands where no sequence is shared, too, in place of the kernels."""
        del operands
        return False

    def exchanged(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """The axes along which heads are exchanged for sequence."""
        del axes
        return ()

    def check_axes(self, axes: Sequence[object]) -> None:
        """Raises `ValueError` for axes that the method cannot use."""
        del axes


def exchanging(method: AbstractMethod, topology: Topology) -> int:
    """How many devices exchange heads for sequence; 1 if none do."""
    return math.prod(topology.links[axis].devices for axis in method.exchanged(topology.axes))


def check_heads(method: AbstractMethod, heads: int, kv_heads: int, devices: int) -> None:
    """Raises `ValueError` unless the devices that exchange heads can share them out."""
    if key_copies(heads, kv_heads, devices) is None:
        wanted = math.lcm(kv_heads, devices)
        raise ValueError(
            f"query: wanted a number of heads that is a multiple of {wanted}, so that {devices} devices "
            f"share them and the {kv_heads} heads of keys for {method.name!r}, got {heads}; 'ring', "
            "'gather' and 'tree' take any"
        )


def rounded(state: AttentionState, operands: Operands, settings: Settings) -> AttentionState:
    return AttentionState(state.out.astype(out_dtype(operands, settings)), state.lse)


def with_all_queries(operands: Operands, axes: Axes) -> Operands:
    """Operands with the queries of all devices, end to end, and their positions and segments."""
    tokens = operands.tokens.map_queries(lambda x: joined(x, axes, 1))
    return operands._replace(query=joined(operands.query, axes, 1), tokens=tokens)


def attend_with_sink(
    run: Callable[[Settings, Operands], AttentionState],
    policy: CallPolicy,
    settings: Settings,
    operands: Operands,
) -> AttentionState:
    """Merges the state of `run` with the sink of the call; kernels of reproducible calls fold the sink instead."""
    if operands.sink is None or policy.folds_sinks:
        return run(settings, operands)
    state = run(settings.needing(unrounded=True), operands._replace(sink=None))
    rows = operands.positioned(read=False).tokens.query_positions
    return rounded(additions.with_sink(state, operands.sink, rows), operands, settings)


class Keys(NamedTuple):
    """Keys and values, their directions or their gradients; None for what does not move."""

    key: Array | None
    value: Array | None


class Gradients(NamedTuple):
    """Gradients of the keys of a step, and of what stays."""

    keys: Keys
    query: Array | None
    bias: Array | None
    score_arrays: tuple[Array | None, ...]


# Of the keys of a step, the gradients so far, the step's number, what arrives meanwhile, and some of a shard's keys or
# ALL: what arrived, and the gradients of these keys, zero for others than these some, and of what stays so far.
StepFn = Callable[..., tuple[blockwise.InFlight, Gradients]]


class AbstractKeySchedule(abc.ABC):
    """The keys of each step, and how the next ones come; a frozen dataclass, static.

    Attributes:
        axes: the mesh axes over which keys are sharded.
        size: how many keys each device has.
    """

    axes: Axes
    size: int

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """The number of schedule, the first ones, whose arrays are of one shape."""

    @property
    def trailing(self) -> int:
        """The number of trailing schedule, unrolled: their index is static."""
        return 0

    @abc.abstractmethod
    def first(self, own: Arrays) -> Arrays:
        """The arrays `[B, S, ...]` of step 0, from each device's `own`."""

    @abc.abstractmethod
    def advance(self, here: Arrays, own: Arrays, step: int | Array) -> Arrays:
        """The arrays of the step after this one."""

    @abc.abstractmethod
    def slice_step(self, x: Array, axis: int, step: int | Array) -> Array:
        """The part of an array of all keys for the keys of a step."""

    @abc.abstractmethod
    def backward(self, run_step: StepFn, own: Keys) -> Gradients:
        """The sum of all schedule' gradients; of keys, on the devices that have them."""


def hop(tree: Arrays, axes: Axes, places: int = 1) -> Arrays:
    """The arrays of a tree from the device this number of places before."""
    devices = lax.axis_size(axes)
    pairs = [(i, (i + places) % devices) for i in range(devices)]
    pass_on = functools.partial(moved, lambda x: lax.ppermute(x, axes, pairs))
    return jax.tree.map(pass_on, tree)


def source_device(step: int | Array, axes: Axes) -> Array:
    """The device whose part is here after `step` hops."""
    return (lax.axis_index(axes) - step) % lax.axis_size(axes)


def gather_tokens(x: Array | None, size: int, axes: Axes) -> Array | None:
    """Positions or segments of all devices, `[B, p size]`, gathered where a device has only its own."""
    return x if x is None or x.shape[1] != size else joined(x, axes, 1)


def device_slice(x: Array | None, axis: int, place: Array, size: int) -> Array | None:
    if x is None or x.shape[axis] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, place * size, size, axis)


def pad_zeros(x: Array, axis: int, first: int, size: int) -> Array:
    """An array as a part along an axis of `size`, from `first` on, of one that is zero elsewhere."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = first, size - first - x.shape[axis]
    return jnp.pad(x, widths)


def add_trees(a: Arrays, b: Arrays) -> Arrays:
    return jax.tree.map(jnp.add, a, b)
