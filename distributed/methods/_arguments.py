"""Axes and arguments of the functions that are called inside `jax.shard_map`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    CallPolicy,
    CheckedCall,
    MergedOptions,
    Operands,
    Settings,
    Tokens,
    call_policy,
    check_call,
    check_scores,
    out_dtype,
    received,
    split_mask,
    varying_axes,
)

from ..cost._topology import Topology

Axes = tuple[str, ...]


AxisName = str | Axes
Scores = tuple[int, int, int, int]


def check_axes(axis_name: object) -> Axes:
    """Returns the axis names as a tuple, each bound in the surrounding `shard_map`.

    Raises `TypeError` for anything but names and `ValueError` for one that repeats or is not bound.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(axes, tuple) or not axes or not all(isinstance(x, str) for x in axes):
        raise TypeError(
            f"axis_name: wanted the name of a mesh axis, or a tuple of names, "
            f"got {received(axis_name)}"
        )
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis_name: wanted different mesh axes, got {axes}")
    for axis in axes:
        try:
            lax.axis_size(axis)
        except NameError:
            raise ValueError(
                f"axis_name: wanted mesh axes of the surrounding jax.shard_map, got {axis!r}, "
                f"which is not bound here"
            ) from None
    return axes


def check_local(
    arrays: Sequence[Any],
    options: MergedOptions,
    *,
    queries: bool,
    scores: Callable[[Operands], Scores],
) -> tuple[CallPolicy, CheckedCall]:
    """The policy and the checked call of one device, from query to mask, and the options.

    `queries`: whether the device has only a part of the queries. `scores`: a function from the
    operands to the shape `(B, N, T, S)` of bias and mask.

    Raises as `local_attention`, and `ValueError` where positions are compared but not given.
    """
    policy = call_policy(options.get("implementation"), options.get("reproducible", False))
    query, key, value, source, bias, mask = arrays
    predicate, mask = split_mask(mask)
    place = functools.partial(_check_placed, queries)
    call = check_call(query, key, value, source, None, predicate, place=place, **options)
    operands = call.operands.positioned(read=False)
    bias, mask = check_scores(bias, mask, scores(operands))
    return policy, call._replace(operands=operands._replace(bias=bias, mask=mask))


def _check_placed(queries: bool, tokens: Tokens, reads: bool) -> Tokens:
    """Raises `ValueError` where positions are read and a device has only a part of them, but they are not given."""
    wanted = {"key_positions": "keys"} | ({"query_positions": "queries"} if queries else {})
    for name, what in wanted.items():
        if reads and getattr(tokens, name) is None:
            raise ValueError(
                f"{name}: wanted the global positions of this device's {what}, as is_causal, "
                f"local_window_size, key_value_seq_lengths, a mask or a score compare them; got None"
            )
    return tokens


def rounded(state: AttentionState, operands: Operands, settings: Settings) -> AttentionState:
    """The state with `out` in the dtype that the call asks for."""
    return AttentionState(state.out.astype(out_dtype(operands, settings)), state.lse)


def unbatched(state: AttentionState) -> AttentionState:
    """The state without the batch axis that was added to a call without one."""
    return jax.tree.map(lambda x: x[0], state)


def check_topology(topology: object, axes: int) -> None:
    """Raises `TypeError` unless `topology` is one, `ValueError` for another number of axes."""
    if topology is None:
        return
    if not isinstance(topology, Topology):
        raise TypeError(f"topology: wanted a cost.Topology or None, got {received(topology)}")
    if len(topology.links) != axes:
        raise ValueError(
            f"topology: wanted a link for each of the {axes} mesh axes, got {len(topology.links)}"
        )


def queries_are_parts(axes: Axes, query: Array, key: Array) -> bool:
    """Whether queries inside `jax.shard_map` are a device's part, by the types of the arrays.

    Where types do not tell (`check_vma=False`), they are if there are as many as keys.
    """
    if set(axes) <= varying_axes(key) | varying_axes(query):
        return not set(axes).isdisjoint(varying_axes(query))
    return query.shape[-3] == key.shape[-3]
