"""Deterministic programs, whose results do not depend on fusion; one primitive until they are lowered."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.core
from jax import lax
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from .._varying import axes_of, vary_together
from ..autodiff._function import run_compiled
from ..pallas.gpu._plan import named_gpu
from ..pallas.tile_program import _evaluated as chips
from ..program._jaxpr import evaluate_by, function_of, without_mesh
from ..xla import _tile_program as cpu
from ._lowering import device_of, lower_by_platform, lower_on


def computed(function: Callable[..., Any], *args: Any) -> Any:
    return evaluate_by(evaluated, function, *args)


def evaluated(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr so that the bits of each entry do not depend on the surrounding program.

    Raises `NotImplementedError`, when it is lowered for a TPU or a GPU, for operations whose order of summation XLA
    chooses.
    """
    return _tile_program_p.bind(*consts, *args, jaxpr=jaxpr)


_tile_program_p = Primitive("tile_program")
_tile_program_p.multiple_results = True
run_compiled(_tile_program_p, ("jaxpr",))


@_tile_program_p.def_abstract_eval
def _types(*flat: jax.core.ShapedArray, jaxpr: Jaxpr) -> list[Any]:
    kinds: list[Any] = [x.aval.strip_weak_type() for x in jaxpr.outvars]
    is_manual = jax.sharding.get_abstract_mesh().manual_axes
    if not is_manual or any(axes_of(x.aval) for x in (*jaxpr.constvars, *jaxpr.invars)):
        return kinds
    # traced without the mesh

    def like(*flat: Array) -> list[Array]:
        first = vary_together(flat)[0]
        return [lax.full_like(first, 0, x.dtype, x.shape) for x in kinds]

    return jax.make_jaxpr(like)(*flat).out_avals


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, jaxpr: Jaxpr) -> tuple[Any, Any]:
    tangents = list(map(ad.instantiate_zeros, tangents))
    out_tangents = jax.jvp(function_of(jaxpr), tuple(primals), tuple(tangents))[1]
    return _tile_program_p.bind(*primals, jaxpr=jaxpr), out_tangents


def _batch(
    axis: Any, flat: Sequence[Array], axes: Sequence[int | None], *, jaxpr: Jaxpr
) -> tuple[Any, Any]:
    named = {"axis_name": axis.name, "axis_size": axis.size}
    program = jax.make_jaxpr(jax.vmap(function_of(jaxpr), in_axes=tuple(axes), **named))(*flat)
    result = evaluated(program.jaxpr, program.consts, flat)
    return result, [0] * len(result)


ad.primitive_jvps[_tile_program_p] = _jvp
batching.fancy_primitive_batchers[_tile_program_p] = _batch


def _lower(ctx: Any, *flat: mlir.ir.Value, on: str, jaxpr: Jaxpr) -> Any:
    count, is_manual = len(jaxpr.constvars), jax.sharding.get_abstract_mesh().manual_axes
    rules: Callable[..., list[Any]] = cpu.evaluated
    if on != "cpu":
        chip = chips.chip_for(on, interpret=False)
        rules = functools.partial(chips.evaluated, platform=on, chip=chip)

    def run(*flat: Array) -> list[Array]:
        # XLA shards what has no sharding in its type
        with nullcontext() if is_manual else without_mesh(), named_gpu(on):
            return rules(jaxpr, flat[:count], flat[count:])

    device = device_of(ctx.module_context, on)
    return lower_on(device, ctx, flat, run, plain=on != "cpu" or not is_manual)


lower_by_platform(_tile_program_p, _lower)
