"""A routed MLP: the router, and the experts, with tokens sorted by expert and none dropped."""

import math
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import is_static, lse_dtype, mesh_axes, rows_of_groups

from ..decoder._config import AbstractExperts
from ._config import LlamaConfig
from ._layers import LlamaMLP, activated, dot
from ._variant import ExpertsConfig

_DIMENSIONS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
# Rows of a tile: a few for each group where there are few rows, as a tile is computed whole.
_LEAST, _MOST = 8, 64
_ANY = 32  # where the number of rows is a symbol


def grouped_dot(
    x: Float[Array, "rows in"], weight: Float[Array, "groups out in"], sizes: Int[Array, " groups"]
) -> Float[Array, "rows out"]:
    """Multiplies each row by the transpose of its group's matrix, in float32 or wider; rows after all groups are 0."""
    # inside a `shard_map`, the derivative with respect to a replicated array is a sum over devices
    return _grouped_dot(*mesh_axes.vary_together((x, weight, sizes)))


@jax.custom_jvp
def _grouped_dot(x: Array, weight: Array, sizes: Array) -> Array:
    # XLA on CPUs multiplies all rows by all matrices, a masked copy of the rows for each
    return lax.platform_dependent(x, weight, sizes, cpu=_tiles, default=_ragged)


@_grouped_dot.defjvp
def _derivative(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (x, weight, sizes), (dx, dweight, _) = primals, tangents
    out = _grouped_dot(x, weight, sizes)
    return out, _ragged(dx, weight, sizes) + _ragged(x, dweight, sizes)


def _ragged(x: Array, weight: Array, sizes: Array) -> Array:
    kind = lse_dtype(x.dtype)
    return lax.ragged_dot_general(x, weight, sizes, _DIMENSIONS, preferred_element_type=kind)


def _tiles(x: Array, weight: Array, sizes: Array) -> Array:
    kind, rows = lse_dtype(x.dtype), x.shape[0]

    def dot(part: Array, matrix: Array) -> Array:
        axes = ((1,), (1,)), ((), ())
        return lax.dot_general(part, matrix, axes, preferred_element_type=kind)

    if is_static(rows):
        tile = min(rows, max(_LEAST, min(_MOST, rows // len(weight))))
        return rows_of_groups(dot, x, weight, sizes, tile)
    x = jnp.pad(x, ((0, _ANY), (0, 0)))  # a tile may have more rows than there are
    return rows_of_groups(dot, x, weight, sizes, _ANY)[:rows]


class Router(eqx.Module):
    """Scores experts: chooses those that a token goes to, and their weights."""

    weight: Float[Array, "experts width"]
    bias: Float[Array, " experts"] | None
    e_score_correction_bias: Float[Array, " experts"] | None
    config: ExpertsConfig = eqx.field(static=True)

    def __init__(self, width: int, config: ExpertsConfig, dtype: DTypeLike, *, key: PRNGKeyArray):
        count = config.num_experts
        self.weight = 0.02 * jax.random.normal(key, (count, width), dtype)
        self.bias = jnp.zeros(count, dtype) if config.bias else None
        # float32 at least, as it decides between experts of nearly equal scores
        is_sigmoid = config.scoring == "sigmoid"
        self.e_score_correction_bias = jnp.zeros(count, lse_dtype(dtype)) if is_sigmoid else None
        self.config = config

    def __call__(
        self, x: Float[Array, "tokens width"]
    ) -> tuple[Float[Array, "tokens chosen"], Int[Array, "tokens chosen"]]:
        config = self.config
        logits = dot(x, self.weight)
        if self.bias is not None:
            logits += self.bias.astype(logits.dtype)[None]
        scores = jax.nn.softmax(logits) if config.scoring == "softmax" else jax.nn.sigmoid(logits)
        rank = scores
        if self.e_score_correction_bias is not None:
            rank = scores + self.e_score_correction_bias.astype(scores.dtype)[None]
        _, chosen = lax.top_k(self._in_groups(rank), config.num_experts_per_tok)
        weights = jnp.take_along_axis(scores, chosen, 1)
        if config.norm_topk_prob:
            weights /= weights.sum(1, keepdims=True)
        return weights * config.routed_scaling_factor, chosen

    def _in_groups(self, rank: Array) -> Array:
        """The scores that rank experts, -inf outside of the best groups."""
        config = self.config
        if config.topk_group == config.n_group:
            return rank
        grouped = rank.reshape(rank.shape[0], config.n_group, -1)
        best = lax.top_k(grouped, 2)[0].sum(2)
        _, groups = lax.top_k(best, config.topk_group)
        each = jnp.arange(config.n_group, dtype=groups.dtype)
        inside = (groups[:, :, None] == each[None, None]).any(1)
        return jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(rank.shape)


class Experts(AbstractExperts):
    gate_proj: Float[Array, "experts inner width"]
    up_proj: Float[Array, "experts inner width"]
    down_proj: Float[Array, "experts width inner"]
    gate_proj_bias: Float[Array, "experts inner"] | None
    up_proj_bias: Float[Array, "experts inner"] | None
    down_proj_bias: Float[Array, "experts width"] | None
    config: ExpertsConfig = eqx.field(static=True)
    activation: str = eqx.field(static=True)
    axis: str | None = eqx.field(static=True, default=None)

    def __call__(
        self, x: Float[Array, "rows width"], expert: Int[Array, " rows"]
    ) -> Float[Array, "rows width"]:
        """Applies an expert to each row, with rows sorted by expert; zeros for a number without an expert."""
        count = len(self.gate_proj)
        sizes = jnp.bincount(expert, length=count + 1)[:count].astype(jnp.int32)
        gate = _linear(x, self.gate_proj, self.gate_proj_bias, expert, sizes)
        up = _linear(x, self.up_proj, self.up_proj_bias, expert, sizes)
        limit = self.config.swiglu_limit
        if limit is None:
            inner = activated(self.activation, gate) * up
        else:
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
            inner = (up + 1) * gate * jax.nn.sigmoid(self.config.swiglu_alpha * gate)
        return _linear(inner, self.down_proj, self.down_proj_bias, expert, sizes)


def _linear(x: Array, weight: Array, bias: Array | None, expert: Array, sizes: Array) -> Array:
    y = grouped_dot(x, weight, sizes)
    if bias is not None:
        y += bias.at[expert].get(mode="fill", fill_value=0).astype(y.dtype)
    return y.astype(x.dtype)


class RoutedMLP(eqx.Module):
    """The weighted sum of a token's experts, plus a shared MLP if there is one.

    Each device applies its experts to its tokens, so that communication is one all-reduce over the axis of experts.
    """

    gate: Router
    experts: Experts
    shared_experts: LlamaMLP | None

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, *, key: PRNGKeyArray):
        experts, width = config.experts, config.hidden_size
        assert experts is not None
        gate, inner, shared = jax.random.split(key, 3)
        self.gate = Router(width, experts, dtype, key=gate)
        up = experts.num_experts, experts.intermediate_size, width
        shapes = {"gate_proj": up, "up_proj": up, "down_proj": (up[0], width, up[1])}
        arrays: dict[str, Any] = {}
        for part, (name, shape) in zip(jax.random.split(inner, 3), shapes.items(), strict=True):
            arrays[name] = 0.02 * jax.random.normal(part, shape, dtype)
            arrays[f"{name}_bias"] = jnp.zeros(shape[:2], dtype) if experts.bias else None
        self.experts = Experts(**arrays, config=experts, activation=config.hidden_act)
        width = experts.n_shared_experts * experts.intermediate_size
        self.shared_experts = LlamaMLP(config, dtype, width, key=shared) if width else None

    def __call__(
        self, x: Float[Array, "batch time width"], parallel: SequenceParallel | None = None
    ) -> Float[Array, "batch time width"]:
        """The MLP's contribution to the residual stream; `parallel` says how `x` is sharded."""
        mesh = jax.sharding.get_abstract_mesh()
        axis = self.experts.axis if self.experts.axis in mesh.axis_names else None
        # the axes that rows and tokens are sharded over, if their sizes divide
        parts = []
        split = () if parallel is None else (parallel.batch, parallel.axes)
        for size, axes in zip(x.shape, split, strict=False):
            count = math.prod(mesh.shape[name] for name in axes)
            parts.append(axes if size % count == 0 else ())
        names = {name for part in parts for name in part} | ({axis} if axis else set())
        through = partial(_through, axis=axis)
        if names and not names & set(mesh.manual_axes):
            tokens = PartitionSpec(*(part or None for part in parts))
            through = jax.shard_map(
                through,
                mesh=mesh,
                in_specs=(PartitionSpec(), PartitionSpec(axis), tokens),
                out_specs=tokens,
                axis_names=names,
            )
        y = through(self.gate, self.experts, x)
        return y if self.shared_experts is None else y + self.shared_experts(x)


def _through(gate: Router, experts: Experts, x: Array, *, axis: str | None) -> Array:
    """The weighted sum of the chosen experts of each token `[B, T, width]`; with an axis, `experts` is a shard."""
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = gate(tokens)
    local, count = len(experts.gate_proj), chosen.shape[1]
    # this device's experts first, then all others under one number
    index = lax.collapse(chosen, 0)
    if axis is not None:
        index = index - local * lax.axis_index(axis)
        index = jnp.where((index < 0) | (index >= local), local, index)
    # devices take different tokens, whose derivatives are summed over the axis (red without: `test_over_devices`)
    index, tokens = mesh_axes.vary_together((index, tokens))
    order = jnp.argsort(index, stable=True)
    out = experts(tokens[order // count], index[order])
    # back in the order of tokens, so that a token's experts are added in a fixed order
    back = out[jnp.argsort(order)].reshape(*chosen.shape, x.shape[-1])
    y = (back.astype(weights.dtype) * weights[:, :, None]).sum(1)
    y = y if axis is None else lax.psum(y, axis)
    return y.astype(x.dtype).reshape(x.shape)
