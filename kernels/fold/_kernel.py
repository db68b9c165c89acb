"""The canonical kernel, whose bits depend only on a row and on the keys that it sees.

A leaf holds the keys of `LEAF` successive positions. A tile of rows meets a leaf in one program, whose rows do not
depend on how many they are, and leaves are merged by the binary tree over their numbers. A leaf of which a row sees
nothing is the identity of a merge in every bit. So neither other rows nor the places of keys in an array change a bit.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..call._kernel import AbstractKernel
from ..call._operands import (
    KernelCall,
    Operands,
    Settings,
    cotangents,
    differentiated,
    map_some,
    out_dtype,
)
from ..call._state import AttentionState
from ..call._tokens import LEAF
from . import _programs as programs
from . import _tree as tree
from ._call import AbstractRowsFold, AbstractSchedule, empty_like, not_none
from ._programs import Blocks, without_signs


@dataclasses.dataclass(frozen=True)
class AbstractCanonical(AbstractKernel):
    """A bitwise reproducible kernel: a row's bits depend only on the row, its visible keys and their positions.

    It knows the keys of its call alone: methods that merge the states of several devices' keys do so in another
    order. It takes the sink of a call, the last partial of a row's fold. Derivatives of second order raise
    `NotImplementedError`. In its methods, `states` are the state and its cotangent.

    Attributes:
        run: the length of runs of keys. The present keys of a run have successive positions from a multiple of `run`
            on, and later runs have larger positions, as in an array by position or in blocks of a cache. Whole leaves
            are then read in place, as they are where no positions are given. Not checked. None: keys in any order.
    """

    run: int | None = None

    scores = True
    reproducible = True

    @abc.abstractmethod
    def schedule(self, call: KernelCall, in_order: bool) -> AbstractSchedule:
        """The platform's loops over a call. `in_order`: keys are in runs of whole leaves."""

    @property
    def in_order(self) -> bool:
        return self.run is not None and self.run % LEAF == 0

    def forward(self, call: KernelCall) -> AttentionState:
        return self.forward_and_rest(call)[0]

    def forward_and_rest(self, call: KernelCall) -> tuple[AttentionState, Array]:
        """`forward`, and the rounding error of `lse`, 0 where it is not known."""
        operands = call.operands
        if not _is_empty(operands):
            return self.state_fold(call).whole()
        state, sink = empty_like(call.settings, operands), self.schedule(call, False).sink()
        state = state if sink is None else state._replace(lse=sink)
        return state, jnp.zeros_like(state.lse)

    def state_fold(self, call: KernelCall) -> AbstractRowsFold:
        """The fold of rows over leaves to their state and the rounding error of `lse`."""
        # (out, F) of each row: FlashAttention-2 (arXiv 2307.08691), algorithm 1, with leaves as blocks
        of, operands = self.schedule(call, self.in_order), call.operands
        width, dtype = operands.value.shape[-1], out_dtype(operands, call.settings)
        program = programs.softmax(of.arithmetic, of.scores(), of.width_of(width), dtype)

        def state(out: Array, lse: Array, *rest: Array) -> tuple[AttentionState, Array]:
            return AttentionState(out, lse), rest[0] if rest else jnp.zeros_like(lse)

        rows = {"query": operands.query} | not_none(sink=of.sink())
        return of.over_keys(of, program, rows, _keys(operands), width, state)

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        """Folds dQ over leaves, dK and dV over tiles of queries.

        Gradients of a bias, of a score's arrays and of a sink are sums over all rows, computed only on request.
        """
        operands, settings = call.operands, call.settings
        args = call, state, cotangent
        others = jax.tree.map(jnp.zeros_like, differentiated(operands))
        needs, empty = settings.needs, _is_empty(operands)
        if operands.bias is not None and needs.bias_grad and not empty:
            others = others._replace(bias=self.bias_cotangent(*args))
        if jax.tree.leaves(others.score_arrays) and needs.score_grad and not empty:
            others = others._replace(score_arrays=self.array_cotangents(*args))
        if operands.sink is not None and needs.sink_grad and 0 not in operands.query.shape[:2]:
            others = others._replace(sink=self.sink_cotangent(*args))
        to_query, to_keys = self.query_cotangent(*args), self.key_cotangents(*args)
        result = cotangents(to_query, *to_keys, others.bias, others.score_arrays, others.sink)
        return map_some(lambda x, like: without_signs(x.astype(like.dtype)), result, operands)

    def query_cotangent(self, call: KernelCall, *states: AttentionState) -> Array:
        if _is_empty(call.operands):
            return self.schedule(call, False).empty(*call.operands.query.shape)
        return self.query_fold(call, *states).whole()

    def query_fold(self, call: KernelCall, *states: AttentionState) -> AbstractRowsFold:
        # dQ_i = scale Σ_a ds_ia k_a
        of, width = self.schedule(call, self.in_order), call.operands.query.shape[-1]
        program = programs.to_queries(of.arithmetic, of.scores(), of.width_of(width))
        rows, keys = backward_rows(call.operands, *states), _keys(call.operands)
        return of.over_keys(of, program, rows, keys, width, lambda x: x)

    def key_cotangents(self, call: KernelCall, *states: AttentionState) -> tuple[Array, Array]:
        """The gradients of keys and values, in the dtype of the scores: folded over tiles of queries."""
        # dK_a = scale Σ_i ds_ia q_i and dV_a = Σ_i P_ia dout_i: sums over queries alone, so keys are read in place
        of, (_, key, value) = self.schedule(call, True), call.operands.qkv
        if _is_empty(call.operands):
            return of.empty(*key.shape), of.empty(*value.shape)
        widths = [of.width_of(x.shape[-1]) for x in (key, value)]
        program = programs.to_keys(of.arithmetic, of.scores(), widths)
        rows = backward_rows(call.operands, *states)
        to_key, to_value = of.over_queries(program, rows, _keys(call.operands))
        return to_key[..., : key.shape[-1]], to_value[..., : value.shape[-1]]

    def sink_cotangent(self, call: KernelCall, *states: AttentionState) -> Array:
        # db = -Σ_i e^{b - F_i} δ_i over the rows of a head, and over the batch if the batch shares b
        result = self.sink_sums(call, self.sink_terms(call, *states))
        sums, sink = tree.PerHeadSums(result, tree.unit_numbers(call.operands)), call.operands.sink
        return result if sink is not None and sink.ndim == 2 else sums.of_heads()

    def sink_terms(self, call: KernelCall, *state: AttentionState) -> Float[Array, "B T N"]:
        """Terms of rows in the gradient with respect to the sink, -e^{b - F} δ."""
        of = self.schedule(call, False)
        rows = backward_rows(call.operands, *state) | not_none(sink=of.sink())
        return of.of_rows(lambda x: programs.sink_terms(of.arithmetic, x), rows)

    def sink_sums(self, call: KernelCall, terms: Float[Array, "B T N"]) -> Float[Array, "B N"]:
        """Sums of one number per row; NaN where two queries have one position."""
        of = self.schedule(call, False)
        query_slots, present = of.query_slots, of.query_slots.positions >= 0
        terms = jnp.where(present[..., None], query_slots.spread(terms), 0.0)
        result = of.computed(lambda x: x.sum(2), terms)
        numbers = jnp.where(present.any(-1), query_slots.numbers, -1)
        numbers = jnp.broadcast_to(numbers, result.shape[:2])
        return query_slots.checked(without_signs(jax.vmap(tree.tree_sum)(numbers, result)))

    def bias_cotangent(self, call: KernelCall, *states: AttentionState) -> Array:
        """The gradient of the bias, if the kernel takes one."""
        raise NotImplementedError("bias: wanted None, got an array")

    @abc.abstractmethod
    def array_cotangents(self, call: KernelCall, *states: AttentionState) -> tuple[Any, ...]:
        """The gradients of the score's arrays. May raise `NotImplementedError`."""

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        if _is_empty(call.operands):
            return AttentionState(*map(jnp.zeros_like, state))
        return self.tangent_fold(call, state, directions).whole()

    def tangent_fold(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AbstractRowsFold:
        # (dout, dF) of each row, along d_query, d_key, d_value, d_sink and the score's arrays
        of, width = self.schedule(call, self.in_order), state.out.shape[-1]
        scores = of.scores(directions)
        program = programs.along(of.arithmetic, scores, of.width_of(width), state.out.dtype)
        rows = {"query": call.operands.query, "out": state.out, "lse": state.lse}
        rows |= not_none(d_sink=of.of_heads(directions.sink, 0.0), d_query=directions.query)
        rows |= not_none(sink=of.sink())
        keys = _keys(call.operands) | not_none(d_key=directions.key, d_value=directions.value)
        return of.over_keys(of, program, rows, keys, width, AttentionState)


def _is_empty(operands: Operands) -> bool:
    return 0 in (*operands.query.shape[:2], operands.key.shape[1])


def _keys(operands: Operands) -> Blocks:
    return {"key": operands.key, "value": operands.value}


def backward_rows(operands: Operands, state: AttentionState, cotangent: AttentionState) -> Blocks:
    d_out = cotangent.out.astype(operands.value.dtype)
    rows = {"query": operands.query, "d_out": d_out, "out": state.out, "lse": state.lse}
    return rows | not_none(d_lse=cotangent.lse)


def check_whole(settings: Settings) -> None:
    """Raises `NotImplementedError` for a part of the keys of a row, and for a score with a source."""
    if settings.needs.unrounded:
        raise NotImplementedError(
            "key: wanted all keys of a row in one call, got a part whose state is merged with others, in an "
            "order of its own"
        )
    if settings.scored_width is not None:
        raise NotImplementedError("source: wanted None with a score, got an array")
