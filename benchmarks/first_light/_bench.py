"""The bench, which compiles, guards and times programs; and the list of kernels."""

import concurrent.futures
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from energy_attn.kernels import implementations, local_attention

from ._record import COMPILING, Record, Result, failure

# The kernels for GPUs, in the order of the tables. Those that this version does not have are left out.
GPU_KERNELS = ("cudnn", "fa4", "mosaic_gpu", "pallas_gpu", "flash")
LEAST = 0.25  # seconds that all timings of one program take, if they can be had
SHORT = 512  # lengths up to this are the same in a trial
_SMALL = 2**22  # elements
TRIAL = 128  # the divisor of lengths in a dry run
_SLOW = 20  # how many times longer than a GPU a CPU may take

T = TypeVar("T")


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
    """The options of the measuring process, and state that its steps share.

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

    def read(self) -> Record:
        """The results on disk."""
        copy = Path(self.copy) if self.copy else None
        return Record(Path(self.out), copy, self.deadline, _SLOW if self.trial else 1)

    record = functools.cached_property(read)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels for GPUs that this version has."""
        return tuple(name for name in GPU_KERNELS if name in implementations())

    @property
    def workers(self) -> int:
        """How many programs are compiled at once; one on CPUs, where XLA may deadlock with two."""
        return 1 if self.trial else os.cpu_count() or 1

    def length(self, size: int) -> int:
        """A length of a sequence, divided in a trial."""
        return size if size <= SHORT else max(size // self.shrink, min(SHORT, 64))

    def selected(self, values: Sequence[T]) -> Sequence[T]:
        """Returns all values, or the first in a trial run."""
        return values[:1] if self.trial else values

    def ceiling(self, label: str, key: str) -> float | None:
        """A figure of the step `roof`, if it has been measured."""
        return self.record.steps.get("roof", {}).get(label, {}).get(key)

    def measure(self, step: str, jobs: Sequence[Job]) -> None:
        """Compiles all jobs that have no result yet, then makes their measurements, each guarded.

        Raises `Late` if the time is spent, and `Lost` if the device does not work any more.
        """
        missing = [job for job in jobs if not self.record.known(step, job.label)]
        groups = [[job] for job in missing] if self.alone else [missing]
        for group in filter(None, groups):
            self.record.begin(step, [job.label for job in group], COMPILING)
            for job, ready in zip(group, _compiled(group, self.workers), strict=True):
                with self.record.guarded(step, job.label):
                    figures = ready if isinstance(ready, dict) else job.find(ready)
                    self.record.put(step, job.label, {**job.about, **figures})
        self.record.end()

    def timed(
        self,
        label: str,
        function: Callable[..., PyTree],
        arrays: Sequence[Array],
        figures: Callable[[float], Result] = lambda _: {},
        **about: object,
    ) -> Job:
        """A job that measures the seconds of a call, and `figures` of them."""
        arrays = tuple(arrays)

        def find(run: Callable[..., Any]) -> Result:
            timing = seconds(run, arrays, 1 if self.trial else self.repeats)
            return {**timing, **figures(timing["seconds"])}

        return Job(label, function, arrays, find, about)


def _compiled(jobs: Sequence[Job], workers: int) -> list[Callable[..., Any] | Result]:
    """The executable of each job, or a result if the kernel declines or raises; compiled by `workers` threads."""

    def finish(lowered: Any) -> Any:
        try:
            return lowered.compile()
        except Exception as reason:  # a compiler's, which is a result
            return failure(reason)

    def begin(job: Job) -> Any:
        try:
            traced = jax.jit(job.function).trace(*job.arrays)
        except NotImplementedError as reason:
            return {"declined": str(reason)[:300]}
        except Exception as reason:
            return failure(reason)
        try:
            return pool.submit(finish, traced.lower())
        except Exception as reason:
            return failure(reason)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        begun = [begin(job) for job in jobs]
        return [x.result() if isinstance(x, concurrent.futures.Future) else x for x in begun]


def seconds(run: Callable[..., Any], arrays: Sequence[Any], repeats: int) -> Result:
    """Seconds of a call with many in flight, so that starting them is hidden: the median, and the spread."""
    for _ in range(2):
        jax.block_until_ready(run(*arrays))
    begin = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    once = time.perf_counter() - begin
    number = int(min(max(LEAST / repeats / once, 1), 100))
    groups = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(number):
            result = run(*arrays)
        jax.block_until_ready(result)  # pyright: ignore[reportPossiblyUnboundVariable]  # at least one
        groups.append((time.perf_counter() - begin) / number)
    return {"seconds": statistics.median(groups), "spread": max(groups) / min(groups) - 1}


def out_of(*arrays: Array, **options: Any) -> Array:
    """`local_attention(...).out`."""
    return local_attention(*arrays, **options).out


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed: int | Array, shape: tuple[int, ...], dtype: str) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def normal(seed: int, shape: tuple[int, ...], dtype: str = "bfloat16") -> Array:
    """Random numbers: zeros are faster to compute with than data.

    Small arrays are made on the host, without a program for each shape. Large ones are made in pieces along the
    second axis: the whole in float32 would not fit beside the rest.
    """
    if math.prod(shape) <= _SMALL:
        numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return jnp.asarray(numbers.astype(jnp.dtype(dtype)))
    pieces = math.ceil(math.prod(shape) / 2**29)
    if pieces <= 1:
        return _normal(seed, shape, dtype)
    while shape[1] % pieces:
        pieces += 1
    part = (shape[0], shape[1] // pieces, *shape[2:])

    def put(x: Array, y: Array, i: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, y, i, 1)

    write = jax.jit(put, donate_argnums=0)
    x = jnp.zeros(shape, dtype)
    for i in range(pieces):
        x = write(x, _normal(seed + 1000 * i, part, dtype), i * part[1])
    return x
