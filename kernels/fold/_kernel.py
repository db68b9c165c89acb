"""The kernel whose bits depend on a row and the keys that it sees alone: leaves of keys, folded by a canonical tree.

A leaf holds the keys of `LEAF` successive positions. A tile of rows meets a leaf in one program, whose rows do not
depend on how many they are, and leaves are merged by the binary tree over their numbers. A leaf of which a row sees
nothing is the identity of a merge in every bit. So neither other rows, nor where keys lie in an array and what is
beside them, change a bit.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._kernel import AbstractKernel
from ..call._leaves import LEAF
from ..call._operands import (
    KernelCall,
    Operands,
    cotangents,
    differentiated,
    map_some,
    out_dtype,
)
from ..call._state import AttentionState, divided, lse_dtype, of_each
from . import _programs as programs
from ._call import AbstractRowsFold, AbstractSchedule, given, rounded
from ._programs import Blocks, without_signs
from ._sums import PerHeadSums, sums_of_rows, unit_numbers


@dataclasses.dataclass(frozen=True)
class AbstractCanonical(AbstractKernel):
    """Bits of a row that depend on it, the keys that it sees and their positions, and on nothing else of a call.

    It knows the keys of its call alone: methods that merge the states of several devices' keys do so in an order of
    their own. It takes the sink of a call, the last partial of a row's fold. Derivatives of second order raise
    `NotImplementedError`.

    Attributes:
        run: of how many keys each run of the array is, whose positions follow each other from a multiple of that number
            on, but for absent ones, and later runs have larger positions: as in an array by position, and in blocks of
            a cache. Whole leaves are then read where they lie, as they are where no positions are given. Not checked.
            None: there are none.
    """

    run: int | None = None

    scores = True
    reproducible = True

    @abc.abstractmethod
    def schedule(self, call: KernelCall, in_order: bool) -> AbstractSchedule:
        """The platform's loops over a call, of which the keys are in runs of whole leaves or not."""

    @property
    def in_order(self) -> bool:
        """Whether runs are of whole leaves."""
        return self.run is not None and self.run % LEAF == 0

    def forward(self, call: KernelCall) -> AttentionState:
        """The softmax over leaves, merged."""
        return self.forward_and_rest(call)[0]

    def forward_and_rest(self, call: KernelCall) -> tuple[AttentionState, Array]:
        """`forward`, and the rounding error of `lse`, 0 where it is not known."""
        operands = call.operands
        if not _is_empty(operands):
            return self.state_fold(call).whole()
        sink = self.schedule(call, False).sink()
        shape = (*operands.query.shape[:3], operands.value.shape[-1])
        out = lax.full_like(operands.value, 0.0, out_dtype(operands, call.settings), shape)
        lse = lax.full_like(out, -jnp.inf, lse_dtype(operands.query.dtype), shape[:3])
        lse = lse if sink is None else sink
        return AttentionState(out, lse), jnp.zeros_like(lse)

    def corrected(self, cotangent: AttentionState, rest: Array) -> AttentionState:
        """Rounded, or XLA multiplies a constant factor of the cotangent by this one first."""
        return divided(rounded(cotangent), of_each(jnp.exp, -rest))

    def state_fold(self, call: KernelCall) -> AbstractRowsFold:
        """The state of each row over leaves, and its rest."""
        of, operands = self.schedule(call, self.in_order), call.operands
        width, dtype = operands.value.shape[-1], out_dtype(operands, call.settings)
        program = programs.softmax(of.arithmetic, of.scores(), of.width_of(width), dtype)

        def state(out: Array, lse: Array, *rest: Array) -> tuple[AttentionState, Array]:
            return AttentionState(out, lse), rest[0] if rest else jnp.zeros_like(lse)

        rows = {"query": operands.query} | given(sink=of.sink())
        return of.over_keys(of, program, rows, _keys(operands), width, state)

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        """Gradients of queries are folded over leaves, those of keys and values over tiles of queries.

        Those of a bias, of a score's arrays and of a sink are sums over all rows, computed where they are wanted.
        """
        operands, settings, _ = call
        args = call, state, cotangent
        others = jax.tree.map(jnp.zeros_like, differentiated(operands))
        if not _is_empty(operands):
            if operands.bias is not None and settings.bias_learnt:
                others = others._replace(bias=self.bias_cotangent(*args))
            if jax.tree.leaves(others.score_arrays) and settings.learnt:
                others = others._replace(score_arrays=self.array_cotangents(*args))
        has_rows = 0 not in operands.query.shape[:2]
        if operands.sink is not None and settings.sink_learnt and has_rows:
            others = others._replace(sink=self.sink_cotangent(*args))
        to_query, to_keys = self.query_cotangent(*args), self.key_cotangents(*args)
        found = cotangents(to_query, *to_keys, others.bias, others.score_arrays, others.sink)
        return map_some(lambda x, like: without_signs(x.astype(like.dtype)), found, operands)

    def query_cotangent(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        """The gradient of queries, in the dtype of the scores."""
        if _is_empty(call.operands):
            return self.schedule(call, False).empty(*call.operands.query.shape)
        return self.query_fold(call, state, cotangent).whole()

    def query_fold(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> AbstractRowsFold:
        """The gradient of each row over leaves."""
        of, width = self.schedule(call, self.in_order), call.operands.query.shape[-1]
        program = programs.to_queries(of.arithmetic, of.scores(), of.width_of(width))
        rows = backward_rows(call.operands, state, cotangent)
        return of.over_keys(of, program, rows, _keys(call.operands), width, lambda x: x)

    def key_cotangents(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> tuple[Array, Array]:
        """The gradients of keys and values, in the dtype of the scores: folded over tiles of queries."""
        # the sums of a key are over queries alone, so that keys may be read as they lie
        of, (key, value) = self.schedule(call, True), call.operands[1:3]
        if _is_empty(call.operands):
            return of.empty(*key.shape), of.empty(*value.shape)
        widths = [of.width_of(x.shape[-1]) for x in (key, value)]
        program = programs.to_keys(of.arithmetic, of.scores(), widths)
        rows = backward_rows(call.operands, state, cotangent)
        to_key, to_value = of.over_queries(program, rows, _keys(call.operands))
        return to_key[..., : key.shape[-1]], to_value[..., : value.shape[-1]]

    def sink_cotangent(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        """The gradient of the sink."""
        found = self.sink_sums(call, self.sink_terms(call, state, cotangent))
        sink: Any = call.operands.sink
        return (
            found if sink.ndim == 2 else PerHeadSums(found, unit_numbers(call.operands)).of_heads()
        )

    def sink_terms(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        """What each row adds to the gradient of the sink, `[B, T, N]`."""
        of = self.schedule(call, False)
        rows = backward_rows(call.operands, state, cotangent) | given(sink=of.sink())
        return of.of_rows(lambda x: programs.sink_terms(of.arithmetic, x), rows)

    def sink_sums(self, call: KernelCall, terms: Array) -> Array:
        """The sums of numbers of rows, `[B, N]`."""
        return sums_of_rows(self.schedule(call, False), terms)

    @abc.abstractmethod
    def bias_cotangent(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        """The gradient of the bias. May raise `NotImplementedError`."""

    @abc.abstractmethod
    def array_cotangents(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> tuple[Any, ...]:
        """The gradients of the score's arrays. May raise `NotImplementedError`."""

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        """Folded over leaves."""
        if _is_empty(call.operands):
            return AttentionState(*map(jnp.zeros_like, state))
        return self.tangent_fold(call, state, directions).whole()

    def tangent_fold(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AbstractRowsFold:
        """The tangent of each row over leaves. May raise `NotImplementedError` in a direction of a score's arrays."""
        of, width = self.schedule(call, self.in_order), state.out.shape[-1]
        scores = of.scores(directions)
        program = programs.along(of.arithmetic, scores, of.width_of(width), state.out.dtype)
        rows = {"query": call.operands.query, "out": state.out, "lse": state.lse}
        rows |= given(d_sink=of.of_heads(directions.sink, 0.0), d_query=directions.query)
        keys = _keys(call.operands) | given(d_key=directions.key, d_value=directions.value)
        return of.over_keys(of, program, rows | given(sink=of.sink()), keys, width, AttentionState)


def _is_empty(operands: Operands) -> bool:
    return 0 in (*operands.query.shape[:2], operands.key.shape[1])


def _keys(operands: Operands) -> Blocks:
    return {"key": operands.key, "value": operands.value}


def backward_rows(operands: Operands, state: AttentionState, cotangent: AttentionState) -> Blocks:
    """Per-row inputs of the backward pass."""
    d_out = cotangent.out.astype(operands.value.dtype)
    rows = {"query": operands.query, "d_out": d_out, "out": state.out, "lse": state.lse}
    return rows | given(d_lse=cotangent.lse)
