"""The bench: compiles, times and checks programs, each guarded, and keeps every result on disk."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..runner import Run, measure

TOLERANCE = 0.02  # of the largest entry of a result in bfloat16
COMPILING = "several programs"  # the label of a compilation that is begun
_SHORT = 512  # lengths up to this are the same in a trial

Result = dict[str, Any]  # of one measurement, as stored in JSON
Program = Callable[..., PyTree]


def label_of(fields: Result) -> str:
    """The name of a result in its step: the kernel and the sizes."""
    return " ".join(map(str, fields.values()))


@dataclasses.dataclass(frozen=True)
class Bench:
    """The options of a run and its results, one JSON file that is complete after every measurement."""

    out: str  # folder of the results
    deadline: float
    repeats: int = 5  # timings of each program
    shrink: int = 1  # divisor of long sequences; above 1, only the first of several shapes is taken

    @property
    def path(self) -> Path:
        """The file of the results."""
        return Path(self.out, "first_light.json")

    @property
    def trial(self) -> bool:
        """Whether sequences are shortened."""
        return self.shrink > 1

    @functools.cached_property
    def results(self) -> dict[str, dict[str, Result]]:
        """Results by step and label, read from disk once.

        A result has figures, or the reason for their absence: `declined` by the kernel, or an `error`. A measurement
        that runs has `begun`.
        """
        return json.loads(self.path.read_text())["steps"] if self.path.exists() else {}

    def length(self, size: int) -> int:
        """A length of a sequence, divided in a trial."""
        return size if size <= _SHORT else max(size // self.shrink, 64)

    def known(self, step: str, label: str) -> bool:
        """Whether a measurement has been made, or has failed."""
        return label in self.results.get(step, {})

    def begin(self, step: str, label: str) -> None:
        """Records that a measurement begins, in case the process ends or hangs."""
        self.results.setdefault(step, {})[label] = {"begun": True}
        self._write()

    def put(self, step: str, label: str, result: Result) -> None:
        """Writes a result to disk, with texts for numbers that JSON does not have, and prints it."""
        numbers = {k: x for k, x in result.items() if isinstance(x, float)}
        result = result | {k: str(x) for k, x in numbers.items() if not math.isfinite(x)}
        self.results.setdefault(step, {})[label] = result
        self._write()
        figures = (
            f"{k}={x:.4g}" if isinstance(x, float) else f"{k}={x}" for k, x in result.items()
        )
        line = " ".join(f"{step}: {label}: {' '.join(figures)}".split())
        print(f"[{self.deadline - time.time():6.0f} s left] {line[:300]}", flush=True)

    def settle(self, error: str | None) -> bool:
        """Replaces begun measurements by an error, or removes them; returns whether there were any."""
        begun = [
            (x, y) for x, of_step in self.results.items() for y in of_step if "begun" in of_step[y]
        ]
        for step, label in begun:
            del self.results[step][label]
            if error is not None:
                self.put(step, label, {"error": error})
        self._write()
        return bool(begun)

    def _write(self) -> None:
        """Replaces the file at once, so that no reader finds half of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"steps": self.results}, indent=1) + "\n")
        new.replace(self.path)

    @contextlib.contextmanager
    def guarded(self, step: str, label: str) -> Iterator[None]:
        """Records an exception that is raised within as a result."""
        self.begin(step, label)
        try:
            yield
        except Exception as reason:
            self.failed(step, label, failure(reason))

    def failed(self, step: str, label: str, result: Result) -> None:
        """Writes the result of an exception, and ends the process if the device takes no further work."""
        self.put(step, label, result)
        try:
            jax.block_until_ready(jnp.zeros(8) + 1)
        except Exception:  # whatever a broken context raises; it may not come to an end, either
            os._exit(1)

    def measure(
        self,
        step: str,
        programs: Sequence[tuple[Result, Program]],
        inputs: Sequence[Array],
        figures: Callable[[float], Result],
        exact: Callable[[], PyTree] | None = None,
    ) -> None:
        """Compiles programs of the same inputs, if they have no result yet, then times and checks each.

        A program has the fields of its result, of which its label is made. The figures are of its seconds.
        """
        missing = [x for x in programs if not self.known(step, label_of(x[0]))]
        # one at a time where a process has ended while it compiled, and on CPUs, where XLA may deadlock with two
        alone = self.known(step, COMPILING) or self.trial or len(missing) == 1
        for group in [[x] for x in missing] if alone else filter(None, [missing]):
            self.begin(step, label_of(group[0][0]) if alone else COMPILING)
            with concurrent.futures.ThreadPoolExecutor() as pool:
                lowered = (_lowered(function, inputs) for _, function in group)
                compiled = list(pool.map(_compiled, lowered))
            if not alone:
                del self.results[step][COMPILING]
            for (fields, _), program in zip(group, compiled, strict=True):
                with self.guarded(step, label_of(fields)):
                    result = program
                    if not isinstance(program, dict):
                        run = functools.partial(program, *inputs)
                        result = self.timed(run, figures) | (_checked(run, exact) if exact else {})
                    self.put(step, label_of(fields), fields | result)

    def timed(self, run: Run, figures: Callable[[float], Result]) -> Result:
        """The median seconds of a run, the spread of its timings, and the figures of these seconds."""
        (times,) = measure({"run": run}, 1 if self.trial else self.repeats).values()
        seconds = statistics.median(times)
        return {"seconds": seconds, "spread": max(times) / min(times) - 1, **figures(seconds)}


def _lowered(function: Program, inputs: Sequence[Array]) -> Any:
    """The program before its compilation, or a result if the kernel declines or raises."""
    try:
        try:
            traced = jax.jit(function).trace(*inputs)
        except NotImplementedError as reason:
            return {"declined": str(reason)[:300]}
        return traced.lower()
    except Exception as reason:
        return failure(reason)


def _compiled(program: Any) -> Any:
    try:
        return program if isinstance(program, dict) else program.compile()
    except Exception as reason:
        return failure(reason)


def _checked(run: Run, exact: Callable[[], PyTree]) -> Result:
    """Whether results are exact but for rounding, and the largest error over its tolerance."""
    try:
        pairs = zip(jax.tree.leaves(exact()), jax.tree.leaves(run()), strict=True)
        errors = [float(jnp.abs(x - y).max() / jnp.abs(x).max()) for x, y in pairs]
    except Exception as reason:  # the times are kept
        return {"unchecked": failure(reason)["error"]}
    error = float(np.max(errors)) / TOLERANCE
    return {"good": error <= 1, "of_tolerance": error}


def failure(reason: BaseException) -> Result:
    """The result of a measurement that raises."""
    message = "".join(traceback.format_exception_only(reason)).strip()
    trace = "".join(traceback.format_exception(reason))
    return {"error": message[:1500], "where": trace[-700:].replace(os.getcwd(), ".")}
