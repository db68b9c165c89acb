"""Keys drawn from the attention weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from energy_attn.distributed.internal import Axes, Reduction, ShardingPlan, as_invariant
from energy_attn.kernels.internal import (
    Draw,
    Operands,
    Settings,
    check_integer,
    check_key,
    fold_in_seeds,
    merge_draws,
    sample,
    uniform,
)

from ..core._free_energy import check_at
from ._at_source import HashablePartial, prepare_with_source, run_reduction


def sample_keys(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    source: Float[Array, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    rng: PRNGKeyArray,
    num_samples: int = 1,
    **options: Any,
) -> Int[Array, "*B T N num_samples"]:
    r"""Draws keys for each query and head from its attention weights, without their matrix.

    $$a \sim P_\zeta, \qquad P_{\zeta,a} = e^{s_a + \zeta \cdot v_a - F(\zeta)}$$

    One pass over blocks of keys. A draw from the union of two key sets is the draw from the second
    with probability $e^{F_2 - F}$, else the draw from the first; draws are merged over a mesh in the
    same way. Draws are independent, with replacement; the mean of the drawn values converges to
    attention. There is no derivative.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, any floating dtype.
        key: `[B, S, K, H]` or `[S, K, H]`; `K` divides `N`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`; used only with a source.
        source: $\zeta$, `[B, T, N, Hv]`; None is zero.
        bias: added to the scaled scores, as in [`free_energy`][energy_attn.free_energy].
        mask: boolean, likewise.
        rng: a `jax.random.key`.
        num_samples: draws for each query and head.
        **options: as for [`free_energy`][energy_attn.free_energy]. `implementation` is checked and
            otherwise ignored: there is one implementation, of XLA operations.

    Returns:
        int32 `[B, T, N, num_samples]`: indices along the axis of the keys; -1 for a fully masked
        row.

    Raises:
        TypeError: an argument is not an array or has the wrong dtype, `rng` is not a key, or an
            unknown option.
        ValueError: shapes that do not match, or `num_samples` below 1.

    Source: reservoir sampling, Chao (Biometrika 69, 1982).

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> drawn = ea.sample_keys(q, k, v, is_causal=True, rng=jax.random.key(1), num_samples=3)
        >>> drawn.shape, drawn[0].tolist()  # the first query sees only the first key
        ((5, 2, 3), [[0, 0, 0], [0, 0, 0]])
    """
    check_integer("num_samples", num_samples, 1)
    check_key("rng", rng)
    call, source, arrays = prepare_with_source(query, key, value, source, bias, mask, **options)
    arrays, source = lax.stop_gradient((arrays, source))
    seeds = jax.random.bits(rng, (*arrays.query.shape[:-1], 2), jnp.uint32)
    axes = () if call.plan is None else call.plan.sequence
    reduction = Reduction(HashablePartial(_drawn, (num_samples, axes)), _fold_draws)
    return run_reduction(call, reduction, check_at(call, source, arrays), seeds)[0].indices


def _drawn(
    number: int, axes: Axes, settings: Settings, operands: Operands, seeds: Array
) -> tuple[Draw, Array]:
    index, lse = sample(number, settings, operands, seeds)
    if axes:  # devices hold equal numbers of keys, in order
        first = lax.axis_index(axes).astype(jnp.int32) * operands.key.shape[1]
        index = jnp.where(index < 0, -1, index + first)
    return Draw(index, lse), seeds


def _fold_draws(found: tuple[Draw, Array], axes: Axes, plan: ShardingPlan) -> tuple[Draw, Array]:
    del plan
    mine, seeds = found
    parts: Draw = jax.tree.map(lambda x: lax.all_gather(x, axes), mine)
    devices = lax.axis_size(axes)
    # All devices draw with the same random numbers, which does no harm, since one device's draw is
    # chosen. It is chosen with numbers that no block uses.
    shape = devices, mine.indices.shape[-1]
    chances = uniform(fold_in_seeds(seeds, jnp.iinfo(jnp.int32).max), shape, mine.lse.dtype)

    def fold(drawn: Draw, i: Array) -> tuple[Draw, None]:
        return merge_draws(drawn, Draw(parts.indices[i], parts.lse[i]), chances[..., i, :]), None

    first = Draw(parts.indices[0], parts.lse[0])
    drawn, _ = lax.scan(fold, first, jnp.arange(1, devices))
    return as_invariant(drawn, axes), as_invariant(seeds, axes)
