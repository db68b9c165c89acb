"""The steps `check` and `check_large`: errors of every kernel against dense attention in float64."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from energy_attn.kernels import local_attention
from tests.support.problems import Problem
from tests.support.reference import dense, dense_jvp, dense_vjp

from ._bench import Bench, Job, normal
from ._record import Result

# Errors relative in the norm, and of lse the largest absolute one, by the dtype of the call.
ALLOWED = {"float32": (2e-5, 1e-4), "float16": (5e-3, 2e-3), "bfloat16": (2e-2, 2e-3)}
MOST_SCORES = 2**24  # of which the judge of the tests holds several arrays
_XLA = ("decode", "blockwise")
_AT_ONCE = 5  # cases whose programs are compiled together

Named = dict[str, Any]  # arrays: out and lse, and dq, dk and dv or dout and dlse


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and the derivatives to check.

    Attributes:
        query, key: shapes `[B, T, N, H]` and `[B, S, K, H]`.
        mode: "forward", "backward" (of both outputs) or "tangent".
        kernels: to check in addition to those for GPUs.
        arrays: positions, segments or lengths, by their names in the call.
    """

    label: str
    query: tuple[int, int, int, int]
    key: tuple[int, int, int, int]
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] | None = None
    mode: str = "backward"
    kernels: tuple[str, ...] = ()
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def operands(self) -> tuple[Array, ...]:
        """Query, key and value; then three directions, or the cotangents of `out` and of `lse`."""
        seed = 10 * sum(map(ord, self.label))
        inputs = [(shape, self.dtype) for shape in (self.query, self.key, self.key)]
        extra = {
            "forward": [],
            "tangent": inputs,
            "backward": [(self.query, self.dtype), (self.query[:-1], "float32")],
        }
        types = [*inputs, *extra[self.mode]]
        return tuple(normal(seed + i, *x) for i, x in enumerate(types))

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call."""
        return {"is_causal": self.causal, "local_window_size": self.window, **self.arrays}

    def by_kernel(self, name: str) -> Callable[..., Named]:
        """Returns the function of the operands that computes the results by a kernel."""

        def attend(*inputs: Array) -> tuple[Array, Array]:
            state = local_attention(*inputs, implementation=name, **self.options)
            return state.out, state.lse

        def run(*operands: Array) -> Named:
            inputs, extra = operands[:3], operands[3:]
            if self.mode == "tangent":
                (out, lse), (dout, dlse) = jax.jvp(attend, inputs, extra)
                return {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
            if self.mode == "forward":
                return dict(zip(("out", "lse"), attend(*inputs), strict=True))
            outputs, pullback = jax.vjp(attend, *inputs)
            names = ("out", "lse", "dq", "dk", "dv")
            return dict(zip(names, (*outputs, *pullback(tuple(extra))), strict=True))

        return run

    @functools.cached_property
    def reference(self) -> Named:
        """The exact results, by the reference of the tests or, where that is too slow, on the device in float64."""
        if self.query[1] * self.query[2] * self.key[1] > MOST_SCORES:
            return self.by_head()
        query, key, value, *extra = (np.asarray(x, np.float64) for x in self.operands)
        problem = Problem(self.label, query, key, value, **self.options)
        results: Named = dict(zip(("out", "lse"), dense(problem), strict=True))
        if self.mode == "tangent":
            directions = dict(zip(("query", "key", "value"), extra, strict=True))
            results |= zip(("dout", "dlse"), dense_jvp(problem, directions), strict=True)
        elif self.mode == "backward":
            dout, dlse = extra
            results |= {f"d{name[0]}": x for name, x in dense_vjp(problem, dout, dlse).items()}
        return results

    def by_head(self) -> Named:
        """The results by `blockwise` in float64, a head at a time, as all heads would not fit into memory."""
        group = self.query[2] // self.key[2]
        with jax.enable_x64(True):
            run = self.by_kernel("blockwise")

            @jax.jit  # the operands as arguments: what a function closes over becomes a constant of its program
            def one(head: int, *operands: Array) -> Named:
                heads = (head if x.shape[:3] == self.query[:3] else head // group for x in operands)
                of_head = (x[:, :, i, None] for x, i in zip(operands, heads, strict=True))
                return run(*(x.astype(jnp.float64) for x in of_head))

            by_head = [jax.device_get(one(head, *self.operands)) for head in range(self.query[2])]
        joined = {name: np.concatenate([x[name] for x in by_head], 2) for name in by_head[0]}
        for name in {"dk", "dv"} & set(joined):  # the sum over the heads of a group
            b, s, k, h = self.key
            joined[name] = joined[name].reshape(b, s, k, group, h).sum(3)
        return joined


def errors_of(results: Named, reference: Named) -> dict[str, float]:
    """Relative in the norm; of lse the largest, absolute, and infinite where only one is finite."""
    errors = {}
    for name, expected in reference.items():
        actual = np.asarray(results[name]).astype(np.float64)
        if name == "lse":
            finite = np.isfinite(expected)
            same_finite = (finite == np.isfinite(actual)).all()
            largest = float(np.abs(actual[finite] - expected[finite]).max(initial=0))
            errors[name] = largest if same_finite else math.inf
        else:
            errors[name] = float(
                np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)
            )
    return errors


def compared(bench: Bench, step: str, cases: Sequence[Case]) -> None:
    """Checks each kernel on each case, and whether a second run repeats the first; compiles all together."""

    def find(case: Case, run: Callable[..., Any]) -> Result:
        results, repeated = (jax.device_get(run(*case.operands)) for _ in range(2))
        errors = errors_of(results, case.reference)
        changed = [name for name in results if results[name].tobytes() != repeated[name].tobytes()]
        allowed, allowed_lse = ALLOWED[case.dtype]
        parts = [x / (allowed_lse if name == "lse" else allowed) for name, x in errors.items()]
        good = all(part <= 1 for part in parts)  # NaN is not
        return {"good": good, "of_tolerance": float(np.max(parts)), **errors, "moved": changed}

    jobs = [
        Job(
            f"{case.label} {name}",
            case.by_kernel(name),
            case.operands,
            functools.partial(find, case),
            {"kernel": name, "case": case.label, "mode": case.mode, "dtype": case.dtype},
        )
        for case in cases
        for name in (*bench.kernels, *case.kernels)
        if not bench.record.known(step, f"{case.label} {name}")  # or arrays are made for nothing
    ]
    bench.measure(step, jobs)


def check(bench: Bench) -> None:
    """Small shapes: values, energies and derivatives; and bits on a second run."""
    cases = list(_small(bench))
    if bench.trial:
        labels = ("causal float32 64", "tangent float32 64", "decode with lengths", "positions")
        cases = [case for case in cases if case.label in labels]
    for i in range(0, len(cases), _AT_ONCE):
        compared(bench, "check", cases[i : i + _AT_ONCE])


_DTYPES = (
    *(("bfloat16", 64), ("bfloat16", 128), ("float16", 80), ("float32", 64)),
    ("bfloat16", 256),  # without a tangent
)


def _small(bench: Bench) -> Iterator[Case]:
    keys, long = bench.length(1000), bench.length(4099)
    for dtype, h in _DTYPES:
        square, ragged = ((2, 130, 4, h), (2, 130, 2, h)), ((2, 33, 6, h), (2, keys, 2, h))
        yield Case(f"causal {dtype} {h}", *square, dtype, causal=True)
        yield Case(f"ragged {dtype} {h}", *ragged, dtype, kernels=_XLA)
    for dtype, h in _DTYPES[:-1]:
        square = (1, 130, 4, h), (1, 130, 2, h)
        yield Case(f"tangent {dtype} {h}", *square, dtype, causal=True, mode="tangent")
    yield Case("decode", (2, 1, 32, 128), (2, long, 8, 128), kernels=_XLA)
    lengths = {"key_value_seq_lengths": np.array([long - 7, 0], np.int32)}
    shapes = (2, 1, 8, 128), (2, long, 1, 128)
    yield Case("decode with lengths", *shapes, kernels=_XLA, arrays=lengths)
    blocks = _XLA[1:]
    for rows in (8, 9, 16, 32):
        yield Case(f"{rows} queries", (1, rows, 16, 128), (1, long, 4, 128), kernels=blocks)
    square = (1, 300, 4, 64), (1, 300, 4, 64)
    yield Case("window", *square, causal=True, window=(50, 0), kernels=blocks)
    grouped = (1, 300, 4, 64), (1, 300, 2, 64)
    places = np.random.default_rng(0).permutation(300).astype(np.int32)[None]
    places[0, ::7] = -1
    positions = {"query_positions": np.arange(300, dtype=np.int32)[None], "key_positions": places}
    yield Case("positions", *grouped, causal=True, arrays=positions, kernels=blocks)
    parts = np.repeat(np.arange(3, dtype=np.int32), 100)[None]
    segments = {"query_segment_ids": parts, "key_segment_ids": parts}
    yield Case("segments", *grouped, causal=True, arrays=segments, kernels=blocks)


def check_large(bench: Bench) -> None:
    """Grids, splits and offsets of real use; above 2^31 elements at the end."""
    long = bench.length(8192)
    cases = [
        Case(f"causal {long} 128", (1, long, 4, 128), (1, long, 1, 128), causal=True),
        Case(f"causal {long} 64", (1, long, 4, 64), (1, long, 4, 64), causal=True),
        Case(f"full {long} 128", (2, long, 2, 128), (2, long, 2, 128)),
    ]
    for keys in map(bench.length, bench.selected((2**20, 2**21, 2**22))):  # 2^31 elements at 2^21
        shapes = (1, 1, 32, 128), (1, keys, 8, 128)
        cases.append(Case(f"decode {keys} keys", *shapes, mode="forward"))
    while cases:  # one at a time: the largest fill half of the memory
        compared(bench, "check_large", [cases.pop(0)])
