"""Attention over a mesh, with the bits of attention on one device."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, KernelCall, Operands
from energy_attn.kernels.internal import (
    LEAF,
    Canonical,
    autodiff,
    canonical_tree,
    check_call_of,
    derivatives,
    floating,
    mesh_axes,
    over_keys,
)

from ..cost._network import Derivatives, Topology, Transfer, Transfers
from ..cost._shape import Shape, kv_shard, local_rows
from ..merge._abstract import Axes, as_invariant, joined, moved
from ._abstract import AbstractMethod, LocalCall, Split, with_all_queries
from ._halo import run_length

Arrays = TypeVar("Arrays")

# Keys and values of all devices that take fewer bytes are gathered at once.
LEAST = 8 << 20


@dataclasses.dataclass(frozen=True)
class Reproducible(AbstractMethod):
    """Gathers all keys for a device's queries, and all queries for the gradients of its keys.

    Each device folds whole trees over the keys: no sum is split over devices, and a row has the bits that it has on
    one device.
    """

    # Where queries are replicated and each device has whole leaves of keys, each folds the nodes over its own keys.
    # Only the nodes are gathered, whose size does not depend on the number of keys.
    name = "reproducible"
    is_option = False
    replicated_queries = True
    reads_positions = True
    receive_buffers = 1

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        del operands
        queries = axes if queries_sharded else ()
        return Split(heads=(), queries=queries, keys=axes, rows=queries)

    def attend(self, call: LocalCall) -> AttentionState:
        """Raises as `check_call_of` does."""
        policy, settings, operands, axes, queries_sharded, others = call
        operands = operands.positioned()
        kernel = _ShardedCanonical(policy.run, axes, queries_sharded, others)
        check_call_of(kernel, KernelCall(operands, settings))
        # The derivative of a cast to varying is a sum over devices. The kernel sums over the axes that it knows, in
        # the order of the canonical tree, so that only the other axes are cast.
        varying = frozenset().union(*map(mesh_axes.varying_axes, jax.tree.leaves(operands))) - set(
            axes
        )
        shared = mesh_axes.vary_over(varying - set(others), (operands.score_arrays, operands.sink))
        operands = mesh_axes.vary_over(varying, operands)._replace(
            score_arrays=shared[0], sink=shared[1]
        )
        run = functools.partial(autodiff.function_call, derivatives.Attention((kernel,), settings))
        if kernel.folds_own_keys or any(map(floating, operands.score_arrays)):
            return run(operands)
        return _by_heads(run, operands, lax.axis_size(axes))

    def transfers(self, shape: Shape, topology: Topology, derivatives: Derivatives) -> Transfers:
        tangent, gradient = derivatives
        devices, axes, rows = topology.devices, topology.axes, local_rows(shape, topology)
        share = -(-shape.keys // devices)
        run = run_length(shape.layout, share)
        if not shape.queries_sharded and run is not None and run % LEAF == 0:
            # the nodes over a device's own keys, for each row, and their indices
            nodes = share // (run & -run) if run else 0
            state = shape.out_width, 1, 1  # numerator, denominator, maximum
            widths = [*state, *(state if tangent else ()), *([shape.width] if gradient else ())]
            gathered = [4 * nodes * shape.batch]
            gathered += [nodes * rows * width * shape.lse_bytes for width in widths]
            yield from (Transfer("all-gather", size, axes) for size in gathered if size)
            return
        # positions, keys and values; for gradients of keys the arrays of sharded rows, too
        sizes = kv_shard(shape, topology)
        yield Transfer("all-gather", 4 * share, axes)
        if gradient and shape.queries_sharded and shape.queries != shape.keys:
            yield Transfer("all-gather", 4 * -(-shape.queries // devices), axes)
        groups = _head_groups(sum(sizes), shape.kv_heads, devices)
        # The backward uses the forward's keys, unless heads are gathered in groups. A tangent gathers directions.
        gathered = [*sizes] * (1 + (tangent or (gradient and groups > 1)))
        if gradient and shape.queries_sharded:
            numbers = shape.width * shape.bytes, shape.out_width * shape.bytes, shape.lse_bytes
            query, out, lse = (rows * x for x in numbers)
            gathered += [query, out, out, lse, lse]  # and cotangents
        yield from (Transfer("all-gather", x // groups, axes, groups) for x in gathered if x)

    def replaces_kernels(self, operands: Operands) -> bool:
        return operands.sink is not None or any(map(floating, operands.score_arrays))


def _by_heads(
    run: Callable[[Operands], AttentionState], operands: Operands, devices: int
) -> AttentionState:
    """Runs groups of heads one after the other, so that the gathered keys of one group take little memory."""
    shard = sum(x.size * x.dtype.itemsize for x in (operands.key, operands.value))
    groups = _head_groups(shard, operands.key.shape[2], devices)
    if groups == 1:
        return run(operands)

    def split(x: Array, axis: int) -> Array:
        axis %= x.ndim
        x = x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    axes = {"query": 2, "key": 2, "value": 2, "sink": -1}
    axes = {name: axis for name, axis in axes.items() if getattr(operands, name) is not None}
    arrays = {name: split(getattr(operands, name), axis) for name, axis in axes.items()}

    def run_group(arrays: dict[str, Array]) -> AttentionState:
        indices = operands.indices._replace(heads=arrays.pop("heads"))
        return run(operands._replace(**arrays, indices=indices))

    states = lax.map(run_group, arrays | {"heads": split(operands.part_indices()[1], 0)})
    return jax.tree.map(lambda x: lax.collapse(jnp.moveaxis(x, 0, 2), 2, 4), states)


def _head_groups(shard: int, heads: int, devices: int) -> int:
    """The number of groups of heads in which keys of `shard` bytes on a device are gathered."""
    # a group takes at most twice the memory of a shard, or LEAST bytes
    least = max(1, -(-shard * devices // max(2 * shard, LEAST)))
    return next((n for n in range(least, heads) if heads % n == 0), heads)


@dataclasses.dataclass(frozen=True)
class _ShardedCanonical(Canonical):
    """The canonical kernel over keys that are sharded along `axes`, inside `jax.shard_map`."""

    axes: Axes = ()
    queries_sharded: bool = False
    others: Axes = ()  # over which batch and heads may be sharded

    @property
    def in_order(self) -> bool:
        """Keys gathered from all devices are not sorted by position."""
        return self.folds_own_keys and super().in_order

    @property
    def folds_own_keys(self) -> bool:
        """Whether each device folds the trees over its own keys."""
        return not self.queries_sharded and super().in_order

    def check(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` for array `bias` or `mask`: each device holds only a shard of them."""
        super().check(call)
        for name in ("bias", "mask"):
            if getattr(call.operands, name) is not None:
                raise NotImplementedError(
                    f"{name}: wanted None with reproducible=True where keys are sharded, got an array; "
                    "energy_attn.masks and energy_attn.scores will do"
                )

    def forward_and_rest(self, call: KernelCall) -> tuple[AttentionState, Array]:
        return self._fold(over_keys.STATE, call)

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        state, directions = mesh_axes.vary_together((state, directions), self.axes)
        if not self.folds_own_keys:
            key, value = self._all((directions.key, directions.value))
            directions = directions._replace(key=key, value=value)
        return self._fold(over_keys.TANGENT, call, state, directions)

    def query_cotangent(self, call: KernelCall, *states: AttentionState) -> Array:
        return self._fold(
            over_keys.QUERY_COTANGENT, call, *mesh_axes.vary_together(states, self.axes)
        )

    # dK and dV of a device's own keys, over the queries of all devices
    def key_cotangents(self, call: KernelCall, *states: AttentionState) -> tuple[Array, Array]:
        operands, states = self._with_all_queries(call.operands, states)
        return over_keys.CallOnDevice(operands, call.settings).key_cotangents(*states)

    # db = Σ_rows e^{b - F} (dF - dout · out): one term for each row, gathered and summed along the canonical tree
    def sink_cotangent(self, call: KernelCall, *states: AttentionState) -> Array:
        operands, states = self._varying((call.operands, states))
        terms = over_keys.CallOnDevice(operands, call.settings).sink_terms(*states)
        if self.queries_sharded:
            terms, positions = self._all((terms, operands.tokens.query_positions))
            rows = lax.full_like(operands.query, 0, shape=(*terms.shape, 1))
            tokens = operands.tokens._replace(query_positions=positions, query_segments=None)
            operands = operands._replace(query=rows, tokens=tokens)
        sums = over_keys.CallOnDevice(operands, call.settings).sink_sums(terms)
        units = canonical_tree.PerHeadSums(sums, canonical_tree.unit_numbers(operands))
        sink: Any = call.operands.sink
        shards = tuple(axis for axis in self.others if axis not in mesh_axes.varying_axes(sink))
        result = units.sums if sink.ndim == 2 else joined(units, shards, 0).of_heads()
        return as_invariant(result, self.axes + (shards if sink.ndim == 1 else ()))

    # Each device folds a share of the leaves, and the nodes are gathered.
    def array_cotangents(self, call: KernelCall, *states: AttentionState) -> tuple[Any, ...]:
        operands, states = self._with_all_queries(call.operands, states)
        operands = self._with_keys_of_all(self._varying(operands))
        share = lax.axis_index(self.axes) if self.axes else jnp.int32(0)
        shares = lax.axis_size(self.axes) if self.axes else 1
        whole = KernelCall(operands, call.settings)
        nodes = Canonical().sums(whole, *self._varying(states)).nodes_of_arrays(share, shares)
        nodes, numbers = joined(nodes, self.axes, 0)
        units = canonical_tree.PerHeadSums(
            jax.vmap(canonical_tree.tree_sum, (1, 1))(numbers, nodes),
            canonical_tree.unit_numbers(operands),
        )
        return as_invariant(joined(units, self.others, 0).summed(), self.axes + self.others)

    def _varying(self, tree: Arrays) -> Arrays:
        return mesh_axes.vary_together(tree, self.axes + self.others)

    def _with_all_queries(
        self, operands: Operands, states: tuple[AttentionState, ...]
    ) -> tuple[Operands, tuple[AttentionState, ...]]:
        operands, states = mesh_axes.vary_together((operands, states), self.axes)
        if not self.queries_sharded:
            return operands, states
        return with_all_queries(operands, self.axes), self._all(states)

    def _fold(self, fold: over_keys.FoldOfRows, call: KernelCall, *others: Any) -> Any:
        """The results for rows; their type does not vary where queries are replicated."""
        operands = mesh_axes.vary_together(call.operands, self.axes)
        operands = operands if self.folds_own_keys else self._with_keys_of_all(operands)
        of = over_keys.CallOnDevice(operands, call.settings)
        # each row folds its whole tree; or nodes over each device's keys, which are gathered and folded
        if not self.folds_own_keys or self.run is None:
            results = fold.whole(of, *others)
        else:
            nodes, numbers = fold.nodes(of, self.run, *others)
            nodes = [lax.collapse(self._stacked(x), 0, 2) for x in nodes]
            numbers = lax.collapse(self._stacked(numbers).swapaxes(0, 1), 1, 3)
            results = fold.of_nodes(of, nodes, numbers, *others)
        return results if self.queries_sharded else as_invariant(results, self.axes)

    def _stacked(self, x: Array) -> Array:
        return moved(lambda x: lax.all_gather(x, self.axes), x)

    def _with_keys_of_all(self, operands: Operands) -> Operands:
        key, value = self._all((operands.key, operands.value))
        return operands._replace(key=key, value=value, tokens=operands.tokens.map_keys(self._all))

    def _all(self, tree: Arrays) -> Arrays:
        return joined(tree, self.axes, 1)
