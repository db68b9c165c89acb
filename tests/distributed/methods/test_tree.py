"""A tree inside `jax.shard_map`: each device brings its keys and says where in the sequence they are."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from energy_attn import masks, scores
from energy_attn.distributed import collectives, methods, sharded_attention
from energy_attn.kernels import AttentionState
from tests.support.compare import close
from tests.support.meshes import SHAPES, mesh_of, on_host
from tests.support.problems import PROBLEMS, Problem, cast, everything
from tests.support.reference import dense, dense_vjp, visible
from tests.support.selection import few

B, T, S = 2, 3, 16
EVERYTHING = replace(
    everything("tree", B, T, S), query_seq_lengths=None, key_value_seq_lengths=None
)


def explicit_positions(problem: Problem, lengths=None) -> Problem:
    """The problem with the positions that its defaults stand for, and keys beyond `lengths` absent."""
    positions = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
    if lengths is not None:
        positions = np.where(positions < np.asarray(lengths)[:, None], positions, -1)
    rows = np.asarray([[5, 9, 15], [0, 3, 8]], np.int32)
    return replace(problem, query_positions=rows, key_positions=positions)


def reordered(problem: Problem, order) -> Problem:
    """The same keys in another order: another layout of the same sequence over the devices."""
    names = ("key", "value", "key_positions", "key_segment_ids")
    moved = {name: getattr(problem, name)[:, order] for name in names}
    moved |= {name: getattr(problem, name)[..., order] for name in ("bias", "mask")}
    return replace(problem, **moved)


# Device i holds the i-th piece from the front and the i-th from the back; or every eighth key.
ZIGZAG = np.asarray([[i, S - 1 - i] for i in range(8)]).ravel()
STRIPED = np.arange(S).reshape(2, 8).T.ravel()

PLACED = {
    "contiguous": explicit_positions(EVERYTHING),
    # whole shards are empty, and all of them for the second row of the batch
    "few keys": explicit_positions(EVERYTHING, lengths=[3, 0]),
    "zigzag": reordered(explicit_positions(EVERYTHING), ZIGZAG),
    "striped": reordered(explicit_positions(EVERYTHING, lengths=[13, 5]), STRIPED),
}


def tree(axes, problem: Problem):
    """A function of whole arrays that shards keys, values, bias and mask over `axes`."""
    keys, scores = P(None, axes), P(None, None, None, axes)
    specs = {name: keys for name in ("key", "value", "key_positions", "key_segment_ids")}
    specs |= {"bias": scores, "mask": scores}

    def call(arrays, options):
        given = arrays | options
        static = {k: v for k, v in problem.options.items() if k not in given}

        @functools.partial(
            jax.shard_map, in_specs=({n: specs.get(n, P()) for n in given},), out_specs=P()
        )
        def spread(given):
            return sharded_attention(**given, **static, axis_name=axes)

        return spread(given)

    return call


@pytest.mark.parametrize("kind", few(["8", "2x4"], "2x4"))
def test_layouts(kind):
    """Positions counted from a shard's first key: causality and windows would be right on the first device alone.

    Every layout that positions can say, shards without keys and rows that see none; states and all gradients.
    """
    axes = SHAPES[kind][1]
    _, given = on_host(EVERYTHING)

    @jax.jit
    def run(arrays, options, cotangent):
        state, back = jax.vjp(lambda x: tree(axes, EVERYTHING)(x, options), arrays)
        return state, back(cotangent)[0]

    with jax.set_mesh(mesh_of(kind)):
        for name, problem in PLACED.items():
            options = {
                n: getattr(problem, n)
                for n, x in problem.options.items()
                if isinstance(x, jax.Array)
            }
            found, gradients = run(problem.arrays, options, AttentionState(*given))
            close(found, dense(problem), name)
            close(gradients, dense_vjp(problem, *given), name)
    assert not visible(PLACED["few keys"])[1].any()  # the case is what it says


def test_plain_and_unequal_shards():
    """Keys that are there on some devices only, as absent ones in a padded sequence; and no batch axis."""
    problem = PROBLEMS["primes"]
    query, key, value = (x[0] for x in (problem.query, problem.key, problem.value))
    missing = -key.shape[0] % 8
    key, value = (
        np.pad(x, [(0, missing), (0, 0), (0, 0)], constant_values=9) for x in (key, value)
    )
    positions = np.where(np.arange(48) < 41, np.arange(48), -1).astype(np.int32)
    spread = jax.shard_map(
        lambda q, k, v, p: sharded_attention(
            q, k, v, axis_name="device", is_causal=True, key_positions=p
        ),
        in_specs=(P(), P("device"), P("device"), P("device")),
        out_specs=P(),
    )
    with jax.set_mesh(mesh_of("8")):
        found = jax.jit(spread)(query, key, value, positions)
    close(found, [x[0] for x in dense(problem)])


def test_one_axis_of_two():
    """Keys along one axis, queries along the other: a fold over both would mix queries."""
    problem = replace(PROBLEMS["plain"], key=EVERYTHING.key, value=EVERYTHING.value)
    arrays, _ = cast(problem, jnp.float64)
    query = jnp.concatenate([arrays["query"], 2 * arrays["query"]], axis=1)
    spread = jax.shard_map(
        lambda q, k, v: sharded_attention(
            q, k, v, axis_name="device", method=methods.Tree("allreduce")
        ),
        in_specs=(P(None, "node"), P(None, "device"), P(None, "device")),
        out_specs=P(None, "node"),
    )
    with jax.set_mesh(mesh_of("2x4")):
        compiled = jax.jit(spread).lower(query, arrays["key"], arrays["value"]).compile()
        found = compiled(query, arrays["key"], arrays["value"])
    close(found, dense(replace(problem, query=np.asarray(query))))
    assert [c.group_size for c in collectives(compiled)] == [4, 4]


COMPARED = {
    "is_causal": True,
    "local_window_size": 2,
    "key_value_seq_lengths": np.asarray([2]),
    "mask": masks.Prefix(2),
    "score": scores.Distance(jnp.abs),
}


@pytest.mark.parametrize("name", COMPARED)
def test_positions_must_be_given(name):
    """Positions by the shards' own counts: wrong on all devices but one, and nobody would be told."""
    query, option = jnp.ones((1, 16, 8, 4)), COMPARED[name]
    options = {name: jnp.asarray(option) if isinstance(option, np.ndarray) else option}

    def spread(specs, **given):
        return jax.shard_map(
            lambda q: sharded_attention(q, q, q, axis_name="device", **options, **given),
            in_specs=specs,
            out_specs=specs,
        )

    with jax.set_mesh(mesh_of("8")):
        with pytest.raises(ValueError, match="^key_positions: wanted the global positions"):
            jax.eval_shape(spread(P()), query)
        keys = jnp.zeros((1, 2), jnp.int32)
        with pytest.raises(ValueError, match="^query_positions: wanted the global positions"):
            jax.eval_shape(spread(P(None, "device"), method="ring", key_positions=keys), query)
