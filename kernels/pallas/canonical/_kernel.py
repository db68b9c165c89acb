"""The canonical kernel on TPUs and on NVIDIA's GPUs, written in Pallas."""

import abc
import dataclasses
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ...call._kernel import AbstractKernel, check_operands
from ...call._operands import KernelCall, Operands, cotangents, differentiated, out_dtype
from ...call._state import AttentionState
from ...call._target import check_capability
from ...masks._abstract import AbstractMask
from ...xla._canonical_call import LEAF, Sizes, check_not_learnt, check_whole
from .._rows import pairs_of
from ..gpu._chip import named_gpu
from . import _programs as programs
from ._sides import Sides, width_of

MOST_WIDTH = 256  # whose tiles are on a chip together


@dataclasses.dataclass(frozen=True)
class AbstractCanonical(AbstractKernel):
    """Attention whose bits depend on a row and the keys that it sees, as [`Canonical`][] on CPUs.

    A tile of rows and a leaf of keys are one program, in which no constant depends on the sizes of a call, and the
    canonical tree joins what it returns.

    Attributes:
        run: as of the kernel for CPUs.
        sizes: of tiles, constants of the platform's format, by the bytes of a number.
        dtypes: that it takes.
        least_tiles: a fold over keys of fewer tiles of rows is in parts.
    """

    run: int | None = None

    sizes: ClassVar[dict[int, Sizes]]
    dtypes: ClassVar[tuple[str, ...]]
    least_tiles: ClassVar[int]
    masks = (AbstractMask,)

    def check(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` for a part of the keys of a row; for arrays of biases and masks, and for scores;
        for other dtypes and wider heads; and for masks that no kernel of Pallas computes.
        """
        operands, settings, _ = call
        check_whole(settings)
        check_operands(operands, self.dtypes, ("bias", "mask"))
        pairs_of(operands, settings)
        for name in ("query", "value"):
            if (width := getattr(operands, name).shape[-1]) > MOST_WIDTH:
                raise NotImplementedError(
                    f"{name}: wanted a width of at most {MOST_WIDTH}, got {width}"
                )

    def forward(self, call: KernelCall) -> AttentionState:
        """The softmax over leaves, joined."""
        sides = self._sides(call, self.in_order)
        operands, settings, _ = call
        width = operands.value.shape[-1]
        program = programs.softmax(settings.scale, width_of(width), out_dtype(operands, settings))
        found = self._over_keys(call, sides, program, {"query": operands.query}, {})
        out, lse = map(sides.of_rows, found)
        return AttentionState(out[..., :width], lse)

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        """Gradients of queries are folded over leaves, those of keys and values over tiles of queries."""
        check_not_learnt(call.operands, call.settings)
        query, key, value = call.operands[:3]
        zeros = jax.tree.map(jnp.zeros_like, differentiated(call.operands))
        rows = {"query": query, "d_out": cotangent.out.astype(value.dtype), "out": state.out}
        rows |= {"lse": state.lse} | _given(d_lse=cotangent.lse)
        return cotangents(
            self.query_cotangent(call, rows), *self.key_cotangents(call, rows), zeros.bias
        )

    def query_cotangent(self, call: KernelCall, rows: dict[str, Array]) -> Array:
        """That of the queries of a call, whose rows have `query`, `d_out`, `out`, `lse` and perhaps `d_lse`."""
        sides = self._sides(call, self.in_order)
        query, width = call.operands.query, call.operands.query.shape[-1]
        program = programs.to_queries(call.settings.scale, width_of(width), query.dtype)
        (found,) = self._over_keys(call, sides, program, rows, {})
        return sides.of_rows(found)[..., :width]

    def key_cotangents(self, call: KernelCall, rows: dict[str, Array]) -> tuple[Array, Array]:
        """Those of the keys and values of a call, likewise."""
        # the sums of a key are over queries alone, so that keys may be read as they lie
        sides = self._sides(call, in_order=True)
        arrays = {"key": call.operands.key, "value": call.operands.value}
        widths = [x.shape[-1] for x in arrays.values()]
        program = programs.to_keys(
            call.settings.scale, [width_of(x) for x in widths], [x.dtype for x in arrays.values()]
        )
        held, other = sides.queries(rows)
        walk = sides.over_queries(held)
        found = self._fold(
            call, program, sides.keys(arrays), other, walk, lambda k, q: sides.seen(q, k)
        )
        to_key, to_value = (
            sides.of_keys(x, held)[..., :width] for x, width in zip(found, widths, strict=True)
        )
        return to_key, to_value

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        """Folded over leaves."""
        sides = self._sides(call, self.in_order)
        width = state.out.shape[-1]
        program = programs.along(call.settings.scale, width_of(width), state.out.dtype)
        rows = {"query": call.operands.query, "out": state.out, "lse": state.lse}
        rows |= _given(d_query=directions.query)
        moved = _given(d_key=directions.key, d_value=directions.value)
        out, lse = map(sides.of_rows, self._over_keys(call, sides, program, rows, moved))
        return AttentionState(out[..., :width], lse)

    def _sides(self, call: KernelCall, in_order: bool) -> Sides:
        return Sides(call, self.sizes[call.operands.query.dtype.itemsize], in_order)

    def _over_keys(
        self,
        call: KernelCall,
        sides: Sides,
        program: programs.Program,
        rows: dict[str, Array],
        moved: dict[str, Array],
    ) -> list[Array]:
        """The results of a program for rows, by two kernels: one folds leaves in parts, and one the parts."""
        arrays = {"key": call.operands.key, "value": call.operands.value} | moved
        own, keys = sides.rows(rows | _given(sink=sides.of.sink())), sides.keys(arrays)
        walk = sides.over_keys(own).in_parts(self.least_tiles // own.tiles)
        found = self._fold(call, programs.of_part(program), own, keys, walk, sides.seen)
        nodes, walk = walk.of_parts(found)
        own = own._replace(ids=())
        return self._fold(call, programs.of_parts(program), own, nodes, walk, lambda *_: None)

    def _fold(self, call: KernelCall, *args: Any) -> list[Array]:
        with named_gpu(call.platform):
            return self.folds().fold(*args, interpret=call.platform not in self.platforms)

    @property
    def in_order(self) -> bool:
        """Whether runs are of whole leaves."""
        return self.run is not None and self.run % LEAF == 0

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
    sizes: ClassVar[dict[int, Sizes]] = {2: Sizes(256, 128), 4: Sizes(256, 128)}
    dtypes = ("bfloat16", "float32")
    least_tiles = 1

    @staticmethod
    def folds() -> ModuleType:
        from . import _tpu

        return _tpu


class CanonicalGPU(AbstractCanonical):
    """In tiles of 64 rows and leaves of 64 keys; of 16 and 32 in float32."""

    name = "canonical_gpu"
    platforms = ("cuda",)
    interpreted = ("cpu", "tpu")
    exported = False
    # products of float32 are made of single instructions, of which larger tiles have too many
    sizes: ClassVar[dict[int, Sizes]] = {2: Sizes(64, 64), 4: Sizes(32, 16)}
    dtypes = ("bfloat16", "float16", "float32")
    least_tiles = 256

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


def _given(**arrays: Array | None) -> dict[str, Array]:
    return {name: x for name, x in arrays.items() if x is not None}
