"""Merges the covariances of all devices by the law of total covariance, in one reduction."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState, CovarianceState
from energy_attn.kernels.internal import (
    AbstractFunction,
    covariance_term,
    function_call,
    share,
    with_zeros,
)

from ._abstract import AbstractMessageMerge, Axes
from ._packing import as_invariant, transfer
from ._strategies import COVARIANCE_MERGES, STRATEGIES


def check_covariance_merge(merge: str) -> None:
    """Raises `ValueError` for strategies that do not fold covariances.

    Those are sums, which would need the mean of all keys first.
    """
    if merge not in (*COVARIANCE_MERGES, "auto"):
        names = ", ".join(map(repr, COVARIANCE_MERGES))
        raise ValueError(f"merge: wanted {names} or 'auto' for covariances, got {merge!r}")


def covariance_merge(merge: str) -> str:
    """The named strategy if it folds covariances, else the butterfly."""
    return merge if merge in COVARIANCE_MERGES else "butterfly"


def merge_covariances(merge: str, axes: Axes, state: CovarianceState) -> CovarianceState:
    """The covariance state of all keys, equal on all devices; differentiable."""
    return function_call(_CovarianceFold(merge, axes), state)


@dataclasses.dataclass(frozen=True)
class _CovarianceFold(AbstractFunction):
    merge: str
    axes: Axes

    def apply(self, args: CovarianceState) -> CovarianceState:
        return _merged(self.merge, self.axes, args)

    def jvp(
        self, primals: CovarianceState, tangents: Any
    ) -> tuple[CovarianceState, CovarianceState]:
        merged: CovarianceState = function_call(self, primals)
        return merged, _tangent(self.axes, primals, merged, with_zeros(tangents, primals))


def _merged(merge: str, axes: Axes, state: CovarianceState) -> CovarianceState:
    strategy = STRATEGIES[merge]
    assert isinstance(strategy, AbstractMessageMerge)
    width, dtype = state.out.shape[-1], state.out.dtype
    message = _packed(CovarianceState(*(x.astype(state.lse.dtype) for x in state)))
    unpack = functools.partial(_unpacked, width=width)
    covariance_state = strategy.fold_messages(message, axes, unpack, _packed)
    covariance, out, lse = as_invariant(covariance_state, axes)
    return CovarianceState(covariance.astype(dtype), out.astype(dtype), lse)


# With w = e^{F_i - F} and d = out_i - out, all sums over the devices,
#     dF = Σ w dF_i,   dout = Σ w (dout_i + d dF_i),
#     dΣ = Σ w (dΣ_i + (Σ_i + d dᵀ - Σ) dF_i + d dout_iᵀ + dout_i dᵀ),
# as the terms of the change of the common mean cancel: Σ w d = 0.
def _tangent(
    axes: Axes, state: CovarianceState, merged: CovarianceState, change: CovarianceState
) -> CovarianceState:
    merged_state = AttentionState(merged.out, merged.lse)
    dtype = state.lse.dtype
    weight = share(state.lse, merged.lse)
    present = weight != 0
    energy = jnp.where(present, change.lse, 0.0)
    offset = state.out.astype(dtype) - merged.out.astype(dtype)
    d_out = change.out.astype(dtype)
    outer = offset[..., :, None] * d_out[..., None, :]
    d_weights = covariance_term(state, merged_state) - weight[
        ..., None, None
    ] * merged.covariance.astype(dtype)
    d_covariance = change.covariance.astype(dtype) + outer + outer.swapaxes(-1, -2)
    covariance = weight[..., None, None] * d_covariance + d_weights * energy[..., None, None]
    out = weight[..., None] * (d_out + offset * energy[..., None])
    terms = CovarianceState(
        jnp.where(present[..., None, None], covariance, 0.0),
        jnp.where(present[..., None], out, 0.0),
        weight * energy,
    )
    summed = transfer(lambda x: lax.psum(x, axes), _packed(terms))
    d_state = _unpacked(summed, state.out.shape[-1])
    return CovarianceState(*(x.astype(y.dtype) for x, y in zip(d_state, state, strict=True)))


# A covariance state is sent with `out` and the covariance concatenated.
def _packed(state: CovarianceState) -> AttentionState:
    flat: Array = state.covariance.reshape(*state.lse.shape, state.out.shape[-1] ** 2)
    return AttentionState(jnp.concatenate([state.out, flat], -1), state.lse)


def _unpacked(message: AttentionState, width: int) -> CovarianceState:
    out, flat = message.out[..., :width], message.out[..., width:]
    return CovarianceState(flat.reshape(*out.shape, width), out, message.lse)
