"""Tree attention: local kernels, then one associative reduction over the mesh."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from energy_attn.kernels import AttentionState, Operands
from energy_attn.kernels.internal import attend

from ..cost._network import Derivatives, Topology, Transfer, Transfers
from ..cost._shape import Shape, local_rows, tangent_bytes
from ..merge._abstract import AbstractMerge, Axes
from ..merge._across import check_topology, fold_across, resolve_merge
from ..merge._strategies import STRATEGIES, MergeOption, check_merge, fastest_merge
from ._abstract import AbstractMethod, LocalCall, SeenPairs, Split, rounded, with_all_queries


@dataclasses.dataclass(frozen=True)
class Tree(AbstractMethod):
    r"""Computes the states of each device's own keys locally, and folds them in one reduction.

    $$F(\zeta) = \log \sum_i e^{F_i(\zeta)}, \qquad
      F_i(\zeta) = \log \sum_{a \in \text{shard } i} \exp(\mathrm{scale}\; q\cdot k_a + \zeta\cdot v_a)$$

    Replicated queries ([`merge_across`][energy_attn.distributed.merge_across]): $O(B T N H)$ bytes,
    whatever the number of keys. Keys and values stay local in all derivatives. In reverse mode the
    query's gradient is one `psum`; in forward mode the tangent is one all-reduce of
    $B T N (H + 1)$ numbers, whatever the merge.

    Sharded queries are gathered. The states of all queries, $B T N (H + 1)$ numbers, are reduced and scattered, so
    that each device keeps the states of its own. Each device sends $\frac{p-1}{p} B T N (2H + 1)$ numbers,
    where a ring sends $\frac{p-1}{p} B S K \cdot 2H$: as many if every head has its own keys ($K = N$).
    States are sent in `lse`'s dtype, and rounded once.

    In [`sharded_attention`][energy_attn.distributed.sharded_attention] bias and mask are for all queries and this
    device's keys, broadcastable to `[B, N, p T, S]`, or `[B, N, T, S]` for replicated queries.

    Attributes:
        merge: how states are folded; see [`merge_across`][energy_attn.distributed.merge_across].
            For sharded queries `"allreduce"` is a pmax of `lse` and a reduce-scatter of
            sums, and every other strategy one all-to-all of states.
        topology: the network of the axes, for `merge="auto"`; None: the usual one of the platform in use.

    Source: Tree Attention (arXiv 2408.04093), Algorithm 3.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import make_mesh, methods, sharded_attention
        >>> n = jax.device_count()
        >>> q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3 * n, 2, 4))
        >>> sharded = jax.P(None, "device")
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     f = jax.shard_map(
        ...         lambda q, k: sharded_attention(
        ...             q, k, k, axis_name="device", method=methods.Tree("allreduce")
        ...         ),
        ...         in_specs=(jax.P(), sharded), out_specs=jax.P(),
        ...     )
        ...     bool(jnp.allclose(f(q, k).out, 1))
        True
    """

    merge: MergeOption = "auto"
    topology: Topology | None = None

    name = "tree"
    replicated_queries = True
    takes_halo = True

    def check_axes(self, axes: Sequence[object]) -> None:
        check_merge(self.merge, len(axes))
        check_topology(self.topology, len(axes))

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        del operands  # bias and mask of a device's keys are for all queries
        return Split(heads=(), queries=(), keys=axes, rows=axes if queries_sharded else ())

    def attend(self, call: LocalCall) -> AttentionState:
        policy, settings, operands, axes, queries_sharded, _ = call
        whole = with_all_queries(operands, axes) if queries_sharded else operands
        # the leaves of the reduction: out_i = ∇F_i and F_i, of the keys of shard i
        state = attend(policy.kernels, settings.needing(unrounded=True), whole)
        # F = log Σ e^{F_i} and out = Σ e^{F_i - F} out_i, for all queries or for this device's own
        if queries_sharded:
            shape = lax.axis_size(axes), operands.query.shape[1]
            by_device = jax.tree.map(
                lambda x: jnp.moveaxis(x.reshape(len(x), *shape, *x.shape[2:]), 1, 0), state
            )
            state = _scattering(self.merge).scatter(by_device, axes)
        else:
            merge = resolve_merge(self.merge, state, axes, self.topology)
            state = fold_across(merge, axes, state)
        return rounded(state, operands, settings)

    def transfers(self, shape: Shape, topology: Topology, derivatives: Derivatives) -> Transfers:
        rows, axes = local_rows(shape, topology), topology.axes
        if not shape.queries_sharded:
            merge = fastest_merge(shape, topology) if self.merge == "auto" else self.merge
            yield from STRATEGIES[merge].transfers(shape, topology)
            yield from [Transfer("all-reduce", rows * shape.state, axes)] * derivatives.tangent
            return
        query, scatter = rows * shape.width * shape.bytes, _scattering(self.merge)
        folds = tuple(scatter.scatter_transfers(rows * topology.devices, shape, topology))
        yield Transfer("all-gather", query, axes)
        yield from folds
        if derivatives.tangent:
            yield Transfer("all-gather", tangent_bytes(query, shape), axes)
            yield from (fold for fold in folds if fold.kind != "all-reduce")  # without the maximum

    @classmethod
    def variants(cls) -> Mapping[str | None, AbstractMethod]:
        make: Any = cls  # from a name of the list, which types do not tell
        return {merge: make(merge) for merge in STRATEGIES}

    @property
    def is_automatic(self) -> bool:
        return self.merge == "auto" or STRATEGIES[self.merge].automatic

    @property
    def sends_gradient(self) -> bool:
        return False

    def pairs(self, seen: SeenPairs, size: int) -> list[np.ndarray]:
        return [seen(0, size).sum(0)]

    def state_rows(self, shape: Shape, topology: Topology) -> int:
        rows = local_rows(shape, topology)
        return rows * topology.devices if shape.queries_sharded else rows


def _scattering(merge: str) -> AbstractMerge:
    return STRATEGIES["gather" if merge == "auto" else merge]
