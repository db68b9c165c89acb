"""Tables of the blocks of rules: what they say of any intervals, and how many blocks a kernel then computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import energy_attn as ea
from energy_attn import masks
from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.kernels import local_attention
from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.masks._interval import Interval
from energy_attn.kernels.pallas._ranges import tile_ranges, visibility_of
from energy_attn.kernels.pallas.gpu._plan import make_plan
from energy_attn.kernels.pallas.tpu._layout import layout
from energy_attn.kernels.pallas.tpu._visibility import block_ranges, block_visibility
from energy_attn.kernels.xla._blocks import BlockedOperands
from energy_attn.kernels.xla._grid import BlockSizes
from energy_attn.kernels.xla._index import Index
from tests.support.complaints import complains
from tests.support.random_rules import rules, sees
from tests.support.traits import SMALL_LAYOUT, SMALL_TILES

pairs = st.lists(st.integers(0, 13), min_size=2, max_size=2).map(sorted)


@given(rules, st.integers(1, 5), st.lists(st.tuples(pairs, pairs), min_size=6, max_size=6))
@settings(max_examples=8)
def test_intervals(rule, block, intervals):
    """A rectangle of the table that is one block short or one too far, or a table that is asked past its end."""
    table = masks.tabulate(rule, 9, 11, block=block)
    for q, k in intervals:
        queries, keys = (Interval(*map(jnp.int32, x)) for x in (q, k))
        seen = [sees(rule, i, j) for i in range(q[0], q[1] + 1) for j in range(k[0], k[1] + 1)]
        assert any(seen) <= bool(table.any_visible(queries, keys))
        assert bool(table.all_visible(queries, keys)) <= all(seen)


def spotted(query, key, spots):
    return spots[query // 4 % len(spots), key // 4 % spots.shape[1]]


SPOTS = np.eye(8, dtype=bool) | (np.random.default_rng(1).random((8, 8)) < 0.1)
RULE = masks.Function(spotted, jnp.asarray(SPOTS))
# what kernels compare: a query's block with each of those that its row of the spots names
NAMED = np.stack([np.resize(np.flatnonzero(x), 4) for x in SPOTS]).astype(np.int32)


def named(query, key, blocks):
    row = blocks[query // 4 % 8]
    return functools.reduce(jnp.logical_or, (row[..., i] == key // 4 for i in range(4)))


def call_of(rule, length=32):
    x = jnp.ones((1, length, 1, 4), jnp.float32)
    return check_call(x, x, x, mask=rule)


def test_table_is_exact():
    """Corners of another block, or a block with something to see that is told to have nothing."""
    for rule in (RULE, masks.Function(named, jnp.asarray(NAMED))):
        table = masks.tabulate(rule, 32, block=4)
        for found in (table.some, table.whole):
            np.testing.assert_array_equal(np.diff(np.diff(found, axis=0), axis=1), SPOTS)


def test_blocks_that_are_computed():
    """A kernel that reads blocks where the table has none: as slow as no mask; or that masks whole ones."""
    table = masks.tabulate(masks.Function(named, jnp.asarray(NAMED)), 32, block=4)
    call = call_of(table)
    blocks = BlockedOperands(call.operands, call.settings, BlockSizes(4, 4, 4, 4))
    found = [[bool(blocks.meet(Index(0, i, j))) for j in range(8)] for i in range(8)]
    np.testing.assert_array_equal(found, SPOTS)
    at = layout(
        call.operands, call.settings, "forward", SMALL_LAYOUT._replace(rows=4, keys_of_few_rows=4)
    )
    assert (at.row_block, at.key_block) == (4, 4)
    ranges = block_ranges(block_visibility(call.operands, at), at, 1)
    np.testing.assert_array_equal(ranges.stop - ranges.first, SPOTS.sum(1))
    np.testing.assert_array_equal(ranges.open_stop - ranges.open_first, SPOTS.sum(1))
    call = call_of(masks.tabulate(masks.Function(wide, jnp.asarray(NAMED)), 128, block=16), 128)
    for kind, axis in (("forward", 1), ("key", 0)):
        plan = make_plan(call.operands, call.settings, kind, SMALL_TILES)
        assert (plan.row_times, plan.keys) == (16, 16)
        given = visibility_of(call.operands, plan)
        found = tile_ranges(call.operands, given, plan, of_keys=kind == "key")
        np.testing.assert_array_equal(found.stop[0], SPOTS.sum(axis))
        np.testing.assert_array_equal(found.whole[0], SPOTS.sum(axis))


def wide(query, key, blocks):
    return named(query // 4, key // 4, blocks)


def test_whole_blocks_of_a_table():
    """Blocks of a kernel that lie across those of the table, and so meet four times as many."""
    rule = masks.tabulate(masks.Function(spotted, jnp.asarray(SPOTS)), 70, block=4)
    call = call_of(rule, 70)
    grid = BlockedOperands(call.operands, call.settings, BlockSizes(14, 14, 14, 14)).grid
    assert (grid.queries, grid.keys, grid.query_blocks, grid.key_blocks) == (12, 12, 6, 6)


@pytest.mark.parametrize("implementation", ["blockwise", "reference", "decode"])
def test_one_table_for_all_calls(implementation):
    """A table that is evaluated again, or is wrong for other positions: of a step, or past its end."""
    traced = []

    def counted(query, key, spots):
        traced.append(query.shape)
        return spotted(query, key, spots)

    rule = masks.Causal() & masks.Function(counted, jnp.asarray(SPOTS))
    table = masks.tabulate(rule, 24, block=8)
    x = jax.random.normal(jax.random.key(0), (2, 32, 1, 4))
    run = jax.jit(functools.partial(local_attention, implementation=implementation))
    wanted = run(x, x, x, mask=rule)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-12), run(x, x, x, mask=table), wanted
    )
    step = run(
        x[:, 30:31],
        x,
        x,
        mask=table,
        query_positions=jnp.full((2, 1), 30),
        key_positions=jnp.tile(jnp.arange(32), (2, 1)),
    )
    np.testing.assert_allclose(step.out[:, 0], wanted.out[:, 30], atol=1e-12)
    before = len(traced)
    run(x, x, x, mask=masks.tabulate(rule, 24, block=8))
    assert all(shape == (1, 8, 1) for shape in traced[before:])  # the table, not the program


@pytest.mark.full
def test_rows_of_a_batch():
    """One row's table for all, or a table that vmap or a gradient loses."""
    rule = masks.Causal() | masks.Prefix(np.asarray([3, 9], np.int32))
    table = masks.tabulate(rule, 16, block=4)
    assert table.some.shape == (2, 5, 5)
    x = jax.random.normal(jax.random.key(0), (2, 16, 1, 4))

    def total(x, rule):
        return jnp.sin(ea.attention(x, x, x, mask=rule)).sum()

    wanted = jax.grad(total)(x, rule)
    np.testing.assert_allclose(jax.grad(total)(x, table), wanted, atol=1e-12)
    one = jax.vmap(jax.grad(lambda x, rule: total(x[None], rule)))(x, table)
    np.testing.assert_allclose(one, wanted, atol=1e-12)


def test_on_a_mesh():
    """A table that is taken for that of a shard's own positions."""
    table = masks.tabulate(masks.Causal() & RULE, 32, block=4)
    x = jax.random.normal(jax.random.key(0), (1, 32, 1, 4))
    wanted = ea.attention(x, x, x, mask=table.rule)
    with jax.set_mesh(make_mesh((8,), ("device",))):
        for parallel in (
            SequenceParallel("device", "ring"),
            SequenceParallel("device", "tree"),
        ):
            found = ea.attention(x, x, x, mask=table, parallel=parallel)
            np.testing.assert_allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "name", "received", "wanted"),
    [
        (lambda: masks.tabulate(lambda q, k: q > k, 4), TypeError, "rule", "function", "a rule"),
        (lambda: masks.tabulate(RULE, 0), ValueError, "query_len", "0", "at least 1"),
        (lambda: masks.tabulate(RULE, 4, 2.5), TypeError, "key_len", "2.5", "integer"),
        (lambda: masks.tabulate(RULE, 4, block=-1), ValueError, "block", "-1", "at least 1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_mistakes(call, error, name, received, wanted):
    """A table of no blocks, or a function without its rule."""
    complains(call, error, name, received, wanted)
