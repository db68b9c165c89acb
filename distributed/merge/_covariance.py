"""Folding the covariances of all devices, by the law of total covariance, in one reduction."""

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
    """Raises `ValueError` for a checked `merge=` by which covariances do not fold.

    They do not by a sum, which would need the mean of all keys beforehand.
    """
    if merge not in (*COVARIANCE_MERGES, "auto"):
        known = ", ".join(map(repr, COVARIANCE_MERGES))
        raise ValueError(f"merge: wanted {known} or 'auto' for covariances, got {merge!r}")


def covariance_merge(merge: str) -> str:
    """The strategy for covariances: the one that is named if they fold by it, else the butterfly."""
    return merge if merge in COVARIANCE_MERGES else "butterfly"


def merge_covariances(merge: str, axes: Axes, state: CovarianceState) -> CovarianceState:
    """The covariance state of all keys, equal on all devices; differentiable."""
    return function_call(_Fold(merge, axes), state)


@dataclasses.dataclass(frozen=True)
class _Fold(AbstractFunction):
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
    found = strategy.fold_messages(message, axes, unpack, _packed)
    covariance, out, lse = as_invariant(found, axes)
    return CovarianceState(covariance.astype(dtype), out.astype(dtype), lse)


# With w = e^{F_i - F} and d = out_i - out, all sums over the devices,
#     dF = Σ w dF_i,   dout = Σ w (dout_i + d dF_i),
#     dΣ = Σ w (dΣ_i + (Σ_i + d dᵀ - Σ) dF_i + d dout_iᵀ + dout_i dᵀ),
# as the terms of the change of the common mean cancel: Σ w d = 0.
def _tangent(
    axes: Axes, state: CovarianceState, merged: CovarianceState, change: CovarianceState
) -> CovarianceState:
    whole = AttentionState(merged.out, merged.lse)
    dtype = state.lse.dtype
    portion = share(state.lse, merged.lse)
    present = portion != 0
    energy = jnp.where(present, change.lse, 0.0)
    apart = state.out.astype(dtype) - merged.out.astype(dtype)
    moved = change.out.astype(dtype)
    crossed = apart[..., :, None] * moved[..., None, :]
    excess = covariance_term(state, whole) - portion[..., None, None] * merged.covariance.astype(
        dtype
    )
    own = change.covariance.astype(dtype) + crossed + crossed.swapaxes(-1, -2)
    covariance = portion[..., None, None] * own + excess * energy[..., None, None]
    out = portion[..., None] * (moved + apart * energy[..., None])
    here = CovarianceState(
        jnp.where(present[..., None, None], covariance, 0.0),
        jnp.where(present[..., None], out, 0.0),
        portion * energy,
    )
    summed = transfer(lambda x: lax.psum(x, axes), _packed(here))
    found = _unpacked(summed, state.out.shape[-1])
    return CovarianceState(*(x.astype(y.dtype) for x, y in zip(found, state, strict=True)))


# A state as a message: one line of numbers for each row.
def _packed(state: CovarianceState) -> AttentionState:
    flat: Array = state.covariance.reshape(*state.lse.shape, state.out.shape[-1] ** 2)
    return AttentionState(jnp.concatenate([state.out, flat], -1), state.lse)


def _unpacked(message: AttentionState, width: int) -> CovarianceState:
    out, flat = message.out[..., :width], message.out[..., width:]
    return CovarianceState(flat.reshape(*out.shape, width), out, message.lse)
