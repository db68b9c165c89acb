"""The kernels of a traced program, by name."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from energy_attn.kernels.internal import Attention, explain, platform_here, programs


def kernels(traced: jax.stages.Traced) -> str:
    """The names of the kernels that a program runs on this machine, each once, in order, joined by commas.

    Neither `reference`, which leaves only its operations in a program, nor any under `jax.vmap`.
    """
    return ", ".join(dict.fromkeys(_names(traced.jaxpr)))


def _names(program: ClosedJaxpr) -> Iterator[str]:
    for equation in program.eqns:
        call: Any = equation.params.get("call")
        if isinstance(getattr(call, "function", None), Attention):
            yield _name(call, [x.aval for x in equation.invars])
        else:
            for inner in programs(equation):
                yield from _names(inner)


def _name(call: Any, avals: list[Any]) -> str:
    names = [kernel.name for kernel in call.function.kernels]
    operands = call.args.unflatten(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)
    return explain(names, call.function.settings, operands, platform_here(), jax.devices()[0]).name
