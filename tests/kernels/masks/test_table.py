"""Blocks that kernels compute under masks, and tables of the blocks of a mask: what they say of any intervals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import energy_attn as ea
from energy_attn import masks
from energy_attn.kernels import local_attention
from energy_attn.kernels.masks import Interval
from energy_attn.kernels.pallas._rows import block_list, block_run, block_spans
from energy_attn.kernels.pallas._tiles import tile_ranges, visibility_of
from energy_attn.kernels.pallas.gpu._plan import make_plan
from energy_attn.kernels.pallas.tpu._kernel import make_layout
from energy_attn.kernels.pallas.tpu._scores import block_ranges, block_visibility
from energy_attn.kernels.xla._blocks import BlockedOperands, Index
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.complaints import complains
from tests.support.masks import RULES
from tests.support.problems import _make, call_of, cast
from tests.support.random_masks import JOINED, rules, sees
from tests.support.reference import dense, visible
from tests.support.selection import few
from tests.support.traits import SMALL_LAYOUT, SMALL_TILES, BlockSizes


@pytest.mark.parametrize(("name", "block"), [("near or same", 4), ("not both", 3)])
def test_intervals(name, block):
    """A rectangle of the table that is one block short or one too far, or a table that is asked past its end."""
    check_intervals(JOINED[name], block)


@pytest.mark.full
@given(rules, st.integers(1, 5))
def test_intervals_of_many_rules(rule, block):
    """The same."""
    check_intervals(rule, block)


def check_intervals(rule, block):
    pairs = np.asarray([[sees(rule, i, j) for j in range(14)] for i in range(14)])
    low, high = np.triu_indices(14)
    queries, keys = (
        Interval(*(np.expand_dims(x.astype(np.int32), axis) for x in (low, high)))
        for axis in (1, 0)
    )

    @jax.jit
    def told(rule, queries, keys):
        table = masks.tabulate(rule, 9, 11, block=block)
        shape = len(low), len(low)
        found = table.any_visible(queries, keys), table.all_visible(queries, keys)
        return tuple(jnp.broadcast_to(x, shape) for x in found)

    sums = np.pad(pairs.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    rows, columns = np.ix_(low, low), np.ix_(high + 1, high + 1)
    seen = sums[columns] - sums[np.ix_(low, high + 1)] - sums[np.ix_(high + 1, low)] + sums[rows]
    length = high + 1 - low
    any_visible, all_visible = map(np.asarray, told(rule, queries, keys))
    assert not ((seen > 0) & ~any_visible).any()
    assert not (all_visible & (seen < length[:, None] * length)).any()


def spotted(query, key, spots):
    return spots[query // 4 % len(spots), key // 4 % spots.shape[1]]


SPOTS = np.eye(8, dtype=bool) | (np.random.default_rng(1).random((8, 8)) < 0.1)
RULE = masks.Function(spotted, SPOTS)
# what kernels compare: a query's block with each of those that its row of the spots names
NAMED = np.stack([np.resize(np.flatnonzero(x), 4) for x in SPOTS]).astype(np.int32)


def named(query, key, blocks):
    row = blocks[query // 4 % 8]
    return functools.reduce(jnp.logical_or, (row[..., i] == key // 4 for i in range(4)))


def traced(function, *rules):
    """A function of a mask as part of a program: nothing is compiled but what is returned."""
    return jax.tree.map(np.asarray, jax.jit(function)(*rules))


def masked_call(rule, length=32):
    x = jnp.ones((1, length, 1, 4), jnp.float32)
    return call_of(x, x, x, mask=rule)


def meeting(blocks):
    """Which blocks of queries and of keys meet."""
    over_keys = jax.vmap(lambda i, j: blocks.meet(Index(0, i, j)), (None, 0))
    sizes = blocks.grid.query_blocks, blocks.grid.key_blocks
    return jax.vmap(over_keys, (0, None))(*map(jnp.arange, sizes))


def test_table_is_exact():
    """Corners of another block, or a block with something to see that is told to have nothing."""
    table = traced(lambda rule: masks.tabulate(rule, 32, block=4), RULE)
    for found in (table.some, table.whole):
        np.testing.assert_array_equal(np.diff(np.diff(found, axis=0), axis=1), SPOTS)


SKIPPED = few(sorted(RULES), "prefix_rows", "documents_function", "nested", "dilated", "table")


@pytest.mark.parametrize("name", SKIPPED)
def test_blocks_are_skipped(name):
    """A table that skips a block with a visible pair, or, by the predicate, one that reads a hidden block."""
    problem = dataclasses.replace(_make("skip", B=2, T=16, S=16, N=1), rule=name)

    @jax.jit
    def meet(arrays):
        call = call_of(**arrays, **problem.options)
        return meeting(BlockedOperands(call.operands, call.settings, BlockSizes(8, 4, 4, 4)))

    exact = visible(problem)[:, 0].reshape(2, 4, 4, 4, 4).any((0, 2, 4))
    found = np.asarray(meet(cast(problem, jnp.float32)[0]))
    assert not (exact & ~found).any()
    # by intervals of both entries, or past the end of a table, more are read
    if name not in ("prefix_rows", "documents", "table"):
        np.testing.assert_array_equal(found, exact)


def test_blocks_that_are_computed():
    """A kernel that reads blocks where the table has none: as slow as no mask; or that masks whole ones."""

    def read(rule):
        call = masked_call(masks.tabulate(rule, 32, block=4))
        blocks = BlockedOperands(call.operands, call.settings, BlockSizes(4, 4, 4, 4))
        of_tpu = SMALL_LAYOUT._replace(rows=4, keys_of_few_rows=4)
        at = make_layout(call.operands, call.settings, "forward", of_tpu)
        assert (at.row_block, at.key_block) == (4, 4)
        return meeting(blocks), block_ranges(block_visibility(call.operands, at), at, 1)

    meets, ranges = traced(read, masks.Function(named, NAMED))
    np.testing.assert_array_equal(meets, SPOTS)
    np.testing.assert_array_equal(ranges.stop - ranges.first, SPOTS.sum(1))
    np.testing.assert_array_equal(ranges.open_stop - ranges.open_first, SPOTS.sum(1))


def test_tiles_that_are_computed():
    """The same of the tiles of GPUs, whose sizes are not those of blocks."""

    def read(rule):
        call, found = masked_call(masks.tabulate(rule, 128, block=16), 128), []
        for kind in ("forward", "key"):
            plan = make_plan(call.operands, call.settings, kind, SMALL_TILES)
            assert (plan.row_times, plan.keys) == (16, 16)
            given = visibility_of(call.operands, plan)
            found.append(tile_ranges(call.operands, given, plan, of_keys=kind == "key"))
        return found

    for axis, found in zip((1, 0), traced(read, masks.Function(wide, NAMED)), strict=True):
        np.testing.assert_array_equal(found.stop[0], SPOTS.sum(axis))
        np.testing.assert_array_equal(found.unmasked[0], SPOTS.sum(axis))


def wide(query, key, blocks):
    return named(query // 4, key // 4, blocks)


def test_whole_blocks_of_a_table():
    """Blocks of a kernel that lie across those of the table, and so meet four times as many."""

    def sizes(rule):
        call = masked_call(masks.tabulate(rule, 70, block=4), 70)
        grid = BlockedOperands(call.operands, call.settings, BlockSizes(14, 14, 14, 14)).grid
        assert (grid.queries, grid.keys, grid.query_blocks, grid.key_blocks) == (12, 12, 6, 6)

    jax.eval_shape(sizes, RULE)


@pytest.mark.parametrize("implementation", few(["blockwise", "reference", "decode"], "blockwise"))
def test_one_table_for_all_calls(implementation):
    """A table that is evaluated again, or is wrong for other positions: of a step, or past its end."""
    seen = []

    def counted(query, key, spots):
        seen.append(query.shape)
        return spotted(query, key, spots)

    rule = masks.Causal() & masks.Function(counted, SPOTS)
    table = traced(lambda rule: masks.tabulate(rule, 24, block=8), rule)
    places = np.arange(32)
    blocks = SPOTS[places // 4][:, places // 4] & (places <= places[:, None])
    problem = _make("table", B=2, T=32, S=32, N=1, H=4, mask=blocks[None, None])
    arrays, _ = cast(problem, jnp.float64)
    run = jax.jit(functools.partial(local_attention, implementation=implementation))
    out, lse = dense(problem)
    close(run(**arrays, mask=table), (out, lse), tolerance=1e-12)
    step = run(
        **arrays | {"query": array(problem.query[:, 30:31])},
        mask=table,
        query_positions=array(np.full((2, 1), 30)),
        key_positions=array(np.tile(places, (2, 1))),
    )
    close(step, (out[:, 30:31], lse[:, 30:31]), tolerance=1e-12)
    before = len(seen)
    run(**arrays, mask=masks.tabulate(rule, 24, block=8))
    assert all(shape == (1, 8, 1) for shape in seen[before:])  # the table, not the program


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


@pytest.mark.parametrize(
    ("call", "error", "name", "received", "wanted"),
    [
        (lambda: masks.tabulate(lambda q, k: q > k, 4), TypeError, "mask", "function", "a mask"),
        (lambda: masks.tabulate(RULE, 0), ValueError, "query_len", "0", "at least 1"),
        (lambda: masks.tabulate(RULE, 4, 2.5), TypeError, "key_len", "2.5", "integer"),
        (lambda: masks.tabulate(RULE, 4, block=-1), ValueError, "block", "-1", "at least 1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_mistakes(call, error, name, received, wanted):
    """A table of no blocks, or a function without its mask."""
    complains(call, error, name, received, wanted)


def test_runs_and_spans():
    """The last of several runs, one that is none, or a block in a hole between two that needs no mask."""
    seen = np.random.default_rng(0).random((3, 40, 5)) < 0.6
    spans, run = (np.stack(jax.jit(f)(seen), -1) for f in (block_spans, block_run))
    for row, (first, stop), (begin, end) in zip(
        *(x.reshape(-1, x.shape[-1]) for x in (seen, spans, run)), strict=True
    ):
        (places,) = np.nonzero(row)
        assert (first, stop) == ((places[0], places[-1] + 1) if len(places) else (0, 0))
        assert row[begin:end].all() and (begin == end) == (not len(places))
        if len(places):
            assert begin == places[0] and (end == len(row) or not row[end])


def test_list_of_blocks():
    """A block that meets left out or visited twice; one that needs a mask among those that need none."""
    random = np.random.default_rng(0)
    meets, whole = random.random((2, 5, 7)) < 0.5, random.random((2, 5, 7)) < 0.5
    found = jax.tree.map(np.asarray, jax.jit(block_list)(meets, whole))
    for b, x in np.ndindex(2, 5):
        stop, first = found.stop[b, x], found.unmasked[b, x]
        order = found.order[b, x]
        assert sorted(order) == list(range(7))
        np.testing.assert_array_equal(np.sort(order[:stop]), np.flatnonzero(meets[b, x]))
        np.testing.assert_array_equal(np.sort(order[:first]), np.flatnonzero((meets & whole)[b, x]))
