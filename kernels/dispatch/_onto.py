"""Attention onto the state of other keys: what a ring of keys does in each step."""

import functools
import math
from collections.abc import Sequence
from typing import TypeVar

import jax
from jax import lax
from jaxtyping import Array

from ..call._kernel import Candidate
from ..call._operands import Operands, Settings, is_static, with_default_positions
from ..call._state import AttentionState, merge
from ._beside import beside
from ._registry import attend

Tree = TypeVar("Tree")

# What a kernel returns, and its copies in other layouts, are scratch beside the state that they are
# merged into. So a state is computed in parts of about so many bytes and of at least so many queries,
# each of which still fills a device.
PART, LEAST_PART = 32 << 20, 512


def attend_onto(
    state: AttentionState,
    names: Sequence[Candidate],
    settings: Settings,
    operands: Operands,
    arriving: Tree,
) -> tuple[AttentionState, Tree]:
    """`merge(state, attend(names, settings, operands))`, in parts of the queries; and `arriving`.

    `state` is of other keys, of the types of a call's. The attention is `beside` what is arriving.
    Raises as `attend`.
    """
    query_len, size = operands.query.shape[1], _part_len(state)
    if not is_static(query_len) or query_len <= size:
        found, arriving = beside(attend(names, settings, operands), arriving)
        return merge(state, found), arriving
    operands = with_default_positions(operands, settings)
    settings = settings._replace(part=True)

    def add(first: int | Array, size: int, whole: AttentionState) -> AttentionState:
        here = jax.tree.map(functools.partial(_cut, first=first, size=size, axis=1), whole)
        rows = _rows(operands, first, size)
        found = merge(here, attend(names, settings, rows))
        return jax.tree.map(
            lambda x, new: lax.dynamic_update_slice_in_dim(x, new, first, 1), whole, found
        )

    parts, rest = divmod(query_len, size)
    state = lax.fori_loop(0, parts, lambda i, whole: add(i * size, size, whole), state)
    state = add(query_len - rest, rest, state) if rest else state
    return beside(state, arriving)


def _part_len(state: AttentionState) -> int:
    """The queries of a part, in whole blocks."""
    batch, _, *rest = state.out.shape
    a_query = batch * math.prod(rest) * state.out.dtype.itemsize
    blocks = PART // max(a_query * LEAST_PART, 1)
    return max(blocks, 1) * LEAST_PART


def _rows(operands: Operands, first: int | Array, size: int) -> Operands:
    """The operands of `size` queries from `first`."""

    def cut(x: Array | None, axis: int) -> Array | None:
        return x if x is None or x.shape[axis] == 1 else _cut(x, first, size, axis)

    return operands._replace(
        query=_cut(operands.query, first, size, 1),
        bias=cut(operands.bias, 2),
        mask=cut(operands.mask, 2),
        query_positions=cut(operands.query_positions, 1),
        query_segments=cut(operands.query_segments, 1),
    )


def _cut(x: Array, first: int | Array, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, first, size, axis)
