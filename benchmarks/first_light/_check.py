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
from tests.support.compare import RATIOS, close
from tests.support.problems import Problem
from tests.support.reference import dense, dense_jvp, dense_vjp, largest

from ._bench import Bench, Job, Result, normal

# Largest errors relative to the largest entry, and absolute ones of lse, by the dtype of the call.
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
        options: of the call.
    """

    label: str
    query: tuple[int, int, int, int]
    key: tuple[int, int, int, int]
    dtype: str = "bfloat16"
    mode: str = "backward"
    kernels: tuple[str, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

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
            outputs, pullback = jax.vjp(attend, *inputs)
            gradients = pullback(tuple(extra)) if extra else ()
            return dict(zip(("out", "lse", "dq", "dk", "dv"), (*outputs, *gradients), strict=False))

        return run

    @functools.cached_property
    def reference(self) -> Named:
        """The exact results, by the judge of the tests or, where that is too slow, on the device in float64."""
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
        results = {name: np.concatenate([x[name] for x in by_head], 2) for name in by_head[0]}
        for name in {"dk", "dv"} & set(results):  # the sum over the heads of a group
            b, s, k, h = self.key
            results[name] = results[name].reshape(b, s, k, group, h).sum(3)
        return results


def judged(results: Named, reference: Named, dtype: str) -> Result:
    """The errors of results and the largest relative to its tolerance, by the comparison of the tests."""
    allowed, allowed_lse = ALLOWED[dtype]
    errors, parts, good = {}, [], True
    for name, exact in reference.items():
        unit, tolerance, size = largest(exact) or 1.0, allowed, allowed
        if name == "lse":  # not relative to its largest entry
            unit, tolerance, size = 1.0, allowed_lse / max(unit, 1.0), allowed_lse
        try:
            close(np.asarray(results[name], np.float64) / unit, exact / unit, name, tolerance)
            part = RATIOS.pop()[0]
        except AssertionError:
            good, part = False, RATIOS.pop()[0]
            if part <= 1:  # an infinite entry that should be finite, or the other way around
                part = math.inf
        parts.append(part)
        errors[name] = part * size
    return {"good": good, "of_tolerance": float(np.max(parts)), **errors}


def compared(bench: Bench, step: str, cases: Sequence[Case]) -> None:
    """Checks each kernel on each case, and whether a second run repeats the first; compiles all together."""

    def find(case: Case, run: Callable[..., Any]) -> Result:
        results, repeated = (jax.device_get(run(*case.operands)) for _ in range(2))
        changed = [name for name in results if results[name].tobytes() != repeated[name].tobytes()]
        return {**judged(results, case.reference, case.dtype), "moved": changed}

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
        if not bench.known(step, f"{case.label} {name}")  # or arrays are made for nothing
    ]
    bench.measure(step, jobs)


def check(bench: Bench) -> None:
    """Small shapes: values, energies and derivatives; and bits on a second run."""
    cases = list(small_cases(bench))
    if bench.trial:
        labels = ("causal float32 64", "tangent float32 64", "decode with lengths", "positions")
        cases = [case for case in cases if case.label in labels]
    for i in range(0, len(cases), _AT_ONCE):
        compared(bench, "check", cases[i : i + _AT_ONCE])


def small_cases(bench: Bench) -> Iterator[Case]:
    """Square, ragged and decode calls in each dtype, and each option of a call."""
    keys, long, causal = bench.length(1000), bench.length(4099), {"is_causal": True}
    dtypes = ("bfloat16", 64), ("bfloat16", 128), ("float16", 80), ("float32", 64)
    for dtype, h in (*dtypes, ("bfloat16", 256)):  # without a tangent of the last
        square, ragged = ((2, 130, 4, h), (2, 130, 2, h)), ((2, 33, 6, h), (2, keys, 2, h))
        yield Case(f"causal {dtype} {h}", *square, dtype, options=causal)
        yield Case(f"ragged {dtype} {h}", *ragged, dtype, kernels=_XLA)
    for dtype, h in dtypes:
        shapes = (1, 130, 4, h), (1, 130, 2, h)
        yield Case(f"tangent {dtype} {h}", *shapes, dtype, "tangent", options=causal)
    yield Case("decode", (2, 1, 32, 128), (2, long, 8, 128), kernels=_XLA)
    shapes, lengths = ((2, 1, 8, 128), (2, long, 1, 128)), np.array([long - 7, 0], np.int32)
    options = {"key_value_seq_lengths": lengths}
    yield Case("decode with lengths", *shapes, kernels=_XLA, options=options)
    for rows in (8, 9, 16, 32):
        shapes = (1, rows, 16, 128), (1, long, 4, 128)
        yield Case(f"{rows} queries", *shapes, kernels=_XLA[1:])
    shuffled = np.random.default_rng(0).permutation(300).astype(np.int32)[None]
    shuffled[0, ::7] = -1
    in_order, parts = (
        np.arange(300, dtype=np.int32)[None],
        np.arange(300, dtype=np.int32)[None] // 100,
    )
    for label, kv_heads, options in (
        ("window", 4, {"local_window_size": (50, 0)}),
        ("positions", 2, {"query_positions": in_order, "key_positions": shuffled}),
        ("segments", 2, {"query_segment_ids": parts, "key_segment_ids": parts}),
    ):
        shapes = (1, 300, 4, 64), (1, 300, kv_heads, 64)
        yield Case(label, *shapes, kernels=_XLA[1:], options=causal | options)


def check_large(bench: Bench) -> None:
    """Grids, splits and offsets of real use; above 2^31 elements at the end."""
    long = bench.length(8192)
    cases = [
        Case(
            f"causal {long} 128", (1, long, 4, 128), (1, long, 1, 128), options={"is_causal": True}
        ),
        Case(f"causal {long} 64", (1, long, 4, 64), (1, long, 4, 64), options={"is_causal": True}),
        Case(f"full {long} 128", (2, long, 2, 128), (2, long, 2, 128)),
    ]
    for keys in map(bench.length, bench.selected((2**20, 2**21, 2**22))):  # 2^31 elements at 2^21
        shapes = (1, 1, 32, 128), (1, keys, 8, 128)
        cases.append(Case(f"decode {keys} keys", *shapes, mode="forward"))
    while cases:  # one at a time: the largest fill half of the memory
        compared(bench, "check_large", [cases.pop(0)])
