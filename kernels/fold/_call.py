"""A canonical call: its operands, and the abstract schedule of a platform."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..call._operands import KernelCall, Operands, Settings, bound, out_dtype
from ..call._state import AttentionState, lse_dtype, unfused
from ..call._tokens import LEAF
from ..masks._visibility import meeting
from ..scores._structure import floating
from ._programs import AbstractTileScores, Arithmetic, Blocks, FoldProgram
from ._tree import PositionSlots

# The version of the format: increment it with any change of `QUERIES`, `LEAF` or a fold program.
FORMAT = 3
QUERIES = 256  # queries of a tile of one head, of a fold over queries on a CPU

Ids = tuple[Int[Array, "_ tiles size"], Int[Array, "_ tiles size"] | None]  # positions, segments


@dataclasses.dataclass
class AbstractRowsFold(abc.ABC):
    """A fold of each row over its leaves, which may be run in nodes of the tree."""

    of: Any  # the call
    program: FoldProgram  # what is folded
    rows: Blocks  # arrays of rows by name, `[B, T, N, W]` or numbers `[B, T, N]`
    keys: Blocks  # arrays of keys, `[B, S, K, W]`
    width: int  # of the results and partials that are not one number per row
    wrap: Callable[..., Any]  # maps the arrays of results to the value returned

    @abc.abstractmethod
    def whole(self) -> Any:
        """The results, over all leaves."""

    @abc.abstractmethod
    def nodes(self, leaves: int) -> tuple[list[Array], Int[Array, "b nodes"]]:
        """Folds over runs of `leaves` leaves (a power of two that divides the number of the first leaf).

        `[nodes, B, T, N, ...]`, with the number of one leaf per run, or -1.
        """

    @abc.abstractmethod
    def of_nodes(self, nodes: Sequence[Array], numbers: Int[Array, "b nodes"]) -> Any:
        """The results, over nodes of all devices."""


class AbstractSchedule(abc.ABC):
    """A call whose keys are in leaves by position, and the loops of a platform that run fold programs over it."""

    query_tile: int  # queries of a tile of one head
    arithmetic: Arithmetic
    over_keys: type[AbstractRowsFold]

    def __init__(self, call: KernelCall, in_order: bool):
        """`in_order`: keys are in runs of whole leaves."""
        self.counted = call.operands.tokens.query_positions is None  # positions are indices
        operands = call.operands.positioned()
        self.operands = operands._replace(score_arrays=rounded(operands.score_arrays))
        self.settings = call.settings
        self.mask = bound(call.settings, operands)
        self.dtype = lse_dtype(operands.query.dtype)  # of sums
        self.batch, self.queries, heads = operands.query.shape[:3]
        self.key_heads = operands.key.shape[2]
        self.group = heads // self.key_heads  # heads of queries for each of keys
        self._in_order = in_order

    @abc.abstractmethod
    def scores(self, directions: Operands | None = None) -> AbstractTileScores:
        """The scores of tiles, and their tangent in some directions."""

    @abc.abstractmethod
    def over_queries(self, program: FoldProgram, rows: Blocks, keys: Blocks) -> list[Array]:
        """The results of a program for each key `[B, S, K, W]`, over tiles of queries and heads."""

    @abc.abstractmethod
    def of_rows(self, f: Callable[[Blocks], Array], rows: Blocks) -> Array:
        """One number per row, `[B, T, N]`: `f` maps a tile of rows to numbers."""

    @abc.abstractmethod
    def computed(self, f: Callable[..., Any], *args: Any) -> Any:
        """`f(*args)` of arrays, by the rules of tile programs."""

    def width_of(self, width: int) -> int:
        """The width of a tile of an array that is `width` wide."""
        return width

    @functools.cached_property
    def key_slots(self) -> PositionSlots:
        positions: Any = self.operands.tokens.key_positions
        return PositionSlots(positions, LEAF, self.counted, self._in_order)

    @functools.cached_property
    def query_slots(self) -> PositionSlots:
        positions: Any = self.operands.tokens.query_positions
        return PositionSlots(positions, self.query_tile, self.counted, False)

    @functools.cached_property
    def key_ids(self) -> Ids:
        return self._in_slots(self.key_slots, self.operands.tokens.key_segments)

    @functools.cached_property
    def query_ids(self) -> Ids:
        return self._in_slots(self.query_slots, self.operands.tokens.query_segments)

    def _in_slots(self, slots: PositionSlots, segments: Array | None) -> Ids:
        return slots.positions, None if segments is None else slots.spread(segments, -1)

    def meets(self, rows: Ids) -> Bool[Array, "_ tiles leaves"]:
        """Whether a tile of rows may see a key of a leaf."""
        (positions, of_rows), (at, of_keys) = rows, self.key_ids
        segments = None if of_rows is None or of_keys is None else (of_rows, of_keys)
        return meeting(self.mask, (positions, at), segments)  # pyright: ignore[reportReturnType]

    def empty(self, *shape: int, fill: float = 0.0) -> Array:
        return lax.full_like(self.operands.query, fill, shape=shape, dtype=self.dtype)

    def of_heads(self, x: Array | None, absent: float) -> Float[Array, "B T N"] | None:
        """Broadcasts `[N]` or `[B, N]` to rows, with `absent` where a query is absent."""
        positions = self.operands.tokens.query_positions
        if x is None or positions is None:
            return None
        x = unfused(jnp.atleast_2d(x).astype(self.dtype))[:, None]
        x = jnp.where(positions[:, :, None] >= 0, x, absent)
        return jnp.broadcast_to(x, self.operands.query.shape[:3])

    def sink(self) -> Float[Array, "B T N"] | None:
        return self.of_heads(self.operands.sink, -jnp.inf)

    def node_numbers(self, leaves: int) -> Int[Array, "b nodes"]:
        """The number of one leaf per run of `leaves` leaves; -1 for a run without keys."""
        key_slots = self.key_slots
        numbers = jnp.where((key_slots.positions >= 0).any(-1), key_slots.numbers, -1)
        numbers = jnp.pad(numbers, ((0, 0), (0, -key_slots.tiles % leaves)), constant_values=-1)
        numbers = numbers.reshape(len(numbers), -1, leaves).max(-1)
        return jnp.broadcast_to(numbers, (self.batch, numbers.shape[1]))

    def at_keys(self, x: Array) -> Array:
        """Sums over queries `[B, slots, ...]` of the keys in slots, `[B, S, ...]`."""
        x = jax.vmap(self.key_slots.taken)(x, jnp.arange(len(x), dtype=jnp.int32))
        return self.query_slots.checked(self.key_slots.checked(x))


def rounded(arrays: PyTree[Array]) -> Any:
    """Rounds floating arrays, so that XLA fuses no product in them with a sum that follows."""
    return jax.tree.map(lambda x: unfused(x) if floating(x) else x, arrays)


def not_none(**arrays: Array | None) -> Blocks:
    return {name: x for name, x in arrays.items() if x is not None}


def empty_like(settings: Settings, operands: Operands) -> AttentionState:
    """The state of no keys, with the types of the state of `operands`."""
    shape = (*operands.query.shape[:-1], operands.value.shape[-1])
    out = lax.full_like(operands.value, 0.0, shape=shape, dtype=out_dtype(operands, settings))
    dtype = lse_dtype(operands.query.dtype)
    return AttentionState(out, lax.full_like(out, -jnp.inf, shape=shape[:-1], dtype=dtype))
