"""Keys and values of eight bits with scales: read as they are stored, as on a TPU or a GPU, or dequantized.

Scales are zero or powers of two, so that what is stored is the same number in every dtype, and the judge takes it as
it is.
"""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels.dispatch import _registry
from energy_attn.kernels.internal import (
    GPUTiles,
    PallasGPU,
    Scales,
    attend,
    candidates,
    dequantized,
    derivatives,
)
from tests.support.arrays import array
from tests.support.caches import read_as_stored, read_by_kernels
from tests.support.compare import close, same
from tests.support.naive import assert_all_close
from tests.support.problems import HEADS, PROBLEMS, Problem, call_of, cast, tangents
from tests.support.selection import few, few_rows
from tests.support.traits import SMALL_PIECES

KEYS = "key", "value"
WIDTH = 128  # wide heads, so that scores are small beside them
NAMED = PROBLEMS | HEADS
JUDGED = [x for x in NAMED.values() if x.key.size and x.query.size]
# the least tiles, so that several programs share the keys of a few tiles, and others are full
GPU = PallasGPU((GPUTiles("forward", 16, 16, stages=3, least_steps=1),))


# By kernels of one platform each, which read what is stored.
READERS = {"tpu": None, "gpu": GPU, "cpu": SMALL_PIECES}


@pytest.fixture
def as_stored(monkeypatch):
    yield from read_as_stored(monkeypatch)


@pytest.fixture
def read(kernel, monkeypatch):
    """The operands that were read as they are stored, for TPUs; for GPUs, fails where any are dequantized."""
    ways = {"tpu": read_as_stored, "gpu": read_by_kernels, "cpu": lambda _: iter([None])}
    yield from ways[kernel](monkeypatch)


def stored(problem: Problem, dtype):
    """A problem of wide heads in a dtype, and its arrays: of keys and values numbers and scales."""
    rng, (B, T, N, _) = problem.rng("eight bits"), problem.query.shape
    S, K = problem.key.shape[1:3]
    numbers = rng.integers(-127, 128, (2, B, S, K, WIDTH)).astype(np.int8)
    scales = 2.0 ** rng.integers(-9, -5, (2, B, S, K))
    scales[rng.random(scales.shape) < 0.1] = 0.0
    key, value = numbers * scales[..., None]
    query = rng.standard_normal((B, T, N, WIDTH))
    arrays, problem = cast(replace(problem, query=query, key=key, value=value, source=None), dtype)
    scales = {f"{name}_scale": array(x, jnp.float32) for name, x in zip(KEYS, scales, strict=True)}
    return problem, arrays | dict(zip(KEYS, numbers, strict=True)) | scales


def call(arrays, problem, attend=attend, names=None, **options):
    """The state of stored arrays."""
    scales = Scales(arrays["key_scale"], arrays["value_scale"])
    given = (arrays.get(name) for name in ("query", "key", "value", "source", "bias"))
    checked = call_of(*given, scales=scales, **problem.options | options)
    return attend(candidates(names), checked.settings, checked.operands)


def of_dequantized(names, settings, operands):
    return attend(names, settings, dequantized(operands))


FEW_ROWS = [
    x.name
    for x in JUDGED
    if x.bias is None
    and x.mask is None
    and x.query.shape[1] * x.query.shape[2] <= 128 * x.key.shape[2]
    and "table" not in (x.rule or "")
]
# Rounding is a matter of the dtype, and which scale is read one of the problem: no product of both tells more.
USUAL = {
    "tpu": [("decode_ragged", "bfloat16"), ("heads_16_2", "bfloat16"), ("mask", "bfloat16")],
    "gpu": [("grouped", "bfloat16"), ("heads_16_2", "float32"), ("predicates", "float32")],
    "cpu": [("everything", "float32"), ("decode_ragged", "bfloat16")],
}
USUAL["tpu"] += [("grouped", "float32"), ("decode_cache", "float32"), ("everything", "float32")]
CASES = [(kernel, *row) for kernel, rows in USUAL.items() for row in rows]
FIRST = len(CASES)
for kernel, names in (("tpu", [x.name for x in JUDGED]), ("gpu", FEW_ROWS)):
    rest = [x for x in names if x not in dict(USUAL[kernel])]
    CASES += zip(itertools.repeat(kernel), rest, itertools.cycle(("bfloat16", "float32")))


@pytest.mark.parametrize(("kernel", "name", "dtype"), few_rows(CASES, FIRST))
def test_as_stored(kernel, name, dtype, read):
    """A scale of another key, head or block, one that only a part of the programs has, an absent slot that counts, or
    more rounding than in plain attention.
    """
    dtype = jnp.dtype(dtype)
    problem, arrays = stored(NAMED[name], dtype)
    found = jax.jit(lambda arrays: call(arrays, problem, names=READERS[kernel]))(arrays)
    assert_all_close(found._asdict(), problem, dtype, "both", label="eight bits")
    if kernel == "tpu":
        rows, heads = problem.query.shape[1] * problem.query.shape[2], problem.key.shape[2]
        few = 16 * rows <= heads * 2 * WIDTH * dtype.itemsize
        assert len(read) == few, "scores that are large beside the keys, or small and not so read"


@pytest.mark.parametrize("problem", few(["everything", "decode_ragged"], "decode_ragged"))
def test_derivatives(problem, as_stored):
    """A derivative that differs by a bit from that of dequantized keys, in either mode; the scales' included."""
    problem, arrays = stored(PROBLEMS[problem], jnp.float32)
    fixed = {name: arrays.pop(name) for name in KEYS}
    moved = tangents(problem)
    directions = {
        name: array(moved.get(name, np.full(x.shape, 0.5)), jnp.float32)
        for name, x in arrays.items()
    }

    def both_modes(arrays, attend):
        def state(arrays):
            return call(fixed | arrays, problem, attend)

        found, back = jax.vjp(state, arrays)
        query = {"query": arrays["query"]}
        along = jax.jvp(lambda x: state(arrays | x), [query], [{"query": directions["query"]}])
        return back(found), jax.jvp(state, [arrays], [directions])[1], along[1]

    both = jax.jit(lambda x: [both_modes(x, f) for f in (attend, of_dequantized)])
    found, exact = both(arrays)
    same(found, exact)
    assert all(np.abs(x).max() > 0 for x in found[0][0].values())


def test_what_is_dequantized(as_stored):
    """A source, an array for the scale, float16, float64 or another kernel's name that is lost on eight bits."""
    problem, arrays = stored(PROBLEMS["grouped"], jnp.float32)
    source = array(np.ones((*problem.query.shape[:3], WIDTH)), jnp.float32)
    number = array(0.3, jnp.float32)
    query = np.asarray(arrays["query"])
    for more, options in (
        ({"source": source}, {}),
        ({}, {"scale": number}),
        ({}, {"names": "blockwise"}),
        ({"query": array(query, jnp.float16)}, {}),
        ({"query": array(query, jnp.float64)}, {}),
    ):

        def both(given, options=options):
            return [call(given, problem, x, **options) for x in (attend, of_dequantized)]

        found, exact = jax.jit(both)(arrays | more)
        same(found, exact)
        assert found.out.dtype == (arrays | more)["query"].dtype
    assert not as_stored


@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
def test_values_that_are_not_finite(kernel, read):
    """The NaN of a stale slot, which a scale of NaN stands for, in a tile that others share; or one of a present slot
    that is lost.
    """
    problem, arrays = stored(PROBLEMS["decode_cache"], jnp.float32)
    run = jax.jit(lambda arrays: call(arrays, problem, names=READERS[kernel]))
    exact = run(arrays)
    for name in ("key_scale", "value_scale"):

        def broken(at, by, name=name):
            scale = np.array(arrays[name])
            scale[at] = by
            return run(arrays | {name: array(scale)})

        for by in (np.nan, np.inf):
            same(broken((0, 2), by), exact)
        # stored for a vector that is not finite
        group = problem.query.shape[2] // problem.key.shape[2]
        out = np.asarray(broken((0, 3, 0), np.nan).out)
        assert np.isnan(out[0, :, :group]).all() and np.isfinite(out[0, :, group:]).all()
    assert read or kernel == "gpu"


@pytest.mark.smoke
@pytest.mark.parametrize(("queries", "dtype"), [(32, "bfloat16"), (8, "float32")])
def test_default_on_a_gpu(queries, dtype):
    """A program for GPUs whose kernel gets other than eight bits, by the choice among all kernels."""
    problem = PROBLEMS["decode_cache"]
    sizes = {"query": (2, queries, 8, WIDTH), "key": (2, 256, 2, WIDTH)}
    sizes |= {"value": sizes["key"], "key_scale": (2, 256, 2), "value_scale": (2, 256, 2)}
    types = dict(zip(sizes, (dtype, "int8", "int8", "float32", "float32"), strict=True))
    given = {name: jax.ShapeDtypeStruct(x, types[name]) for name, x in sizes.items()}
    positions = {"query_positions": array(np.zeros((2, queries), np.int32))}
    positions |= {"key_positions": array(np.zeros((2, 256), np.int32))}

    def run(arrays):
        return call(arrays, replace(problem, **{x: None for x in positions}), **positions)

    text = jax.jit(run).trace(given).lower(lowering_platforms=("cuda",)).as_text()
    (attention,) = (x for x in text.splitlines() if "attention_forward" in x)
    assert attention.count("tensor<2x256x2x128xi8>") == 2
    assert "xi8>) -> tensor" not in text  # no conversion


def test_vmap(as_stored):
    """Scales that are mapped with other keys than theirs, and derivatives of such calls."""
    problem, arrays = stored(PROBLEMS["decode_cache"], jnp.float32)
    arrays = {n: array(np.stack([x, np.flip(x, 2)])) for n, x in jax.device_get(arrays).items()}

    def derivatives(arrays, attend):
        def out(query):
            return call(arrays | {"query": query}, problem, attend).out

        return out(arrays["query"]), jax.vjp(out, arrays["query"])[1](arrays["query"])

    both = jax.jit(jax.vmap(lambda x: [derivatives(x, f) for f in (attend, of_dequantized)]))
    close(*both(arrays), tolerance=32 * float(jnp.finfo(jnp.float32).eps))
    assert as_stored


def test_cpus_dequantize_block_by_block():
    """A copy of all keys and values at each step."""
    query = jax.ShapeDtypeStruct((1, 1, 2, WIDTH), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, 8192, 1, WIDTH), jnp.int8)
    scale = jax.ShapeDtypeStruct((1, 8192, 1), jnp.float32)

    def step(query, key, value, *scales):
        checked = call_of(query, key, value, scales=Scales(*scales))
        return attend(candidates(None), checked.settings, checked.operands)

    memory = jax.jit(step).lower(query, key, key, scale, scale).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 8192 * WIDTH


def test_traced_once(monkeypatch):
    """A step outside of jit that traces its program each time."""
    problem, arrays = stored(PROBLEMS["decode_cache"], jnp.float32)
    traced = []

    def counting(*given):
        traced.append(given)
        return derivatives.EightBits(*given)

    monkeypatch.setattr(_registry, "EightBits", counting)
    attend.clear_cache()
    for _ in range(3):
        call(arrays, problem, attend)
    assert len(traced) == 1
