"""The steps `check` and `check_large`: every kernel beside dense attention in float64, on the device."""

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

from ._bench import Bench, Job, normal
from ._record import Result

# Errors relative in the norm, and of lse the largest absolute one, by the dtype of the call.
ALLOWED = {"float32": (2e-5, 1e-4), "float16": (5e-3, 2e-3), "bfloat16": (2e-2, 2e-3)}
_XLA = ("decode", "blockwise")
_AT_ONCE = 5  # cases whose programs are compiled together


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and what is asked of it.

    Attributes:
        query, key: shapes `[B, T, N, H]` and `[B, S, K, H]`.
        mode: "forward", "backward" (of both outputs) or "tangent".
        kernels: beside those for GPUs, which decline what they do not take.
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
        shapes = (self.query, self.key, self.key)
        found = [normal(seed + i, shape, self.dtype) for i, shape in enumerate(shapes)]
        if self.mode == "tangent":
            found += [normal(seed + 3 + i, shape, self.dtype) for i, shape in enumerate(shapes)]
        elif self.mode == "backward":
            found.append(normal(seed + 3, self.query, self.dtype))
            found.append(normal(seed + 4, self.query[:-1], "float32"))
        return tuple(found)

    def run(self, attend: Callable[..., tuple[Array, Array]], *operands: Array) -> dict[str, Array]:
        """What is asked, by any attention that returns `(out, lse)`."""
        inputs, rest = operands[:3], operands[3:]
        if self.mode == "tangent":
            found, moved = jax.jvp(attend, inputs, rest)
            return _named(("out", "lse", "dout", "dlse"), (*found, *moved))
        if self.mode == "forward":
            return _named(("out", "lse"), attend(*inputs))
        found, back = jax.vjp(attend, *inputs)
        return _named(("out", "lse", "dq", "dk", "dv"), (*found, *back(tuple(rest))))

    def by_kernel(self, name: str) -> Callable[..., dict[str, Array]]:
        """What is asked, by a kernel."""

        def attend(*inputs: Array) -> tuple[Array, Array]:
            found = local_attention(
                *inputs,
                implementation=name,
                is_causal=self.causal,
                local_window_size=self.window,
                **self.arrays,  # pyright: ignore[reportArgumentType]  # all are options
            )
            return found.out, found.lse

        return functools.partial(self.run, attend)

    @functools.cached_property
    def wanted(self) -> dict[str, np.ndarray]:
        """What is asked, in float64 on the device, a head at a time."""
        with jax.enable_x64(True):
            batch, _, heads, _ = self.query
            seen = {k: jnp.asarray(x) for k, x in self.arrays.items()}
            # as arguments: an array that a function closes over becomes a constant of its program
            one = jax.jit(functools.partial(_head, self))
            found = [
                [one(seen, i, head, *self.operands) for head in range(heads)] for i in range(batch)
            ]
            return self._joined(found)

    def _joined(self, heads: Sequence[Sequence[dict[str, Array]]]) -> dict[str, np.ndarray]:
        group, joined = self.query[2] // self.key[2], {}
        for name in heads[0][0]:
            x = np.asarray([[found[name] for found in row] for row in heads]).swapaxes(1, 2)
            if name in ("dk", "dv"):  # [B, S, N, H] to the sum over the heads of a group
                x = x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)
            joined[name] = x
        return joined


def _named(names: Sequence[str], arrays: Sequence[Array]) -> dict[str, Array]:
    return dict(zip(names, arrays, strict=True))


def _head(
    case: Case, seen: dict[str, Array], i: Array, head: Array, *operands: Array
) -> dict[str, Array]:
    """What is asked of one head of one batch entry."""
    group = case.query[2] // case.key[2]
    of_keys = (
        (False, True, True) * 2 if case.mode == "tangent" else (False, True, True, False, False)
    )
    picked = [
        x[i, :, head // group if keys else head].astype(jnp.float64)
        for x, keys in zip(operands, of_keys, strict=False)
    ]
    visible = _visible(case, seen, i)

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        scores = jnp.where(visible, q @ k.T / math.sqrt(case.query[3]), -jnp.inf)
        some = visible.any(-1, keepdims=True)
        top = jax.lax.stop_gradient(jnp.where(some, scores.max(-1, keepdims=True), 0))
        terms = jnp.where(visible, jnp.exp(scores - top), 0)
        total = jnp.where(some, terms.sum(-1, keepdims=True), 1)
        lse = jnp.where(some, top + jnp.log(total), -jnp.inf)
        return terms @ v / total, lse[:, 0]

    return case.run(attend, *picked)


def _visible(case: Case, seen: dict[str, Array], i: Array) -> Array:
    def places(name: str, size: int) -> Array:
        return seen[name][i] if name in seen else jnp.arange(size, dtype=jnp.int32)

    rows = places("query_positions", case.query[1])[:, None]
    keys = places("key_positions", case.key[1])[None]
    found = (rows >= 0) & (keys >= 0)
    if case.causal:
        found &= keys <= rows
    if case.window is not None:
        found &= (keys >= rows - case.window[0]) & (keys <= rows + case.window[1])
    if "key_value_seq_lengths" in seen:
        found &= jnp.arange(case.key[1], dtype=jnp.int32)[None] < seen["key_value_seq_lengths"][i]
    if "query_segment_ids" in seen:
        found &= seen["query_segment_ids"][i][:, None] == seen["key_segment_ids"][i][None]
    return found


def difference(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative in the norm; of lse the largest, absolute, and infinite where only one is finite."""
    errors = {}
    for name, right in wanted.items():
        got = np.asarray(found[name]).astype(np.float64)
        if name == "lse":
            both = np.isfinite(right)
            same = (both == np.isfinite(got)).all()
            errors[name] = (
                float(np.abs(got[both] - right[both]).max(initial=0)) if same else math.inf
            )
        else:
            errors[name] = float(np.linalg.norm(got - right) / max(np.linalg.norm(right), 1e-30))
    return errors


def compared(bench: Bench, step: str, cases: Sequence[Case]) -> None:
    """Each kernel on each case, all compiled together; and whether a second run repeats the first."""

    def find(case: Case, run: Callable[..., Any]) -> Result:
        found, again = (jax.device_get(run(*case.operands)) for _ in range(2))
        errors = difference(found, case.wanted)
        moved = [name for name in found if found[name].tobytes() != again[name].tobytes()]
        allowed, of_lse = ALLOWED[case.dtype]
        parts = [x / (of_lse if name == "lse" else allowed) for name, x in errors.items()]
        good = all(part <= 1 for part in parts)  # NaN is not
        return {"good": good, "of_tolerance": float(np.max(parts)), **errors, "moved": moved}

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
        kept = ("causal float32 64", "tangent float32 64", "decode with lengths", "positions")
        cases = [case for case in cases if case.label in kept]
    for i in range(0, len(cases), _AT_ONCE):
        compared(bench, "check", cases[i : i + _AT_ONCE])


def _small(bench: Bench) -> Iterator[Case]:
    keys, long = bench.length(1000), bench.length(4099)
    dtypes = (
        ("bfloat16", 64),
        ("bfloat16", 128),
        ("float16", 80),
        ("float32", 64),
        ("bfloat16", 256),
    )
    for dtype, h in dtypes:
        causal = (2, 130, 4, h), (2, 130, 2, h), dtype
        yield Case(f"causal {dtype} {h}", *causal, causal=True)
        yield Case(f"ragged {dtype} {h}", (2, 33, 6, h), (2, keys, 2, h), dtype, kernels=_XLA)
    for dtype, h in dtypes[:4]:
        yield Case(
            f"tangent {dtype} {h}",
            (1, 130, 4, h),
            (1, 130, 2, h),
            dtype,
            causal=True,
            mode="tangent",
        )
    yield Case("decode", (2, 1, 32, 128), (2, long, 8, 128), kernels=_XLA)
    lengths = {"key_value_seq_lengths": np.array([long - 7, 0], np.int32)}
    yield Case(
        "decode with lengths", (2, 1, 8, 128), (2, long, 1, 128), kernels=_XLA, arrays=lengths
    )
    for rows in (8, 9, 16, 32):
        yield Case(f"{rows} queries", (1, rows, 16, 128), (1, long, 4, 128), kernels=_XLA[1:])
    square = (1, 300, 4, 64), (1, 300, 4, 64)
    yield Case("window", *square, causal=True, window=(50, 0), kernels=_XLA[1:])
    grouped = (1, 300, 4, 64), (1, 300, 2, 64)
    places = np.random.default_rng(0).permutation(300).astype(np.int32)[None]
    places[0, ::7] = -1
    positions = {"query_positions": np.arange(300, dtype=np.int32)[None], "key_positions": places}
    yield Case("positions", *grouped, causal=True, kernels=_XLA[1:], arrays=positions)
    parts = np.repeat(np.arange(3, dtype=np.int32), 100)[None]
    segments = {"query_segment_ids": parts, "key_segment_ids": parts}
    yield Case("segments", *grouped, causal=True, kernels=_XLA[1:], arrays=segments)


def check_large(bench: Bench) -> None:
    """Grids, splits and offsets of real use; above 2^31 elements at the end."""
    long = bench.length(8192)
    cases = [
        Case(f"causal {long} 128", (1, long, 4, 128), (1, long, 1, 128), causal=True),
        Case(f"causal {long} 64", (1, long, 4, 64), (1, long, 4, 64), causal=True),
        Case(f"full {long} 128", (2, long, 2, 128), (2, long, 2, 128)),
    ]
    for keys in bench.some((2**20, 2**21, 2**22)):  # 2^31 elements at 2^21
        size = bench.length(keys)
        cases.append(
            Case(f"decode {size} keys", (1, 1, 32, 128), (1, size, 8, 128), mode="forward")
        )
    while cases:  # one at a time: the largest fill half of the memory
        compared(bench, "check_large", [cases.pop(0)])
