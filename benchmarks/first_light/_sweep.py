"""The step `sweep`: `pallas_gpu` by other tiles than its own, those that `tune` tries."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, PyTree

from ..runner import OURS, difference
from ..tiles import TOLERANCE, Call, calls, cores_here, program, trial_calls
from ._bench import Bench, Job, seconds
from ._record import Result


def sweep(bench: Bench) -> None:
    """Times each kernel of `pallas_gpu` with all candidate tiles, and checks their results."""
    for call in trial_calls() if bench.trial else calls(bench.shrink):
        arrays = tuple(call.arrays())
        find = functools.partial(
            _find, bench, call, arrays, functools.cache(_reference(call, arrays))
        )
        choices = {OURS: None, **call.tiles(cores_here())}
        jobs = [
            Job(
                f"{call.label}: {name}",
                program(call, tiles),
                arrays,
                find,
                {"kernel": "pallas_gpu", "call": call.label, "tiles": name},
            )
            for name, tiles in choices.items()
        ]
        bench.measure("sweep", jobs)


def _reference(call: Call, arrays: tuple[Array, ...]) -> Callable[[], PyTree]:
    return lambda: jax.jit(program(call, None))(*arrays)


def _find(
    bench: Bench,
    call: Call,
    arrays: tuple[Array, ...],
    reference: Callable[[], PyTree],
    run: Callable[..., Any],
) -> Result:
    differs = difference(reference(), run(*arrays))
    timing = seconds(run, arrays, 1 if bench.trial else bench.repeats)
    timing["seconds"] /= call.steps
    return {"good": differs <= TOLERANCE, "difference": differs, **timing}
