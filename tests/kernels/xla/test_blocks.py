"""Blocks of the blockwise kernel: their number, and the positions of their tokens, counted or read from arrays."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import local_attention, scores
from energy_attn.kernels.internal import window_structure
from energy_attn.kernels.xla._blocks import grid, with_block_positions
from tests.kernels.derivatives import check_dense
from tests.support.compare import close
from tests.support.problems import (
    BLOCKS,
    LARGE,
    _make,
    call_of,
    cast,
    cotangents,
    problem_call,
)
from tests.support.reference import dense, dense_vjp
from tests.support.selection import few_rows
from tests.support.traits import SMALL_BLOCKS, BlockSizes, Blockwise

SIZES = BlockSizes(rows=8, least_rows=4, keys=4, keys_of_few_rows=4)
RULES = {"all": {}, "causal": {"is_causal": True}, "window": {"local_window_size": (5, 3)}}


def problem_of(rule, T, S):
    return _make(f"places of {rule}", T=T, S=S, N=4, K=2, H=3, **RULES[rule])


@pytest.mark.parametrize(
    ("problem", "sizes", "least"),
    [
        *((x, SMALL_BLOCKS, 3) for x in BLOCKS.values()),
        *((x, BlockSizes(), 2) for x in LARGE.values()),
    ],
    ids=str,
)
def test_problems_have_several_blocks(problem, sizes, least):
    """Problems of `test_many_blocks` and `test_real_blocks` that are of one block, and say nothing."""
    blocks = grid(problem_call(problem).operands, window_structure(), sizes)
    assert blocks.query_blocks >= least and blocks.key_blocks >= least


SIZED = [("causal", 11, 11), ("window", 14, 13), ("all", 10, 13), ("causal", 9, 17)]
SIZED += [(rule, T, S) for rule in RULES for T, S in ((12, 12), (11, 11), (14, 13), (9, 17))]


@pytest.mark.parametrize(("rule", "T", "S"), few_rows(list(dict.fromkeys(SIZED)), 4))
def test_counted_positions(rule, T, S):
    """Positions, absent keys or skipped blocks that are wrong where no array tells; in values and both derivatives."""
    options = RULES[rule] | {"implementation": Blockwise(SIZES)}
    check_dense(lambda x: local_attention(**x, **options), problem_of(rule, T, S))


@pytest.mark.parametrize(
    ("rule", "T", "S", "counted"),
    [
        ("all", 11, 6, True),
        ("causal", 11, 11, True),
        ("causal", 13, 11, True),
        ("causal", 11, 12, False),
        ("window", 11, 14, True),
        ("window", 11, 15, False),
        ("window", 16, 11, True),
        ("window", 17, 11, False),
    ],
)
def test_who_counts(rule, T, S, counted):
    """Arrays of positions in a program that needs none, or none where a key or a query is alone."""

    def places(arrays):
        operands, settings, _ = call_of(**arrays, **RULES[rule])
        blocks = grid(operands, settings.mask, SIZES)
        tokens = with_block_positions(operands, settings, blocks).tokens
        assert (tokens.key_positions is None) == counted

    jax.eval_shape(places, problem_of(rule, T, S).arrays)


@pytest.mark.parametrize("rule", ["all", "causal"])
def test_indices_in_a_program(rule):
    """Positions in the program of the usual call, which has an arithmetic of them for each block; and indices that are
    checked for being negative: three operations and five constants for each axis of each slice, of which only JAX's
    own loops need some.
    """
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)

    def total(*arrays):
        return local_attention(*arrays, **RULES[rule], implementation="blockwise").out.sum()

    text = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x).as_text()
    assert "4096xi32" not in text and "4096xi1" not in text
    assert rule == "causal" or text.count("SIGNED") <= 8


@pytest.mark.parametrize("rule", ["all", pytest.param("causal", marks=pytest.mark.smoke)])
def test_scores_of_what_fills_a_block(rule):
    """A position past the last one, for which a score is NaN, and so the gradient of a query."""
    problem = problem_of(rule, 11, 11)
    arrays, _ = cast(problem, jnp.float64)
    given = cotangents(problem, jnp.float64)
    table = np.sin(np.arange(1.0, 12))

    @jax.jit
    def results(arrays, table):
        def state(arrays, table):
            score = scores.Function(lambda s, at, table: s * jnp.take(table, at.key), table)
            options = RULES[rule] | {"score": score, "implementation": Blockwise(SIZES)}
            return tuple(local_attention(**arrays, **options))

        found, back = jax.vjp(state, arrays, table)
        return found, *back(given)

    # a product with a key, times a number of that key
    wide = table[None, :, None, None]
    scaled = dataclasses.replace(problem, key=problem.key * wide)
    wanted = dense_vjp(scaled, *given)
    of_table = (wanted["key"] * problem.key).sum((0, 2, 3))
    wanted = dense(scaled), wanted | {"key": wanted["key"] * wide}, of_table
    close(results(arrays, jnp.asarray(table)), wanted)


def test_a_mask_that_a_program_closes_over():
    """Seconds of compilation: XLA that folds the reductions of such a mask, element by element."""
    shown = jnp.asarray(np.random.default_rng(0).random((1, 1, 128, 128)) < 0.5)
    x = jnp.ones((1, 128, 2, 8))
    run = jax.jit(lambda x: local_attention(x, x, x, mask=shown, implementation="blockwise"))
    assert re.search(r"pred\[\S* reduce\(", run.lower(x).compile().as_text())
