"""Checks of beams, choices, parents and slots of prefix trees."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from energy_attn.kernels.internal import checks


def check_beam(beam: Array, lengths: Array | None, name: str = "beam") -> tuple[Array, Array]:
    """Returns a beam and its candidates' lengths `[B, M]` int32, as JAX arrays."""
    beam = checks.check_integral(name, beam)
    checks.check_shape(name, beam, ("B", "M", "C"))
    batch, rows, levels = beam.shape
    if rows == 0 or levels == 0:
        raise ValueError(f"{name}: wanted candidates with tokens, got {checks.received(beam)}")
    if rows * levels > np.iinfo(np.int32).max:
        raise ValueError(f"{name}: wanted M * C that int32 can number, got {checks.received(beam)}")
    if lengths is None:
        return jnp.asarray(beam), jnp.full((batch, rows), levels, jnp.int32)
    checks.check_integral("lengths", lengths)
    checks.check_shape("lengths", lengths, (batch, rows))
    check_range("lengths", lengths, 0, levels)
    return jnp.asarray(beam), jnp.asarray(checks.as_int32(lengths))


def check_choices(choices: object, levels: int, ranks: int) -> list[tuple[int, ...]]:
    # in order of length, then of ranks
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        raise TypeError(
            f"choices: wanted a sequence of tuples of ranks, got {checks.received(choices)}"
        )
    paths = []
    for choice in choices:
        if not isinstance(choice, Sequence) or isinstance(choice, str):
            raise TypeError(f"choices: wanted tuples of ranks, got {checks.received(choice)}")
        path = tuple(checks.check_integer("choices", rank) for rank in choice)
        if not 1 <= len(path) <= levels or not all(0 <= rank < ranks for rank in path):
            raise ValueError(
                f"choices: wanted 1 to {levels} ranks below {ranks}, "
                f"the shape of candidates, got {path}"
            )
        paths.append(path)
    distinct = set(paths)
    if len(distinct) < len(paths):
        repeated = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"choices: wanted each choice once, got {repeated} twice")
    for path in paths:
        if len(path) > 1 and path[:-1] not in distinct:
            raise ValueError(f"choices: wanted {path[:-1]}, the parent, among them, got {path}")
    return sorted(paths, key=lambda path: (len(path), path))


def check_paths(parent: Array, size: Array | np.ndarray, depth: int) -> None:
    if not (checks.is_concrete(parent) and checks.is_concrete(size)):
        return
    rows = zip(np.asarray(parent).tolist(), np.asarray(size).tolist(), strict=True)
    for row, (parents, used) in enumerate(rows):
        nodes: list[int] = []
        for slot, up in enumerate(parents[:used]):
            nodes.append(1 if up < 0 else nodes[up] + 1)
            if nodes[-1] > depth:
                raise ValueError(
                    f"parent: wanted paths of at most depth = {depth} nodes, "
                    f"got {nodes[-1]} to slot {slot} of row {row}"
                )


def check_slots(name: str, tokens: Array) -> None:
    checks.check_shape(name, tokens, ("B", "L"))
    if tokens.shape[1] == 0:
        raise ValueError(f"{name}: wanted at least 1 slot, got {checks.received(tokens)}")


def check_parents(name: str, parent: Array) -> None:
    if not checks.is_concrete(parent):
        return
    slots = np.asarray(parent)
    wrong = np.argwhere((slots < -1) | (slots >= np.arange(slots.shape[1])))
    if len(wrong):
        row, slot = wrong[0].tolist()
        raise ValueError(
            f"{name}: wanted -1 or a slot before the child's, got {slots[row, slot]} "
            f"for slot {slot} of row {row}"
        )


def check_range(name: str, x: Array | np.ndarray, least: int, most: int) -> None:
    if not checks.is_concrete(x):
        return
    values = np.asarray(x)
    invalid = np.argwhere((values < least) | (values > most))
    if len(invalid):
        index = tuple(invalid[0].tolist())
        raise ValueError(
            f"{name}: wanted integers from {least} to {most}, got {values[index]} at {list(index)}"
        )
