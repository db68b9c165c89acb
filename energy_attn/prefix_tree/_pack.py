"""Packing of beams of candidates into prefix trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer

from energy_attn.kernels.internal import (
    as_int32,
    check_integer,
    check_integral,
    check_shape,
    received,
)

from ._tree import PrefixTree, check_range, gather_slots, tree_from_ancestors


def pack(
    beam: Integer[Array, "B M C"],
    *,
    capacity: int | None = None,
    lengths: Integer[Array, "B M"] | None = None,
    pad_token: int = 0,
) -> PrefixTree:
    r"""Packs a beam of candidates into a prefix tree: each distinct prefix once.

    $$\mathrm{owner}_{mc} = \min\{j : x_{j,0..c} = x_{m,0..c}\}$$

    The entry $(m, c)$ is a new node if it is its own owner, and else the node of its owner. Slots are
    numbered by first occurrence, row after row, so that a parent precedes its children and any
    capacity cuts off whole branches. A prefix may come from any earlier row, equal rows share all
    nodes, and different first tokens make several roots. Works under `jax.jit`; the cost is of the
    order of `B M² C` and of the mask's size.

    Args:
        beam: `[B, M, C]` integers of any dtype: `M` candidates of `C` tokens.
        capacity: the number of slots `L`, static; None is `M C`, which holds every tree.
        lengths: `[B, M]` integers from 0 to `C`: the number of tokens of each candidate. None is
            `C`.
        pad_token: the token of unused slots.

    Returns:
        The tree, with `beam`'s dtype in `tokens`. If `capacity` is too small, it is the tree of the
        first slots, and the entries cut off have -1 in `unpacker`.

    Raises:
        TypeError: `beam` or `lengths` is not an array of integers, `capacity` or `pad_token` not an
            integer.
        ValueError: a beam of another rank, without candidates or tokens, or with more entries than
            int32 can number; a capacity below 1; concrete lengths out of range; a pad token that
            the beam's dtype cannot represent.

    Source: token trees as in SpecInfer (arXiv 2305.09781).

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.prefix_tree import pack
        >>> words = "Mars is a red", "Mars is reddish when", "Mars is dark red"
        >>> names = ["Mars", "is", "a", "red", "reddish", "when", "dark"]
        >>> beam = jnp.array([[[names.index(word) for word in row.split()] for row in words]])
        >>> tree = pack(beam)
        >>> " ".join(names[token] for token in tree.tokens[0, : tree.size[0]])
        'Mars is a red reddish when dark red'
        >>> tree.unpacker[0].tolist()
        [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]]
    """
    beam, lengths = check_beam(beam, lengths)
    entries = beam.shape[1] * beam.shape[2]
    slots = entries if capacity is None else check_integer("capacity", capacity, least=1)
    pad = check_integer("pad_token", pad_token, is_wide=True)
    limits = jnp.iinfo(beam.dtype)
    if not limits.min <= pad <= limits.max:
        raise ValueError(f"pad_token: wanted a value of {beam.dtype}, beam's dtype, got {pad}")

    return _packed(slots, beam, lengths, jnp.asarray(pad, beam.dtype))


@functools.partial(jax.jit, static_argnums=0)
def _packed(slots: int, beam: Array, lengths: Array, pad: Array) -> PrefixTree:
    batch, rows, levels = beam.shape
    row = jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    level = jnp.arange(levels, dtype=jnp.int32)[None, None]
    # the length of the prefix that two candidates share: the first level where they differ
    differ = beam[:, :, None] != beam[:, None]
    common = jnp.where(differ, level[:, None], levels).min(-1)
    common = jnp.minimum(common, jnp.minimum(lengths[:, :, None], lengths[:, None]))
    owner = jnp.where(common[..., None] > level[:, None], row[:, None], rows).min(2)

    is_new = (owner == row).reshape(batch, rows * levels)
    number = jnp.cumsum(is_new, -1, dtype=jnp.int32) - 1
    size = jnp.minimum(number[:, -1] + 1, slots)
    slot = gather_slots(number, jnp.where(owner < rows, owner * levels + level, -1))
    unpacker = jnp.where((owner < rows) & (slot < slots), slot, -1)

    first = _first_entries(is_new, number, slots)
    used = jnp.arange(slots, dtype=jnp.int32)[None] < size[:, None]
    tokens = gather_slots(beam.reshape(is_new.shape), first)
    tokens = jnp.where(used, tokens, pad)
    ancestors = gather_slots(unpacker, first // levels)
    ancestors = jnp.where(level <= (first % levels)[:, :, None], ancestors, -1)
    return tree_from_ancestors(tokens, ancestors, unpacker, size)


def _first_entries(is_new: Array, number: Array, slots: int) -> Array:
    # the first entry of each slot, counted row after row; 0 if it has none
    batch, entries = is_new.shape
    entry = jnp.broadcast_to(jnp.arange(entries, dtype=jnp.int32)[None], is_new.shape)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    blank = jnp.zeros((batch, slots), jnp.int32)
    return blank.at[rows, jnp.where(is_new, number, slots)].set(entry, mode="drop")


def check_beam(beam: Array, lengths: Array | None, name: str = "beam") -> tuple[Array, Array]:
    """Returns a beam, the argument `name`, and its candidates' lengths `[B, M]` int32, as JAX arrays."""
    beam = check_integral(name, beam)
    check_shape(name, beam, ("B", "M", "C"))
    batch, rows, levels = beam.shape
    if rows == 0 or levels == 0:
        raise ValueError(f"{name}: wanted candidates with tokens, got {received(beam)}")
    if rows * levels > np.iinfo(np.int32).max:
        raise ValueError(f"{name}: wanted M * C that int32 can number, got {received(beam)}")
    if lengths is None:
        return jnp.asarray(beam), jnp.full((batch, rows), levels, jnp.int32)
    check_integral("lengths", lengths)
    check_shape("lengths", lengths, (batch, rows))
    check_range("lengths", lengths, 0, levels)
    return jnp.asarray(beam), jnp.asarray(as_int32(lengths))
