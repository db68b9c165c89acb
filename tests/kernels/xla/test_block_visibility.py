"""The positions of a block's tokens, counted from its index or read from arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import local_attention, scores
from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.xla._blocks import with_block_positions
from energy_attn.kernels.xla._blockwise import Blockwise
from energy_attn.kernels.xla._grid import BlockSizes, grid
from tests.support.compare import close
from tests.support.problems import _make, cast, cotangents, tangents
from tests.support.reference import dense, dense_jvp, dense_vjp
from tests.support.selection import few_rows

SIZES = BlockSizes(rows=8, least_rows=4, keys=4, keys_of_few_rows=4)
RULES = {"all": {}, "causal": {"is_causal": True}, "window": {"local_window_size": (5, 3)}}


def problem_of(rule, T, S):
    return _make(f"places of {rule}", T=T, S=S, N=4, K=2, H=3, **RULES[rule])


SIZED = [("causal", 11, 11), ("window", 14, 13), ("all", 10, 13), ("causal", 9, 17)]
SIZED += [(rule, T, S) for rule in RULES for T, S in ((12, 12), (11, 11), (14, 13), (9, 17))]


@pytest.mark.parametrize(("rule", "T", "S"), few_rows(list(dict.fromkeys(SIZED)), 4))
def test_counted_positions(rule, T, S):
    """Positions, absent keys or skipped blocks that are wrong where no array tells; in values and both derivatives."""
    problem = problem_of(rule, T, S)
    arrays, _ = cast(problem, jnp.float64)
    given, moved = cotangents(problem, jnp.float64), tangents(problem)

    @jax.jit
    def results(arrays, moved, given):
        def state(arrays):
            found = local_attention(**arrays, **problem.options, implementation=Blockwise(SIZES))
            return tuple(found)

        found, back = jax.vjp(state, arrays)
        return found, back(given)[0], jax.jvp(state, (arrays,), (moved,))[1]

    found = results(arrays, jax.tree.map(jnp.asarray, moved), given)
    close(found[0], dense(problem), "state")
    close(found[1], dense_vjp(problem, *given), "gradients")
    close(found[2], dense_jvp(problem, moved), "tangent")


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
    found = []

    def places(arrays):
        call = check_call(**arrays, **RULES[rule])
        blocks = grid(call.operands, call.settings.mask, SIZES)
        operands = with_block_positions(call.operands, call.settings, blocks)
        found.append(operands.tokens.key_positions is None)

    jax.eval_shape(places, problem_of(rule, T, S).arrays)
    assert found == [counted]


def test_no_array_of_positions():
    """Positions in the program of the usual call, which has an arithmetic of them for each block."""
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)

    def total(*arrays):
        return local_attention(*arrays, is_causal=True, implementation="blockwise").out.sum()

    text = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x).as_text()
    assert "4096xi32" not in text
    assert "4096xi1" not in text


@pytest.mark.parametrize("rule", ["all", pytest.param("causal", marks=pytest.mark.smoke)])
def test_scores_of_what_fills_a_block(rule):
    """A position past the last one, for which a score is NaN, and so the gradient of a query."""
    problem = problem_of(rule, 11, 11)
    arrays, _ = cast(problem, jnp.float64)
    dout, dlse = cotangents(problem, jnp.float64)
    table = np.sin(np.arange(1.0, 12))

    @jax.jit
    def results(arrays, table):
        def state(arrays, table):
            score = scores.Function(lambda s, at, table: s * jnp.take(table, at.key), table)
            options = RULES[rule] | {"score": score, "implementation": Blockwise(SIZES)}
            return tuple(local_attention(**arrays, **options))

        found, back = jax.vjp(state, arrays, table)
        return found, *back((dout, dlse))

    found, gradients, of_table = results(arrays, jnp.asarray(table))
    # a product with a key, times a number of that key
    wide = table[None, :, None, None]
    scaled = dataclasses.replace(problem, key=problem.key * wide)
    wanted = dense_vjp(scaled, dout, dlse)
    close(found, dense(scaled), "state")
    close(gradients, wanted | {"key": wanted["key"] * wide}, "gradients")
    close(of_table, (wanted["key"] * problem.key).sum((0, 2, 3)), "table")
