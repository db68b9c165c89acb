"""The step `sweep`: `pallas_gpu` by other tiles than its own, those that the suite `tune` tries."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, PyTree

from .._tiles import OURS, TOLERANCE, Call, calls, cores_here, difference, program, trial_calls
from ._bench import Bench, Job, seconds
from ._record import Result


def sweep(bench: Bench) -> None:
    """Each kernel of `pallas_gpu` by all candidates; results that differ from those by its own tiles are wrong."""
    for call in trial_calls() if bench.trial else calls(bench.shrink):
        arrays = call.arrays()

        @functools.cache
        def wanted(call: Call = call, arrays: list[Array] = arrays) -> PyTree:
            return jax.jit(program(call, None))(*arrays)

        def find(
            run: Callable[..., Any],
            call: Call = call,
            arrays: list[Array] = arrays,
            wanted: Callable[[], PyTree] = wanted,
        ) -> Result:
            differs = difference(run(*arrays), wanted())
            found = seconds(run, arrays, 1 if bench.trial else bench.repeats)
            found["seconds"] /= call.steps
            return {"good": differs <= TOLERANCE, "difference": differs, **found}

        choices = {OURS: None, **call.tiles(cores_here())}
        jobs = [
            Job(
                f"{call.label}: {name}",
                program(call, tiles),
                tuple(arrays),
                find,
                {"kernel": "pallas_gpu", "call": call.label, "tiles": name},
            )
            for name, tiles in choices.items()
        ]
        bench.measure("sweep", jobs)
