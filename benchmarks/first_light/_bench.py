"""The bench: compiles, guards and times programs, and keeps every result on disk."""

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
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from energy_attn.kernels import implementations
from tests.support.arrays import array

from ..runner import measure

# The kernels for GPUs, in the order of the tables. Those that this version does not have are left out.
GPU_KERNELS = ("cudnn", "fa4", "mosaic_gpu", "pallas_gpu", "flash")
# Time limits in seconds of a measurement, and of the compilation of several; then the process is killed.
MEASURING, COMPILING = 90.0, 240.0
TRIAL = 128  # the divisor of lengths in a dry run
_SHORT = 512  # lengths up to this are the same in a trial
_SLOW = 20  # how many times longer than a GPU a CPU may take

Result = dict[str, Any]  # of one measurement, as stored in JSON
T = TypeVar("T")


class Late(Exception):
    """The time is spent."""


class Lost(Exception):
    """The device takes no further work from this process."""


class Job(NamedTuple):
    """A measurement.

    Attributes:
        label: its name in its step.
        function, arrays: the function to compile, and its arguments, which may be shapes.
        find: from the compiled function to its results.
        about: other fields of the results: the kernel and the sizes.
    """

    label: str
    function: Callable[..., PyTree]
    arrays: tuple[Any, ...]
    find: Callable[[Callable[..., Any]], Result]
    about: Result


@dataclasses.dataclass(frozen=True)
class Bench:
    """The options of a run and its results, one JSON file that is complete after every measurement.

    Attributes:
        out, copy: folders of the results.
        steps: those to take.
        deadline: the time after which nothing is begun.
        repeats: timings of each program.
        shrink: divisor of long sequences.
        trial: whether only the first of several shapes is taken.
        alone: whether programs are compiled one by one, to find the one that ends the process.
    """

    out: str
    copy: str | None
    steps: tuple[str, ...]
    deadline: float
    repeats: int = 5
    shrink: int = 1
    trial: bool = False
    alone: bool = False

    @property
    def path(self) -> Path:
        """The file of the results."""
        return Path(self.out, "first_light.json")

    @functools.cached_property
    def results(self) -> dict[str, dict[str, Result]]:
        """Results by step and label, read from disk once.

        A result has figures, or the reason why there are none: `declined` by the kernel, or an `error`. An error is
        `final` if the process ended with it.
        """
        return json.loads(self.path.read_text())["steps"] if self.path.exists() else {}

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels for GPUs that this version has."""
        return tuple(name for name in GPU_KERNELS if name in implementations())

    def length(self, size: int) -> int:
        """A length of a sequence, divided in a trial."""
        return size if size <= _SHORT else max(size // self.shrink, 64)

    def selected(self, values: Sequence[T]) -> Sequence[T]:
        """Returns all values, or the first in a trial run."""
        return values[:1] if self.trial else values

    def share(self, rate: float, label: str, key: str) -> float | None:
        """A rate as a share of a figure of the step `roof`, if that has been measured."""
        top = self.results.get("roof", {}).get(label, {}).get(key)
        return rate / top if top else None

    def known(self, step: str, label: str) -> bool:
        """Whether a measurement need not be made: a later call repeats errors, but no final ones."""
        result = self.results.get(step, {}).get(label, {"error": "not begun"})
        return "error" not in result or result.get("final", False)

    def put(self, step: str, label: str, result: Result) -> None:
        """Writes a result to disk, and prints it."""
        plain = {k: str(x) if _is_not_finite(x) else x for k, x in result.items()}
        self.results.setdefault(step, {})[label] = plain
        text = json.dumps({"steps": self.results}, indent=1, default=str) + "\n"
        for folder in filter(None, (self.out, self.copy)):
            _replace(Path(folder, self.path.name), text)
        shown = (
            f"{k}={x:.4g}" if isinstance(x, float) else f"{k}={x}"
            for k, x in plain.items()
            if k != "where"
        )
        line = " ".join(f"{step}: {label}: {' '.join(shown)}".split())
        print(f"[{self.deadline - time.time():6.0f} s left] {line[:300]}", flush=True)

    @property
    def _now(self) -> Path:
        return self.path.with_suffix(".now")

    def begin(self, step: str, labels: Sequence[str], seconds: float) -> None:
        """Records the labels that begin, and their time limit, in case the process ends or hangs.

        Raises `Late` if the time is spent.
        """
        now, patience = time.time(), _SLOW if self.trial else 1
        if now > self.deadline:
            raise Late
        until = min(now + patience * seconds, self.deadline + 20 * patience)
        _replace(self._now, json.dumps([step, list(labels), until]))

    def end(self) -> None:
        """Records that nothing is under way."""
        self._now.unlink(missing_ok=True)

    def under_way(self) -> tuple[str, list[str], float] | None:
        """The running step, its labels and its time limit; None if nothing runs."""
        try:
            return tuple(json.loads(self._now.read_text()))
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def guarded(self, step: str, label: str) -> Iterator[None]:
        """Records an exception that is raised within as a result.

        Raises `Late` if the time is spent, and `Lost` if the device does not work any more.
        """
        self.begin(step, [label], MEASURING)
        try:
            yield
        except Exception as reason:
            lost = not _alive()
            self.put(step, label, failure(reason) | ({"final": True} if lost else {}))
            if lost:
                raise Lost from reason
        self.end()

    def measure(self, step: str, jobs: Sequence[Job]) -> None:
        """Compiles all jobs that have no result yet, then makes their measurements, each guarded."""
        missing = [job for job in jobs if not self.known(step, job.label)]
        for group in [[job] for job in missing] if self.alone else filter(None, [missing]):
            self.begin(step, [job.label for job in group], COMPILING)
            # one at a time on CPUs, where XLA may deadlock with two
            programs = _compiled(group, 1 if self.trial else os.cpu_count() or 1)
            for job, program in zip(group, programs, strict=True):
                with self.guarded(step, job.label):
                    figures = program if isinstance(program, dict) else job.find(program)
                    self.put(step, job.label, {**job.about, **figures})

    def seconds(self, run: Callable[[], Any]) -> Result:
        """The median seconds of a run, and the spread of its timings."""
        (times,) = measure({"run": run}, 1 if self.trial else self.repeats).values()
        return {"seconds": statistics.median(times), "spread": max(times) / min(times) - 1}

    def timed(
        self,
        label: str,
        function: Callable[..., PyTree],
        arrays: Sequence[Any],
        figures: Callable[[float], Result] = lambda _: {},
        **about: object,
    ) -> Job:
        """A job that measures the seconds of a call, and `figures` of them."""

        def find(run: Callable[..., Any]) -> Result:
            timing = self.seconds(functools.partial(run, *arrays))
            return {**timing, **figures(timing["seconds"])}

        return Job(label, function, tuple(arrays), find, about)


def _compiled(jobs: Sequence[Job], workers: int) -> list[Callable[..., Any] | Result]:
    """The executable of each job, or a result if the kernel declines or raises; `workers` threads compile."""

    def lowered(job: Job) -> Any:
        try:
            traced = jax.jit(job.function).trace(*job.arrays)
        except NotImplementedError as reason:
            return {"declined": str(reason)[:300]}
        return traced.lower()

    def compiled(program: Any) -> Any:
        return program if isinstance(program, dict) else program.compile()

    programs = [_result_of(lowered, job) for job in jobs]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(functools.partial(_result_of, compiled), programs))


def _result_of(function: Callable[[Any], Any], x: Any) -> Any:
    try:
        return function(x)
    except Exception as reason:
        return failure(reason)


def normal(seed: int, shape: tuple[int, ...], dtype: str = "bfloat16") -> Array:
    """Random numbers: zeros are faster to compute with than data."""
    if math.prod(shape) <= 2**22:  # on the host, without a program for each shape
        return array(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)
    return _drawn(seed, shape, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _drawn(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
    # in pieces along the second axis: all numbers in float32 would not fit together with the rest
    pieces = math.gcd(shape[1], math.ceil(math.prod(shape) / 2**29))
    part = shape[0], shape[1] // pieces, *shape[2:]

    def piece(i: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), i)
        return jax.random.normal(key, part, jnp.float32).astype(dtype)

    return jnp.moveaxis(jax.lax.map(piece, jnp.arange(pieces)), 0, 1).reshape(shape)


def failure(reason: BaseException) -> Result:
    """The result of a measurement that raises."""
    message = "".join(traceback.format_exception_only(reason)).strip()
    trace = "".join(traceback.format_exception(reason))
    return {"error": message[:1500], "where": trace[-700:].replace(os.getcwd(), ".")}


def _alive() -> bool:
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception:  # whatever a broken context raises
        return False
    return True


def _is_not_finite(x: object) -> bool:
    return isinstance(x, float) and not math.isfinite(x)


def _replace(path: Path, text: str) -> None:
    """Writes a file at once, so that no reader finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f"{path.suffix}.new")
    new.write_text(text)
    new.replace(path)
