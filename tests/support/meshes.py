"""Meshes, problems whose queries are sharded as keys are, and programs that are judged over a mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn.distributed import (
    SequenceParallel,
    make_mesh,
    methods,
    shard_sequence,
    sharded_attention,
    unshard_sequence,
)
from energy_attn.distributed.internal import METHOD_OPTIONS, STRATEGIES
from energy_attn.kernels.internal import blockwise, over_keys
from tests.support.compare import close
from tests.support.problems import Problem, cotangents, everything
from tests.support.reference import dense, dense_vjp

# A bug of jax 0.8: `vmap` of any `shard_map` with a psum in it fails.
batches_psum = pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="jax 0.8 cannot batch a psum"
)
SHAPES = {"8": ((8,), ("device",)), "2x4": ((2, 4), ("node", "device"))}


def mesh_of(kind: str) -> Mesh:
    """The mesh `"8"` or `"2x4"`, with explicit axes where ` explicit` follows."""
    shape, names = SHAPES[kind.split()[0]]
    return make_mesh(shape, names, explicit=kind.endswith("explicit"))


def in_parts(monkeypatch) -> None:
    """Makes rings compute a query at a time, and gradients of a head at a time, as they do where these are large."""
    monkeypatch.setattr(over_keys, "PART", 1)
    monkeypatch.setattr(over_keys, "LEAST_PART", 1)
    monkeypatch.setattr(blockwise, "LEAST", 0)


def parallel_of(kind: str) -> SequenceParallel:
    return SequenceParallel(SHAPES[kind.split()[0]][1])


def merges_for(axes: int) -> list[str]:
    """The merge strategies that a mesh with so many axes is enough for."""
    return [name for name, strategy in STRATEGIES.items() if strategy.least_axes <= axes]


def on_host(problem: Problem):
    """Arrays and cotangents in float64, of NumPy: to shard JAX's own takes a program for each shape."""
    return problem.arrays, tuple(map(np.asarray, cotangents(problem, jnp.float64)))


def with_gradients(f):
    """A program of arrays and cotangents: the results of `f` of the arrays, and the gradients."""

    @jax.jit
    def run(arrays, cotangent):
        found, back = jax.vjp(f, arrays)
        return found, back(cotangent)[0]

    return run


def check(found, problem: Problem):
    """Checks `((out, energy), gradients)` in float64, for the problem's cotangents."""
    state, gradients = found
    close(state, dense(problem), f"{problem}: state")
    close(gradients, dense_vjp(problem, *on_host(problem)[1]), f"{problem}: gradient")


AXES = ("node", "device")
METHODS, MERGES = METHOD_OPTIONS, tuple(STRATEGIES)
ROWS = ("query", "source", "query_positions", "query_segment_ids")
COLUMNS = ("key", "value", "key_positions", "key_segment_ids")


def square(name, length, heads=8, kv_heads=8) -> Problem:
    """Self-attention with every option; as many heads of keys as devices, for Ulysses."""
    problem = everything(name, B=2, T=length, S=length)
    rng = problem.rng("heads")

    def normal(*shape):
        return rng.standard_normal(shape)

    return replace(
        problem,
        query=normal(2, length, heads, 5),
        key=normal(2, length, kv_heads, 5),
        value=normal(2, length, kv_heads, 3),
        source=normal(2, length, heads, 3),
        bias=normal(1, heads, length, length),
    )


SELF = square("self", 16)
GROUPED = square("self grouped", 16, heads=4, kv_heads=2)
ODD = square("self odd", 13)
DECODE = square("self decode", 16)
DECODE = replace(
    DECODE,
    name="decode",
    query=DECODE.query[:, :1],
    source=DECODE.source[:, :1],
    bias=DECODE.bias[:, :, :1],
    mask=DECODE.mask[:, :, :1],
    query_seq_lengths=None,
    query_positions=np.asarray([[12], [9]], np.int32),
    query_segment_ids=np.asarray([[1], [0]], np.int32),
)

EMPTY = replace(SELF, name="empty", mask=np.zeros((1, 1, 1, 1), bool))


def is_whole(problem):
    """Whether queries are sharded as keys are."""
    return problem.query.shape[1] == problem.key.shape[1]


def static_options(problem):
    return {n: x for n, x in problem.options.items() if not isinstance(x, jax.Array)}


def laid_out(problem, parallel, arrays):
    """The arrays, and those among the problem's options, in the layout of `parallel`."""
    whole = is_whole(problem)
    given = {n: x for n, x in problem.options.items() if isinstance(x, jax.Array)} | arrays
    if parallel is None or parallel.layout == "contiguous":
        return given
    moved = {}
    for name, x in given.items():
        if name in COLUMNS or (whole and name in ROWS):
            x = shard_sequence(x, parallel)
        if name in ("bias", "mask"):
            for axis in (2, 3) if whole else (3,):
                x = shard_sequence(x, parallel, axis=axis) if x.shape[axis] > 1 else x
        moved[name] = x
    return moved


def in_order(problem, parallel, state):
    """The state in the order of the problem's queries."""
    if parallel is None or parallel.layout == "contiguous" or not is_whole(problem):
        return tuple(state)
    return tuple(unshard_sequence(x, parallel) for x in state)


def state_and_gradients(problem, parallel=None, **options):
    """`(out, energy)` at the problem's source, or at zero, and the gradients; in the layout's order, and back.

    A program of the arrays, a sink among them if there is one, of cotangents, and of arrays in the place of some of the
    problem's options.
    """
    options = static_options(problem) | {"parallel": parallel} | options

    def pair(arrays, others):
        arrays = laid_out(problem, parallel, arrays | others)
        zeros = np.zeros((*problem.query.shape[:-1], problem.value.shape[-1]))

        def total(source):
            energy = ea.free_energy(**arrays, source=source, **options)
            return energy.sum(), energy

        return in_order(
            problem, parallel, jax.grad(total, has_aux=True)(arrays.pop("source", zeros))
        )

    @jax.jit
    def run(arrays, cotangent, others=None):
        found, back = jax.vjp(lambda arrays: pair(arrays, others or {}), arrays)
        return found, back(cotangent)[0]

    return run


def judge(problem, parallel, mesh="2x4"):
    """Checks attention, energies and gradients at the problem's source against dense attention's."""
    with jax.set_mesh(mesh_of(mesh) if isinstance(mesh, str) else mesh):
        check(state_and_gradients(problem, parallel)(*on_host(problem)), problem)


INSIDE = {
    "ring keys": methods.Ring("keys"),
    "ring queries": methods.Ring("queries"),
    "tree": "tree",
    "tree reduce-scatter": methods.Tree("allreduce"),
    "ulysses": "ulysses",
    "hybrid": "hybrid",
    "gather": "gather",
}


def inside(name, problem, axes):
    """A function of whole arrays that shards them for `sharded_attention` inside `shard_map`."""
    sequence = P(None, axes)
    scores = {
        "ring keys": P(None, None, axes),
        "gather": P(None, None, axes),
        "ulysses": P(None, axes),
        "hybrid": P(None, axes[-1], axes[:-1]),
    }.get(name, P(None, None, None, axes))
    options = problem.options
    given = {n: x for n, x in options.items() if isinstance(x, jax.Array) and n != "mask"}
    static = {n: x for n, x in options.items() if not isinstance(x, jax.Array)}

    def run(arrays):
        arrays = arrays | given
        specs = {n: scores if n == "bias" else sequence for n in arrays}
        return jax.shard_map(
            lambda arrays: tuple(
                sharded_attention(**arrays, **static, axis_name=axes, method=INSIDE[name])
            ),
            in_specs=(specs,),
            out_specs=sequence,
        )(arrays)

    return run


POSITIONED = replace(
    SELF,
    name="positioned",
    mask=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    query_positions=np.arange(16, dtype=np.int32)[None] + np.asarray([[0], [2]], np.int32),
    key_positions=np.where(np.arange(16) % 5 == 3, -1, np.arange(16))[None].astype(np.int32)
    + np.zeros((2, 1), np.int32),
)
