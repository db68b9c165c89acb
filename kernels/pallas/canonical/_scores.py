"""The scores of a tile: what a score of `energy_attn.scores` makes of scaled products."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from ...call._operands import Operands, Settings
from ...fold._programs import AbstractTileScores, Blocks, Pullback
from .._score import score_of
from .._score_program import Numbers, ScoreProgram, Target
from ._sides import Pairs

FLOATS, FIXED = "score_float", "score_fixed"  # numbers of rows: names whose order is theirs


@dataclasses.dataclass(frozen=True)
class TileScores(AbstractTileScores):
    """What scores are; static.

    Attributes:
        scale: of products.
        program: what is made of these, None for nothing.
    """

    scale: float
    program: ScoreProgram | None

    def masked(self, raw: Array, rows: Blocks, pairs: Pairs) -> Array:
        if self.program is None:
            return jnp.where(pairs.seen, raw, -jnp.inf)
        scores = self.program.score(raw, *self._given(raw, rows, pairs))
        return jnp.where(pairs.seen, scores, -jnp.inf)

    def with_pullback(self, raw: Array, rows: Blocks, pairs: Pairs) -> tuple[Array, Pullback]:
        if self.program is None:
            return self.masked(raw, rows, pairs), lambda change: change
        scores, pullback = self.program.vjp(raw, *self._given(raw, rows, pairs))

        def to_products(change: Array) -> Array:
            return jnp.where(pairs.seen, pullback(change)[0], 0.0)

        return jnp.where(pairs.seen, scores, -jnp.inf), to_products

    def along(
        self, raw: Array, change: Array | None, rows: Blocks, pairs: Pairs
    ) -> tuple[Array, Array | None]:
        scores = self.masked(raw, rows, pairs)
        if self.program is None or change is None:
            return scores, change
        found = self.program.jvp(raw, *self._given(raw, rows, pairs), change, None)
        return scores, jnp.where(pairs.seen, found, 0.0)

    def _given(self, raw: Array, rows: Blocks, pairs: Pairs) -> tuple[dict[str, Array], Numbers]:
        """Positions and numbers in the shape of the products; those of rows lie as their positions do."""
        assert self.program is not None
        shape, are_own = raw.shape, pairs.query.shape[0] == raw.shape[0]
        places = {}
        if self.program.compares:
            places = {"query": pairs.query, "key": pairs.key}
            places = {name: jnp.broadcast_to(x, shape) for name, x in places.items()}

        def numbers(kind: str) -> tuple[Array, ...]:
            found = [rows[name] for name in sorted(rows) if name.startswith(kind)]
            return tuple(jnp.broadcast_to(x.T if are_own else x, shape) for x in found)

        return places, Numbers(numbers(FLOATS), (), numbers(FIXED))


def scores_of(operands: Operands, settings: Settings, target: Target) -> TileScores:
    """Those of a call. Raises `NotImplementedError` for a score that kernels do not compute."""
    program = score_of(operands, settings, target)
    if program is not None and program.sizes:
        raise NotImplementedError(
            f"score: wanted one without tables beside reproducible=True in a program for TPUs or GPUs, "
            f"got {program.name}"
        )
    return TileScores(settings.scale, program)
