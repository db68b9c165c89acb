"""The canonical kernel on TPUs and on NVIDIA's GPUs, written in Pallas."""

import abc
import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ...call._kernel import AbstractKernel, check_operands
from ...call._leaves import LEAF
from ...call._operands import KernelCall, Operands, cotangents, differentiated, out_dtype
from ...call._state import AttentionState, holds_keys
from ...call._target import check_capability
from ...masks._abstract import AbstractMask
from ...scores._structure import floating
from ...xla._blockwise import cast_like
from ...xla._canonical_call import check_whole, rounded
from ...xla._canonical_sums import sink_units, tree_sum
from .._rows import pairs_of
from .._score import score_numbers
from .._score_program import Target
from ..gpu._chip import named_gpu
from ..gpu._plan import TARGET as gpu_target
from ..tile_program._evaluated import chip_for, evaluated
from ..tpu._layout import TARGET as tpu_target
from . import _programs as programs
from ._over_keys import OverKeys
from ._programs import without_signs
from ._scores import FIXED, FLOATS, Scores, scores_of
from ._sides import Sides, Sizes, given, width_of

MOST_WIDTH = 256  # whose tiles are on a chip together


@dataclasses.dataclass(frozen=True)
class AbstractCanonical(AbstractKernel):
    """Attention whose bits depend on a row and the keys that it sees, as `Canonical` on CPUs.

    A tile of rows and a leaf of keys are one program, in which no constant depends on the sizes of a call, and the
    canonical tree joins what it returns.

    Attributes:
        run: as of the kernel for CPUs.
        sizes: of tiles, constants of the platform's format, by the bytes of a number.
        dtypes: that it takes.
        target: the functions of scores that its compiler takes.
        least_tiles: a fold over keys of fewer tiles of rows is in parts.
    """

    run: int | None = None

    sizes: ClassVar[dict[int, Sizes]]
    dtypes: ClassVar[tuple[str, ...]]
    target: ClassVar[Target]
    least_tiles: ClassVar[int]
    masks = (AbstractMask,)
    scores = True

    def check(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` for a part of the keys of a row; for arrays of biases and masks; for other
        dtypes and wider heads; and for masks and scores that no kernel of Pallas computes, or with tables.
        """
        operands, settings, _ = call
        check_whole(settings)
        check_operands(operands, self.dtypes, ("bias", "mask"))
        pairs_of(operands, settings)
        self._scores(call)
        for name in ("query", "value"):
            if (width := getattr(operands, name).shape[-1]) > MOST_WIDTH:
                raise NotImplementedError(
                    f"{name}: wanted a width of at most {MOST_WIDTH}, got {width}"
                )

    def forward(self, call: KernelCall) -> AttentionState:
        """The softmax over leaves, joined."""
        return self.rounded_state(call, self.state_over_keys(call).whole())[0]

    def state_over_keys(self, call: KernelCall) -> OverKeys:
        """The state of each row over leaves."""
        operands, settings, _ = call
        width, dtype = operands.value.shape[-1], out_dtype(operands, settings)
        program = programs.softmax(self._scores(call), width_of(width), dtype)
        return self._over_keys(call, program, {"query": operands.query}, {}, width)

    def rounded_state(self, call: KernelCall, found: list[Array]) -> tuple[AttentionState, Array]:
        """The state, from the results of `state_over_keys`; what rounding took from it is not known."""
        out, lse = found
        return AttentionState(out, lse), jnp.zeros_like(lse)

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        """Gradients of queries are folded over leaves, those of keys and values over tiles of queries.

        Raises `NotImplementedError` where that of a score's arrays is wanted.
        """
        if call.settings.needs.score_grad and any(map(floating, call.operands.score_arrays)):
            raise _not_learnt(call)
        given = call, state, cotangent
        zeros = jax.tree.map(jnp.zeros_like, differentiated(call.operands))
        found = cotangents(
            self.query_cotangent(*given),
            *self.key_cotangents(*given),
            zeros.bias,
            zeros.score_arrays,
            self.sink_cotangent(*given) if call.settings.needs.sink_grad else zeros.sink,
        )
        return cast_like(found, call.operands)

    def sink_cotangent(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array | None:
        """That of the sink; None: there is none."""
        sink = call.operands.sink
        if sink is None or 0 in call.operands.query.shape[:2]:
            return None if sink is None else jnp.zeros_like(sink)
        units = sink_units(self, call, state, cotangent)
        return units.found if sink.ndim == 2 else units.of_heads()

    def sink_terms(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        r"""What each row adds to that, $-e^{b - F} \delta$, `[B, T, N]`."""
        rows = _rows(call, state, cotangent) | given(sink=self._sides(call, 0).of.sink())

        def terms(rows: dict[str, Array]) -> Array:
            products = rows["d_out"].astype(jnp.float32) * rows["out"].astype(jnp.float32)
            delta = products.sum(-1) - rows.get("d_lse", 0.0)
            some = holds_keys(rows["lse"])
            weight = jnp.exp(rows["sink"] - jnp.where(some, rows["lse"], jnp.inf))
            return jnp.where(some, -weight * delta, 0.0)

        return self._computed(call, terms, rows)

    def sink_sums(self, call: KernelCall, terms: Array) -> Array:
        """The sums of numbers of rows, `[B, N]`: over tiles of queries, which the canonical tree folds."""
        sides = self._sides(call, 0)
        held = sides.of.queries_by_position(sides.size)
        there = held.positions >= 0
        terms = jnp.where(there[..., None], held.spread(terms), 0.0)
        found = self._computed(call, lambda x: x.sum(2), terms)
        numbers = jnp.where(there.any(-1), held.numbers, -1)
        numbers = jnp.broadcast_to(numbers, found.shape[:2])
        return held.checked(without_signs(jax.vmap(tree_sum)(numbers, found)))

    def _computed(self, call: KernelCall, f: Callable[..., Any], *args: Any) -> Any:
        """A function of arrays, by the rules of tile programs."""
        (platform,) = self.platforms
        program, struct = jax.make_jaxpr(f, return_shape=True)(*args)
        with named_gpu(call.platform):
            chip = chip_for(platform, interpret=call.platform != platform)
            given = rounded(jax.tree.leaves(args))
            found = evaluated(program.jaxpr, program.consts, given, platform, chip)
        return jax.tree.unflatten(jax.tree.structure(struct), found)

    def query_cotangent(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Array:
        """That of the queries of a call, in float32."""
        return self.rounded_query(call, self.query_over_keys(call, state, cotangent).whole())

    def query_over_keys(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> OverKeys:
        """The gradient of each row over leaves."""
        width = call.operands.query.shape[-1]
        program = programs.to_queries(self._scores(call), width_of(width))
        return self._over_keys(call, program, _rows(call, state, cotangent), {}, width)

    def rounded_query(self, call: KernelCall, found: list[Array]) -> Array:
        """The gradient, from the results of `query_over_keys`."""
        return found[0]

    def key_cotangents(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> tuple[Array, Array]:
        """Those of the keys and values of a call, likewise."""
        # the sums of a key are over queries alone, so that keys may be read as they lie
        sides = self._sides(call, 1)
        arrays = {"key": call.operands.key, "value": call.operands.value}
        widths = [x.shape[-1] for x in arrays.values()]
        program = programs.to_keys(self._scores(call), [width_of(x) for x in widths])
        rows = _rows(call, state, cotangent) | self._numbers(call)
        held, other = sides.queries(rows)
        walk, keys = sides.over_queries(held), sides.keys(arrays)
        found = self._fold(call)(program, keys, other, walk, lambda k, q: sides.pairs(q, k))
        to_key, to_value = (
            sides.of_keys(x, held)[..., :width] for x, width in zip(found, widths, strict=True)
        )
        return to_key, to_value

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        """Folded over leaves."""
        return self.rounded_tangent(state, self.tangent_over_keys(call, state, directions).whole())

    def tangent_over_keys(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> OverKeys:
        """The tangent of each row over leaves. Raises `NotImplementedError` in a direction of a score's arrays."""
        if any(x is not None for x in directions.score_arrays):
            raise _not_learnt(call)
        width = state.out.shape[-1]
        program = programs.along(self._scores(call), width_of(width), state.out.dtype)
        rows = {"query": call.operands.query, "out": state.out, "lse": state.lse}
        rows |= given(d_sink=self._sides(call, 0).of.of_heads(directions.sink, 0.0))
        moved = given(d_key=directions.key, d_value=directions.value)
        return self._over_keys(call, program, rows | given(d_query=directions.query), moved, width)

    def rounded_tangent(self, state: AttentionState, found: list[Array]) -> AttentionState:
        """The tangent, from the results of `tangent_over_keys`."""
        out, lse = found
        return AttentionState(out, lse)

    def _over_keys(
        self,
        call: KernelCall,
        program: programs.Program,
        rows: dict[str, Array],
        moved: dict[str, Array],
        width: int,
    ) -> OverKeys:
        keys = {"key": call.operands.key, "value": call.operands.value} | moved
        sides, rows = self._sides(call, self.subtree), rows | self._numbers(call)
        return OverKeys(sides, program, rows, keys, self._fold(call), self.least_tiles, width)

    def _scores(self, call: KernelCall) -> Scores:
        return scores_of(call.operands, call.settings, self.target)

    def _numbers(self, call: KernelCall) -> dict[str, Array]:
        """Those of the score for each row, `[B, T, N]`."""
        program = self._scores(call).program
        if program is None:
            return {}
        found = self._computed(call, lambda x: score_numbers(x, program), call.operands)
        named = [(FLOATS, x) for x in found.floats] + [(FIXED, x) for x in found.fixed]
        shape = call.operands.query.shape[:3]
        return {
            f"{kind}{i:03}": jnp.broadcast_to(x[:, None], shape)
            for i, (kind, x) in enumerate(named)
        }

    def _sides(self, call: KernelCall, subtree: int) -> Sides:
        return Sides(call, self.sizes[call.operands.query.dtype.itemsize], subtree)

    def _fold(self, call: KernelCall) -> Callable[..., list[Array]]:
        def fold(*args: Any) -> list[Array]:
            with named_gpu(call.platform):
                return self.folds().fold(*args, interpret=call.platform not in self.platforms)

        return fold

    @property
    def subtree(self) -> int:
        """The most leaves that are one of each run, 0 where runs are not of whole leaves."""
        leaves, rest = divmod(self.run or 1, LEAF)
        return 0 if rest else leaves & -leaves

    @staticmethod
    @abc.abstractmethod
    def folds() -> ModuleType:
        """The module that folds tiles on the platform."""


class CanonicalTPU(AbstractCanonical):
    """In tiles of 128 rows and leaves of 256 keys."""

    name = "canonical_tpu"
    platforms = ("tpu",)
    interpreted = ("cpu", "cuda", "rocm")
    exported = True
    sizes: ClassVar[dict[int, Sizes]] = {2: Sizes(128, 128), 4: Sizes(128, 128)}
    dtypes = ("bfloat16", "float32")
    target = tpu_target
    least_tiles = 1

    @staticmethod
    def folds() -> ModuleType:
        from . import _tpu

        return _tpu


class CanonicalGPU(AbstractCanonical):
    """In tiles of 64 rows, of which 64 keys of a leaf at a time are added; of 16 and 32 in float32."""

    name = "canonical_gpu"
    platforms = ("cuda",)
    interpreted = ("cpu", "tpu")
    exported = False
    # products of float32 are made of single instructions, of which larger tiles have too many
    sizes: ClassVar[dict[int, Sizes]] = {2: Sizes(64, 256), 4: Sizes(16, 256)}
    dtypes = ("bfloat16", "float16", "float32")
    target = gpu_target
    least_tiles = 512

    def check(self, call: KernelCall) -> None:
        """Likewise; and for GPUs older than compute capability 8.0, and JAX without Pallas on Triton."""
        check_capability(self.name, (8, 0))
        super().check(call)
        try:
            from . import _gpu  # noqa: F401
        except ImportError as reason:
            raise NotImplementedError(
                f"reproducible: wanted a JAX with Pallas on Triton, got {reason}"
            ) from reason

    @staticmethod
    def folds() -> ModuleType:
        from . import _gpu

        return _gpu


def _not_learnt(call: KernelCall) -> NotImplementedError:
    return NotImplementedError(
        "score: wanted one whose arrays have no derivatives beside reproducible=True in a program for "
        f"{call.platform}, got theirs"
    )


def _rows(call: KernelCall, state: AttentionState, cotangent: AttentionState) -> dict[str, Array]:
    """What the tiles of a backward know of their rows."""
    d_out = cotangent.out.astype(call.operands.value.dtype)
    rows = {"query": call.operands.query, "d_out": d_out, "out": state.out, "lse": state.lse}
    return rows | given(d_lse=cotangent.lse)
