"""The law of the canonical kernels: a row has the same bytes however it is computed, and the values of attention.

Those for TPUs and GPUs are interpreted; that a tile is the same text in all programs, tests/tpu and tests/cuda show.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from energy_attn.kernels.internal import candidates
from tests.support.compare import close
from tests.support.problems import Problem
from tests.support.prompts import (
    DTYPES,
    HEADS,
    LENGTH,
    OPTIONS,
    SHORT,
    VALUE_WIDTH,
    at,
    attend,
    cache_of,
    gradients,
    in_batch,
    junk_like,
    prompt,
    same_bytes,
    tangent,
)
from tests.support.reference import dense, dense_jvp, dense_vjp
from tests.support.selection import few_rows

TPU, GPU, CPU = candidates(None, reproducible=True)
KERNELS = {"cpu": CPU, "tpu": TPU, "gpu": GPU}
LENGTHS = {"cpu": LENGTH, "tpu": 1030, "gpu": 1030}  # nine leaves of 256 keys, or five
INTERPRETED = {"causal": "float32", "window": "bfloat16", "segments": "bfloat16", "full": "float32"}
TOLERANCES = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 0.01}
ROWS = [("cpu", dtype, option) for dtype, option in itertools.product(DTYPES, OPTIONS)]
ROWS += [(name, INTERPRETED[option], option) for option in OPTIONS for name in ("tpu", "gpu")]


def cases(*first: tuple[str, str, str]):
    """Kernels, dtypes and options, of which `make test` runs the first."""
    rows = few_rows([*first, *(x for x in ROWS if x not in first)], len(first))
    return pytest.mark.parametrize(("name", "dtype", "option"), rows)


@cases(
    ("cpu", "float32", "causal"),
    ("cpu", "bfloat16", "segments"),
    ("tpu", "float32", "causal"),
    ("gpu", "float32", "causal"),
)
def test_rows(name, dtype, option):
    """A tile or a tree that follows the call: its rows, capacity, order of slots, batch; junk that counts."""
    kernel, length, rng = KERNELS[name], LENGTHS[name], np.random.default_rng(1)
    tokens, run = prompt(dtype).at(slice(length)), functools.partial(attend, option, kernel=kernel)
    wanted, capacity = state(name, dtype, option, length), length + 170
    spans = (0, 1), (40, 41), (250, 390), (length - 30, length)
    for begin, end in (*spans, (7, 940)) if name == "cpu" else spans:
        known = length if option == "full" else end
        first = int(rng.integers(capacity - known + 1))
        keys = cache_of(tokens.at(slice(known)), capacity, rng, first)
        keys = keys.at(rng.permutation(capacity)) if begin else keys
        same_bytes(run(tokens.at(slice(begin, end)), keys), at(wanted, slice(begin, end)))
    others = [prompt(dtype, seed).at(slice(n)) for seed, n in ((1, 90), (0, length))]
    keys, queries = ([cache_of(x, size, rng) for x in others] for size in (length + 70, length))
    keys, queries = in_batch(keys[0], keys[1:]), in_batch(queries[0], queries[1:])
    same_bytes(at(run(queries, keys), 1), wanted)


def compiled(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """One program; not of interpreted kernels, whose tiles XLA:CPU would fuse with what is around them."""
    return jax.jit(f) if name == "cpu" else f


@functools.cache
def state(name: str, dtype: str, option: str, length: int):
    """The state of a prompt, computed at once."""
    tokens = prompt(dtype).at(slice(length))
    return compiled(name, functools.partial(attend, option, kernel=KERNELS[name]))(tokens, tokens)


def drawn(name: str, dtype: str):
    """Tokens, cotangents of their state, and a direction."""
    rng, length = np.random.default_rng(5), min(LENGTHS[name], SHORT)
    tokens = prompt(dtype).at(slice(length))
    out = rng.standard_normal((length, HEADS, VALUE_WIDTH)).astype(tokens.value.dtype)
    lse = rng.standard_normal((length, HEADS))
    lse = lse.astype(np.float64 if dtype == "float64" else np.float32)
    directions = tuple(rng.standard_normal(x.shape).astype(x.dtype) for x in tokens[:3])
    return tokens, (out, lse), directions


def derivatives_of(name: str, option: str):
    more: Any = {"kernel": KERNELS[name]}
    return [compiled(name, functools.partial(f, option, **more)) for f in (gradients, tangent)]


@functools.cache
def derivatives(name: str, dtype: str, option: str):
    """The state of a prompt, its gradients and its tangent, each computed at once."""
    tokens, weights, directions = drawn(name, dtype)
    grad, push = derivatives_of(name, option)
    whole = state(name, dtype, option, len(tokens.positions))
    return whole, grad(tokens, tokens, weights), push(tokens, tokens, directions)


FIRST_VALUES = [
    ("cpu", "float64", "window"),
    ("tpu", "float32", "causal"),
    ("gpu", "float32", "causal"),
]
VALUES = [x for x in ROWS if x[0] != "cpu" or x[1] in ("float32", "float64")]


@pytest.mark.parametrize(
    ("name", "dtype", "option"),
    few_rows(sorted(VALUES, key=lambda x: x not in FIRST_VALUES), len(FIRST_VALUES)),
)
def test_values(name, dtype, option):
    """A leaf left out or counted twice; a derivative's term or scale that is missing."""
    tokens, weights, directions = drawn(name, dtype)
    names = "query", "key", "value"
    arrays: Any = {x: np.asarray(getattr(tokens, x), np.float64)[None] for x in names}
    ids = tokens.segments[None] if option == "segments" else None
    segments: Any = {"query_segment_ids": ids, "key_segment_ids": ids}
    problem = Problem(option, **arrays, **segments, **OPTIONS[option])
    whole, found, moved = derivatives(name, dtype, option)
    found = dict(zip(names, found, strict=True))
    along = dict(zip(names, (np.float64(x)[None] for x in directions), strict=True))
    wanted = dense_vjp(problem, *(np.float64(x)[None] for x in weights))
    wanted = tuple(dense(problem)), wanted, tuple(dense_jvp(problem, along))
    for x, y, times in zip((tuple(whole), found, tuple(moved)), wanted, (1, 10, 10), strict=True):
        x = jax.tree.map(lambda x: x[None], x)
        close(x, y, option, times * TOLERANCES[dtype])


@cases(("cpu", "float32", "window"), ("tpu", "float32", "causal"))
def test_derivatives(name, dtype, option):
    """Sums over rows or leaves in an order that follows the call: its padding, batch, capacity, transformations."""
    rng, (tokens, weights, directions) = np.random.default_rng(5), drawn(name, dtype)
    grad, push = derivatives_of(name, option)
    _, *wanted = derivatives(name, dtype, option)
    length, first = len(tokens.positions), 77
    capacity, here = length + 170, slice(first, first + length)

    def padded(x):
        junk = junk_like(x, capacity, rng)
        junk[here] = x
        return np.stack([junk[::-1], junk])

    others = prompt(dtype, 1).at(slice(length))
    batch = [cache_of(x, capacity, rng, first) for x in (others, tokens)]
    batch = in_batch(batch[0], batch[1:])
    weighed, seeds = (tuple(map(padded, x)) for x in (weights, directions))
    found = grad(batch, batch, weighed), push(batch, batch, seeds)
    same_bytes(jax.tree.map(lambda x: x[1, here], found), wanted)
    if name != "cpu":
        return
    for run in (jax.checkpoint(grad), jax.vmap(grad)):
        same_bytes([x[1, here] for x in jax.jit(run)(batch, batch, weighed)], wanted[0])
    late, early = slice(300, None), np.arange(length) < 300
    found = grad(tokens.at(late), tokens, tuple(x[late] for x in weights))
    no_early = tuple(np.where(early, x.dtype.type(0), x.T).T for x in weights)
    d_query, *rest = grad(tokens, tokens, no_early)
    same_bytes(found, (d_query[late], *rest))
