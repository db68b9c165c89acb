"""Layouts: which tokens devices hold, positions that say another order, and devices that wait for others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, make_mesh, shard_sequence, unshard_sequence
from energy_attn.distributed.internal import sequence_order
from energy_attn.kernels import Operands, Settings
from energy_attn.kernels.internal import Tokens, window_structure
from energy_attn.kernels.xla._blocks import BlockedOperands
from tests.support.compare import close
from tests.support.complaints import complains
from tests.support.meshes import mesh_of
from tests.support.problems import Problem
from tests.support.reference import dense

LENGTH, DEVICES = 16, 4
TOKENS = np.arange(LENGTH)[None]


def problem():
    rng = np.random.default_rng(0)
    return Problem("layout", *rng.standard_normal((3, 2, LENGTH, 2, 4)), is_causal=True)


def attend(q, k, v, **options):
    return ea.attention(q, k, v, is_causal=True, return_energy=True, **options)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_replicated_queries_of_as_many_as_keys(layout):
    """Queries in the order of the text taken for queries in the layout's, and errors where no position says so."""
    of = problem()
    arrays = tuple(map(jnp.asarray, of.arrays.values()))
    parallel = SequenceParallel("s", layout=layout, queries_sharded=False)
    with jax.set_mesh(make_mesh((DEVICES,), ("s",), devices=jax.devices()[:DEVICES])):
        q, k, v = (shard_sequence(x, parallel) for x in arrays)
        laid_out = attend(q, k, v, parallel=parallel)
        laid_out = tuple(unshard_sequence(x, parallel) for x in laid_out)
        as_text = attend(arrays[0], k, v, parallel=parallel, query_positions=jnp.asarray(TOKENS))
        found = jax.device_get((laid_out, as_text))
    close(found, [dense(of)] * 2)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_positions_in_another_order(layout):
    """Keys, or sharded queries, in the order of the text beside queries or keys that are taken to be in another."""
    of = problem()
    arrays = tuple(map(jnp.asarray, of.arrays.values()))
    tokens = jnp.asarray(TOKENS)
    own = SequenceParallel("s", layout=layout, queries_sharded=False)
    alike = SequenceParallel("s", layout=layout)
    absent = jnp.where(tokens < 3, -1, 9)
    given = {"query_positions": tokens, "key_positions": tokens}
    with jax.set_mesh(make_mesh((DEVICES,), ("s",), devices=jax.devices()[:DEVICES])):
        for parallel, name, other in (
            (own, "key_positions", "query_positions"),
            (alike, "key_positions", "query_positions"),
            (alike, "query_positions", "key_positions"),
        ):
            position = {name: tokens}
            wrong = functools.partial(attend, *arrays, parallel=parallel, **position)
            complains(wrong, ValueError, name, "[1,16]", f"{other}, too")
            complains(jax.jit(wrong), ValueError, name, "[1,16]", f"{other}, too")
        # in the layout's order, after it, or absent
        for right in (given, {"key_positions": absent}):
            jax.eval_shape(lambda: attend(*arrays, parallel=alike, **right))  # noqa: B023
        later = shard_sequence(tokens, alike) + 3
        jax.eval_shape(lambda: attend(*arrays, parallel=alike, query_positions=later))
        jax.eval_shape(lambda p: attend(*arrays, parallel=own, key_positions=p), tokens)


def test_orders():
    """What a layout is: which tokens the first and the last of four devices hold, and that all have one place."""
    mesh = make_mesh((DEVICES,), ("device",), devices=jax.devices()[:DEVICES])
    held = {
        "contiguous": [[0, 1, 2, 3], [12, 13, 14, 15]],
        "striped": [[0, 4, 8, 12], [3, 7, 11, 15]],
        "zigzag": [[0, 1, 14, 15], [6, 7, 8, 9]],
    }
    with jax.set_mesh(mesh):
        for layout, (first, last) in held.items():
            parallel = SequenceParallel("device", layout=layout)
            tokens = shard_sequence(jnp.arange(16), parallel, axis=0)
            shards = {s.device.id: s.data.tolist() for s in tokens.addressable_shards}
            assert shards[0] == first and shards[3] == last, layout
            assert unshard_sequence(tokens, parallel, axis=0).tolist() == list(range(16))
            inside = jax.jit(lambda x, p=parallel: shard_sequence(x, p, axis=0))(jnp.arange(16))
            assert inside.sharding.is_equivalent_to(tokens.sharding, 1)
            np.testing.assert_array_equal(inside, tokens)


def blocks_computed(order, i, j):
    """Scores that device i computes when it holds the keys of device j."""
    queries, keys = (jnp.asarray(order[x])[None] for x in (i, j))
    query, key = (jnp.zeros((1, len(order[0]), heads, 1)) for heads in (8, 2))
    operands = Operands(query, key, key, tokens=Tokens(queries, keys))
    blocks = BlockedOperands(operands, Settings(1.0, window_structure(right=0)))
    return int(blocks._meet.sum()) * blocks.grid.rows * blocks.grid.keys


@pytest.mark.full
@pytest.mark.parametrize("length", [8192, 32768])
def test_causal_work_is_balanced(length):
    """Devices that wait for the one with the last tokens: within 5 % of each other, counted in blocks at real sizes.

    Contiguous shards are the control: the last device has eight times the work of the first.
    """
    spread = {}
    with jax.set_mesh(mesh_of("8")):
        for layout in ("contiguous", "striped", "zigzag"):
            parallel = SequenceParallel("device", layout=layout)
            order = sequence_order(length, parallel, "x").reshape(8, -1)
            work = [sum(blocks_computed(order, i, j) for j in range(8)) for i in range(8)]
            spread[layout] = max(work) / min(work)
            if layout == "zigzag":  # and little of it in vain
                assert sum(work) < 1.1 * 4 * length**2
    assert spread["zigzag"] < 1.05 and spread["striped"] < 1.05
    assert spread["contiguous"] > 5


WAITS = "the last of 8 contiguous shards has 1.88 times the mean work.*layout='zigzag'"


def causal(length, parallel, heads=1, **options):
    """The types of a causal call over eight devices; nothing is computed."""
    mesh = make_mesh((8,), ("device",))
    x = jax.ShapeDtypeStruct((1, length, heads, 8), jnp.bfloat16)
    options = {"is_causal": True, "parallel": parallel} | options
    with jax.set_mesh(mesh):
        jax.eval_shape(functools.partial(ea.attention, **options), x, x, x)


@pytest.mark.parametrize("method", ["ring", "tree"])
def test_devices_that_wait(method):
    """A causal ring whose last device works twice as long as the mean, and nobody says so."""
    parallel = SequenceParallel("device", method=method)
    with pytest.warns(UserWarning, match=WAITS):
        causal(8192, parallel)
    with pytest.warns(UserWarning, match=WAITS):
        causal(8192, parallel, is_causal=False, mask=ea.masks.Causal())


def test_devices_that_have_equal_work():
    """A warning where there is nothing to balance; warnings are errors here."""
    ring = functools.partial(SequenceParallel, "device", method="ring")
    causal(8192, ring(layout="zigzag"))
    causal(8192, ring(), is_causal=False)
    causal(8192, ring(), local_window_size=(64, 0))
    causal(4096, ring())  # too short to matter
    causal(8192, ring(), query_positions=jnp.zeros((1, 8192), jnp.int32))
    causal(8192, SequenceParallel("device", method="ulysses"), heads=8)
