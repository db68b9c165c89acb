"""Both modes and all second orders of attention over a mesh, against those of dense attention in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel
from energy_attn.distributed.merge._abstract import moved
from tests.support import caches
from tests.support.compare import close
from tests.support.meshes import (
    COLUMNS,
    INSIDE,
    MERGES,
    POSITIONED,
    SHAPES,
    in_order,
    inside,
    laid_out,
    mesh_of,
    parallel_of,
    static_options,
)
from tests.support.naive import naive
from tests.support.problems import _make, tangents
from tests.support.reference import visible
from tests.support.selection import few_rows


def total(f):
    return lambda x: f(x).sum()


# Of a function of a tree of arrays, at `x` in the direction `u`. Those of second order have that of first order, too.
MODES = {
    "linearized": lambda f, x, u: jax.linearize(f, x)[1](u),
    "forward over reverse": lambda f, x, u: jax.jvp(jax.grad(total(f)), (x,), (u,)),
    "reverse over reverse": lambda f, x, u: _and_back(jax.vjp(jax.grad(total(f)), x), u),
    "reverse over forward": lambda f, x, u: jax.grad(total(lambda x: jax.jvp(f, (x,), (u,))[1]))(x),
    "forward over forward": lambda f, x, u: jax.jvp(lambda x: jax.jvp(f, (x,), (u,)), (x,), (u,)),
}


def _and_back(found, u):
    return found[0], found[1](u)


def number(state):
    """One number for each row and head, in which `out` and `lse` are not linear."""
    out, lse = state
    return jnp.sin(out).sum(-1) + jnp.where(lse == -jnp.inf, 0.0, jnp.cos(lse))


def everywhere(problem, parallel):
    """`ea.attention` by `parallel=`, in its layout and back."""

    def run(arrays):
        scale = arrays.get("scale", problem.scale)
        given = {n: x for n, x in arrays.items() if n != "scale"}
        given = laid_out(problem, parallel, given) | static_options(problem) | {"scale": scale}
        state = ea.attention(**given, parallel=parallel, return_energy=True)
        return in_order(problem, parallel, state)

    return run


def typed(problem, kind):
    """`ea.attention` of keys whose types say that they are sharded."""
    mesh, axes = mesh_of(kind), SHAPES[kind.split()[0]][1]

    def run(arrays):
        arrays = dict(arrays)
        given = problem.options | {"scale": arrays.pop("scale", problem.scale)}
        for name in COLUMNS:
            for tree in (arrays, given):
                if name in tree:
                    tree[name] = jax.sharding.reshard(
                        tree[name], NamedSharding(mesh, P(None, axes))
                    )
        return ea.attention(**arrays, **given, return_energy=True)

    return run


def cached(arrays):
    """`KVCache.attend`, of keys and values that were appended before."""
    cache = KVCache.empty(
        *(3, 16, 2, 3, 5), dtype=jnp.float64, block_size=2, parallel=parallel_of("2x4")
    )
    cache = cache.append(arrays["key"], arrays["value"])
    return cache.attend(arrays["query"], is_causal=False)


def drafted(arrays):
    """`tree_decode`, of a context that was appended before."""
    counts = jnp.asarray(caches.COUNTS, jnp.int32)
    return caches.decoded(caches.empty("2x4"), arrays, counts)


# Small, as programs of second order are large: what is seen is the other tests' business. Some devices have no keys.
LENGTHS = np.asarray([11, 4], np.int32)
LINE = _make("decode modes", B=2, T=1, S=16, N=4, K=2, V=3, key_value_seq_lengths=LENGTHS)
SQUARE = _make("self modes", B=2, T=16, S=16, N=8, V=3, is_causal=True)
CACHED = _make("cached modes", B=3, T=2, S=11, N=4, K=2, H=3, V=5)
GRID = ("node", "device")
CASES = {
    **{
        f"tree {merge}": ("2x4", LINE, everywhere(LINE, SequenceParallel(GRID, "tree", merge)))
        for merge in MERGES
    },
    **{
        f"{method} {layout}": (
            kind,
            SQUARE,
            everywhere(SQUARE, SequenceParallel(SHAPES[kind][1], method, layout=layout)),
        )
        for method, layout, kind in (
            ("ring", "zigzag", "8"),
            ("ulysses", "zigzag", "8"),
            ("hybrid", "zigzag", "2x4"),
            ("gather", "zigzag", "8"),
            ("tree", "striped", "8"),
        )
    },
    **{f"inside, {name}": ("2x4", POSITIONED, inside(name, POSITIONED, GRID)) for name in INSIDE},
    "explicit": ("2x4 explicit", LINE, typed(LINE, "2x4 explicit")),
    "cache": ("2x4", CACHED, cached),
    "prefix tree": ("2x4", caches.problem_of("modes"), drafted),
}
TRACED_SCALE = "explicit", "ring zigzag"
# The derivative of a fold is one function for all merges; what exchanges heads is linear; and inside `shard_map` most
# run what `parallel=` runs. These have derivatives of their own, in all modes; the others are met in one.
OWN = (
    "tree hierarchical",
    "ring zigzag",
    "gather zigzag",
    "inside, ring queries",
    "hybrid zigzag",
    "tree striped",
    "inside, tree reduce-scatter",
    "cache",
    "prefix tree",
)
FIRST = [("reverse over forward", "tree hierarchical"), ("forward over reverse", "ring zigzag")]
ALL = [
    *((mode, case) for case in OWN for mode in MODES),
    *zip(itertools.cycle(MODES), [case for case in CASES if case not in OWN]),
]
ROWS = [*FIRST, *(row for row in ALL if row not in FIRST)]


@functools.cache
def arguments(case):
    """The arrays, a direction, and the dense function of them."""
    _, problem, _ = CASES[case]
    arrays, mask = problem.arrays, visible(problem)
    change = {n: 3 * x for n, x in tangents(problem).items()}
    scale = problem.query.shape[-1] ** -0.5 if problem.scale is None else problem.scale
    if case in TRACED_SCALE:
        arrays = arrays | {"scale": np.asarray(scale)}
        change = change | {"scale": np.asarray(0.3)}

    def dense(arrays):
        return naive(arrays, mask, scale=arrays.get("scale", scale))

    return arrays, change, dense


@pytest.mark.parametrize(("mode", "case"), few_rows(ROWS, len(FIRST)))
def test_modes(mode, case):
    """A derivative that is wrong in one mode or order, by one method, merge or layout, or that raises.

    With lengths, grouped heads, biases and sources inside `shard_map`, and a scale that is differentiated.
    """
    kind, _, run = CASES[case]
    arrays, change, dense = arguments(case)
    exact = jax.jit(lambda x, u: MODES[mode](lambda x: number(dense(x)), x, u))(arrays, change)
    with jax.set_mesh(mesh_of(kind)):
        found = jax.jit(lambda x, u: MODES[mode](lambda x: number(run(x)), x, u))(arrays, change)
    close(found, exact, f"{case}, {mode}")


def test_sixteen_bits_in_a_loop():
    """Derivatives of numbers that are sent as integers: those of second order were zero in a loop, by JAX 0.10."""
    pairs = [(i, (i + 1) % 8) for i in range(8)]

    def hop(x):
        return lax.ppermute(x, "device", pairs)

    def looped(x):
        return lax.scan(lambda x, _: (moved(hop, jnp.sin(x)), None), x, None, length=3)[0]

    x, rows = jnp.arange(8) / 8, P("device")
    slope = jax.grad(total(lambda x: jnp.sin(jnp.sin(jnp.sin(x)))))
    exact = jax.jit(lambda x: (slope(x), jax.grad(total(slope))(x)))(x)
    with jax.set_mesh(mesh_of("8")):
        spread = jax.grad(total(jax.shard_map(looped, in_specs=rows, out_specs=rows)))
        found = jax.jit(lambda x: (spread(x), jax.grad(total(spread))(x)))(x.astype(jnp.bfloat16))
    for mine, wanted in zip(found, exact, strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float64), wanted, atol=0.03)
