"""The kernel whose bits depend on a row and the keys that it sees alone: canonical tiles, folded by a canonical tree.

A leaf holds the keys of `LEAF` successive positions. A tile of `ROWS` rows meets a leaf in one program of one shape,
and leaves are joined by the binary tree over their numbers. A leaf of which a row sees nothing is the identity of a
join in every bit. So neither other rows, nor where keys lie in an array and what is beside them, change a bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._kernel import AbstractKernel, check_operands
from ..call._operands import KernelCall, Operands, cotangents, out_dtype
from ..call._state import AttentionState, holds_keys, unfused
from ..masks._abstract import AbstractMask
from ._blockwise import cast_like
from ._canonical_passes import LEAF, ROWS, Call, over_keys, over_queries
from ._canonical_tiles import (
    Part,
    backward_rows,
    d_scores,
    finished,
    join_parts,
    part,
    product,
    scores,
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
    their own. Derivatives of second order are of the blockwise kernel, whose bits follow the call.
    """

    name = "canonical"
    platforms = ()
    interpreted = ()
    exported = True
    masks = (AbstractMask,)
    reproducible = True

    def check(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` for a bias and a mask of numbers, whose slots are not known by positions."""
        if call.settings.unrounded:
            raise NotImplementedError(
                "key: wanted all keys of a row in one call, got a part whose state is merged with others, in an "
                "order of its own"
            )
        check_operands(
            call.operands, ("float32", "bfloat16", "float16", "float64"), ("bias", "mask")
        )

    def forward(self, call: KernelCall) -> AttentionState:
        """The softmax over leaves, joined."""
        operands, settings, _ = call
        of = Call(operands, settings)

        heads, width = operands.value.shape[2:]

        def term(query: Array, seen: Array, key: Array, value: Array) -> Part:
            return part(scores(query, key, of.scale, seen), value, ROWS)

        none = of.empty(heads, ROWS)
        identity = Part(none - jnp.inf, none, of.empty(heads, ROWS, width))
        out, lse = over_keys(
            of,
            operands.query,
            operands[1:3],
            identity,
            term,
            join_parts,
            lambda _, whole: finished(whole),
        )
        return AttentionState(without_signs(out.astype(out_dtype(operands, settings))), lse)

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        """Gradients of queries are folded over leaves, those of keys and values over tiles of queries."""
        found = cotangents(
            self.query_cotangent(call, state, cotangent),
            *self.key_cotangents(call, state, cotangent),
            None,
        )
        return jax.tree.map(without_signs, cast_like(found, call.operands))

    def query_cotangent(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        """That of the queries of a call, in the dtype of the scores: folded over leaves."""
        operands, settings, _ = call
        of = Call(operands, settings)
        query, key, value = operands[:3]

        def to_queries(given: tuple, seen: Array, key: Array, value: Array) -> Array:
            rows = backward_rows(*given)
            s = scores(rows.query, key, of.scale, seen)
            return weighed_sum(d_scores(rows, s, value)[1], key, ROWS)

        return over_keys(
            of,
            _given_rows(query, state, cotangent),
            (key, value),
            of.empty(key.shape[2], ROWS, query.shape[-1]),
            to_queries,
            jnp.add,
            lambda _, x: x * of.scale,
        )

    def key_cotangents(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> tuple[Array, Array]:
        """Those of the keys and values of a call, likewise: folded over tiles of queries."""
        operands, settings, _ = call
        of = Call(operands, settings, by_position=False)  # a key's sums are over queries alone
        query, key, value = operands[:3]
        heads = key.shape[2]

        def to_keys(given: tuple, seen: Array, key: Array, value: Array) -> tuple[Array, Array]:
            rows = backward_rows(*given)
            s = scores(rows.query, key, of.scale, seen)
            weights, change = d_scores(rows, s, value)
            return product(change, rows.query, (1, 1)), product(weights, rows.d_out, (1, 1))

        return over_queries(
            of,
            _given_rows(query, state, cotangent),
            (key, value),
            (of.empty(heads, LEAF, key.shape[-1]), of.empty(heads, LEAF, value.shape[-1])),
            to_keys,
            lambda a, b: jax.tree.map(jnp.add, a, b),
            lambda x: (x[0] * of.scale, x[1]),
        )

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        """Folded over leaves."""
        operands, settings, _ = call
        of = Call(operands, settings)
        heads, width = operands.value.shape[2:]
        moved = [x for x in directions[1:3] if x is not None]

        def term(given: tuple, seen: Array, key: Array, value: Array, *changes: Array) -> tuple:
            query, d_query, out, lse = given
            d_key, d_value = _placed(changes, directions[1:3])
            some = holds_keys(lse)
            query = jnp.where(some[..., None], query, 0.0)
            s = scores(query, key, of.scale, seen)
            shift = jnp.where(some, lse, jnp.inf)[:, : s.shape[1], None]
            weights = lax.optimization_barrier(jnp.exp(s - shift))
            total, energy = jnp.zeros_like(out), jnp.zeros_like(lse)
            pairs = [(d_query, key)] if d_query is not None else []
            pairs += [(query, d_key)] if d_key is not None else []
            if pairs:
                moves = [unfused(product(*x, (2, 2)) * of.scale) for x in pairs]
                change = functools.reduce(jnp.add, moves)[:, : s.shape[1]]
                change = lax.optimization_barrier(weights * change)
                total, energy = weighed_sum(change, value, ROWS), sums(change, ROWS)
            if d_value is not None:
                total = total + weighed_sum(weights, d_value, ROWS)
            return total, energy, sums(weights, ROWS)

        def finish(given: tuple, found: tuple) -> tuple[Array, Array]:
            _, _, out, lse = given
            total = jnp.where(found[2] == 0, 1.0, found[2])
            energy = found[1] / total
            # XLA divides by a product with the inverse
            change = unfused(found[0] / total[..., None]) - unfused(energy[..., None] * out)
            return jnp.where(holds_keys(lse)[..., None], change, 0.0), energy

        none = of.empty(heads, ROWS)
        out, lse = over_keys(
            of,
            (operands.query, directions.query, state.out, state.lse),
            (*operands[1:3], *moved),
            (of.empty(heads, ROWS, width), none, none),
            term,
            lambda a, b: jax.tree.map(jnp.add, a, b),
            finish,
        )
        return AttentionState(without_signs(out.astype(state.out.dtype)), without_signs(lse))


def _given_rows(query: Array, state: AttentionState, cotangent: AttentionState) -> tuple:
    """What the tiles of a backward know of their rows."""
    return query, cotangent.out, state.out, state.lse, cotangent.lse


def _placed(some: tuple[Array, ...], like: tuple) -> list[Array | None]:
    """Arrays in the places where `like` has some; None elsewhere."""
    rest = iter(some)
    return [None if x is None else next(rest) for x in like]
