"""The kernel whose bits depend on a row and the keys that it sees alone: canonical tiles, folded by a canonical tree.

A leaf holds the keys of `LEAF` successive positions. A tile of rows meets a leaf in one program, whose rows do not
depend on how many they are, and leaves are joined by the binary tree over their numbers. A leaf of which a row sees
nothing is the identity of a join in every bit. So neither other rows, nor where keys lie in an array and what is
beside them, change a bit.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._kernel import AbstractKernel, check_dtypes
from ..call._leaves import LEAF
from ..call._operands import KernelCall, Operands, cotangents, differentiated, out_dtype
from ..call._state import AttentionState, holds_keys, of_each, unfused
from ..masks._abstract import AbstractMask
from ..masks._lengths import Lengths
from ._blockwise import cast_like, empty_like
from ._canonical_call import CanonicalCall, Tile, check_whole
from ._canonical_passes import OverKeys, add, of_rows, over_queries
from ._canonical_sums import Sums, sink_units
from ._canonical_tiles import (
    Part,
    backward_rows,
    d_scores,
    finished,
    join_parts,
    of_sink,
    part,
    product,
    raw_scores,
    sums,
    weighed_sum,
    without_signs,
)


@dataclasses.dataclass(frozen=True)
class Canonical(AbstractKernel):
    """Bits of a row that depend on it, the keys that it sees and their positions, and on nothing else of a call.

    Keys may lie in any order, among absent ones, but two present keys of one position, or keys that are in
    more leaves than `S / LEAF + 1`, make all results of their batch entry NaN; two such queries, gradients of keys
    and values.

    It knows the keys of its call alone: methods that merge the states of several devices' keys do so in an order of
    their own. It takes the sink of a call, the last item of a row's fold. Derivatives of second order raise
    `NotImplementedError`.

    Attributes:
        run: of how many keys each run of the array is, whose positions follow each other from a multiple of that number
            on, but for absent ones, and later runs have larger positions: as in an array by position, and in blocks of
            a cache. Whole leaves are then read where they lie, as they are where no positions are given. Not checked.
            None: there are none.
    """

    run: int | None = None

    name = "canonical"
    platforms = ()
    interpreted = ()
    exported = True
    masks = (AbstractMask, Lengths)
    scores = True

    def check(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` for a part of the keys of a row, and for a score with a source."""
        operands, settings, _ = call
        check_whole(settings)
        check_dtypes(operands, ("float32", "bfloat16", "float16", "float64"))

    def forward(self, call: KernelCall) -> AttentionState:
        """The softmax over leaves, joined."""
        return self.forward_and_rest(call)[0]

    def forward_and_rest(self, call: KernelCall) -> tuple[AttentionState, Array]:
        """`forward`, and the rounding error of `lse`."""
        operands, settings, _ = call
        if _is_empty(operands):
            state, sink = empty_like(settings, operands), self._of(call).sink()
            state = state if sink is None else state._replace(lse=sink)
            return state, jnp.zeros_like(state.lse)
        return self.rounded_state(call, self.state_over_keys(call).whole())

    def state_over_keys(self, call: KernelCall) -> OverKeys:
        """The softmax of each row over leaves."""
        operands, of = call.operands, self._of(call)
        heads, width = operands.value.shape[2:]
        dtype = out_dtype(operands, call.settings)

        def term(given: tuple, tile: Tile, key: Array, value: Array) -> Part:
            return part(of.scores(given[0], key, tile), value)

        def finish(given: tuple, whole: Part) -> tuple[Array, Array, Array]:
            sink = given[1]
            whole = whole if sink is None else join_parts(whole, of_sink(sink, whole))
            out, lse, rest = finished(whole)
            return without_signs(out.astype(dtype)), lse, rest

        none = of.empty(heads, of.rows)
        identity = Part(none - jnp.inf, none, of.empty(heads, of.rows, width))
        rows = operands.query, of.sink()
        return OverKeys(
            of, rows, (operands.key, operands.value), identity, term, join_parts, finish
        )

    def rounded_state(
        self, call: KernelCall, found: tuple[Array, Array, Array]
    ) -> tuple[AttentionState, Array]:
        """The state, from the results of `state_over_keys`."""
        del call
        out, lse, rest = found
        return AttentionState(out, lse), rest

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        """Gradients of queries are folded over leaves, those of keys and values over tiles of queries.

        Those of a bias, of a score's arrays and of a sink are `Sums`, computed where they are wanted.
        """
        operands, settings, _ = call
        given = call, state, cotangent
        others = jax.tree.map(jnp.zeros_like, differentiated(operands))
        if not _is_empty(operands):
            if operands.bias is not None and settings.needs.bias_grad:
                others = others._replace(bias=self.bias_cotangent(*given))
            if jax.tree.leaves(others.score_arrays) and settings.needs.score_grad:
                others = others._replace(score_arrays=self.array_cotangents(*given))
        has_rows = 0 not in operands.query.shape[:2]
        if operands.sink is not None and settings.needs.sink_grad and has_rows:
            others = others._replace(sink=self.sink_cotangent(*given))
        found = cotangents(
            self.query_cotangent(*given),
            *self.key_cotangents(*given),
            others.bias,
            others.score_arrays,
            others.sink,
        )
        return jax.tree.map(without_signs, cast_like(found, operands))

    def sink_cotangent(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        """That of the sink."""
        units, sink = sink_units(self, call, state, cotangent), call.operands.sink
        return units.found if sink is not None and sink.ndim == 2 else units.of_heads()

    def sink_sums(self, call: KernelCall, terms: Array) -> Array:
        """The sums of numbers of rows, `[B, N]`."""
        return Sums(self._of(call)).of_rows(terms)

    def sink_terms(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        r"""What each row adds to that, $-e^{b - F} \delta$, `[B, T, N]`."""
        of = self._of(call)

        def term(given: tuple) -> Array:
            rows = backward_rows(*given[0])
            return unfused(of_each(jnp.exp, given[1] - rows.lse) * -rows.delta)

        rows = given_rows(call.operands.query, state, cotangent), of.sink()
        return of_rows(of, rows, term)

    def bias_cotangent(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        """That of the bias."""
        rows = given_rows(call.operands.query, state, cotangent)
        return Sums(self._of(call)).of_bias(rows, list(call.operands.qkv[1:]))

    def array_cotangents(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> tuple[Any, ...]:
        """Those of the score's arrays."""
        rows = given_rows(call.operands.query, state, cotangent)
        return Sums(self._of(call)).of_arrays(rows, list(call.operands.qkv[1:]))

    def query_cotangent(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        """That of the queries of a call, in the dtype of the scores: folded over leaves."""
        if _is_empty(call.operands):
            return self._of(call).empty(*call.operands.query.shape)
        return self.rounded_query(call, self.query_over_keys(call, state, cotangent).whole())

    def query_over_keys(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> OverKeys:
        """The gradient of each row over leaves."""
        query, key, value = call.operands.qkv
        of = self._of(call)

        def to_queries(given: tuple, tile: Tile, key: Array, value: Array) -> Array:
            rows = backward_rows(*given)
            scores, pullback = of.scores_and_pullback(rows.query, key, tile)
            return weighed_sum(pullback(d_scores(rows, scores, value)[1]), key)

        none = of.empty(key.shape[2], of.rows, query.shape[-1])
        rows = given_rows(query, state, cotangent)

        def scaled(_: tuple, x: Array) -> Array:
            return x * of.scale

        return OverKeys(of, rows, (key, value), none, to_queries, jnp.add, scaled)

    def rounded_query(self, call: KernelCall, found: Array) -> Array:
        """The gradient, from the results of `query_over_keys`."""
        del call
        return found

    def key_cotangents(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> tuple[Array, Array]:
        """Those of the keys and values of a call, likewise: folded over tiles of queries."""
        query, key, value = call.operands.qkv
        # the sums of a key are over queries alone, so that keys may be read as they lie
        of, heads = CanonicalCall(call.operands, call.settings, in_order=True), key.shape[2]
        if _is_empty(call.operands):
            return of.empty(*key.shape), of.empty(*value.shape)

        def to_keys(given: tuple, tile: Tile, key: Array, value: Array) -> tuple[Array, Array]:
            rows = backward_rows(*given)
            scores, pullback = of.scores_and_pullback(rows.query, key, tile)
            weights, change = d_scores(rows, scores, value)
            return (
                product(pullback(change), rows.query, (1, 1)),
                product(weights, rows.d_out, (1, 1)),
            )

        return over_queries(
            of,
            given_rows(query, state, cotangent),
            (key, value),
            (of.empty(heads, LEAF, key.shape[-1]), of.empty(heads, LEAF, value.shape[-1])),
            to_keys,
            add,
            lambda x: (x[0] * of.scale, x[1]),
        )

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        """Folded over leaves."""
        if _is_empty(call.operands):
            return AttentionState(*map(jnp.zeros_like, state))
        return self.rounded_tangent(state, self.tangent_over_keys(call, state, directions).whole())

    def tangent_over_keys(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> OverKeys:
        """The tangent of each row over leaves."""
        operands, of = call.operands, self._of(call)
        heads, width = operands.value.shape[2:]
        moved = [x for x in directions[1:3] if x is not None]

        def term(given: tuple, tile: Tile, key: Array, value: Array, *changes: Array) -> tuple:
            query, d_query, out, lse = given[:4]
            d_key, d_value = _placed(changes, directions[1:3])
            some = holds_keys(lse)
            query = jnp.where(some[..., None], query, 0.0)
            moves = [(d_query, key)] if d_query is not None else []
            moves += [(query, d_key)] if d_key is not None else []
            raw = [raw_scores(*x, of.scale) for x in moves]
            change = functools.reduce(jnp.add, raw) if raw else None
            scores, change = of.scores_and_change(query, key, change, directions, tile)
            shift = jnp.where(some, lse, jnp.inf)[..., None]
            weights = lax.optimization_barrier(unfused(jnp.exp(scores - shift)))
            total, energy = jnp.zeros_like(out), jnp.zeros_like(lse)
            if change is not None:
                change = lax.optimization_barrier(unfused(weights * change))
                total, energy = weighed_sum(change, value), sums(change)
            if d_value is not None:
                total = total + weighed_sum(weights, d_value)
            return total, energy, sums(weights)

        def finish(given: tuple, found: tuple) -> tuple[Array, Array]:
            out, lse, sink, d_sink = given[2:]
            energy, total = found[1:]
            if sink is not None:
                weight = of_each(jnp.exp, sink - jnp.where(holds_keys(lse), lse, jnp.inf))
                total = total + weight
                energy = energy if d_sink is None else energy + unfused(weight * d_sink)
            total = jnp.where(total == 0, 1.0, total)
            energy = energy / total
            # XLA divides by a product with the inverse
            change = unfused(found[0] / total[..., None]) - unfused(energy[..., None] * out)
            return jnp.where(holds_keys(lse)[..., None], change, 0.0), energy

        none = of.empty(heads, of.rows)
        sinks = of.sink(), of.of_heads(directions.sink, 0.0)
        rows = operands.query, directions.query, state.out, state.lse, *sinks
        identity = of.empty(heads, of.rows, width), none, none
        return OverKeys(
            of, rows, (operands.key, operands.value, *moved), identity, term, add, finish
        )

    def rounded_tangent(self, state: AttentionState, found: tuple[Array, Array]) -> AttentionState:
        """The tangent, from the results of `tangent_over_keys`."""
        out, lse = found
        return AttentionState(without_signs(out.astype(state.out.dtype)), without_signs(lse))

    def _of(self, call: KernelCall) -> CanonicalCall:
        return CanonicalCall(call.operands, call.settings, self.in_order)

    @property
    def in_order(self) -> bool:
        """Whether runs are of whole leaves."""
        return self.run is not None and self.run % LEAF == 0


def _is_empty(operands: Operands) -> bool:
    return 0 in (*operands.query.shape[:2], operands.key.shape[1])


def given_rows(query: Array, state: AttentionState, cotangent: AttentionState) -> tuple:
    """What the tiles of a backward know of their rows."""
    return query, cotangent.out, state.out, state.lse, cotangent.lse


def _placed(some: tuple[Array, ...], like: tuple) -> list[Array | None]:
    """Arrays in the places where `like` has some; None elsewhere."""
    rest = iter(some)
    return [None if x is None else next(rest) for x in like]
