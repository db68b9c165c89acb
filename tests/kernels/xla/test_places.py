"""The positions of a block's tokens, counted from its index or read from arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import local_attention, masks, scores
from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.xla._blockwise import Blockwise
from energy_attn.kernels.xla._grid import BlockSizes, grid
from energy_attn.kernels.xla._places import with_places

SIZES = BlockSizes(rows=8, least_rows=4, keys=4, keys_of_few_rows=4)
RULES = {"all": masks.All(), "causal": masks.Causal(), "window": masks.Window(5, 3)}


def arrays_of(T, S):
    rng = np.random.default_rng(0)
    shapes = (2, T, 4, 3), (2, S, 2, 3), (2, S, 2, 3)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize(("T", "S"), [(12, 12), (11, 11), (14, 13), (10, 13), (9, 17)])
def test_counted_and_given_positions_agree(rule, T, S):
    """Positions, absent keys or skipped blocks that are wrong where no array tells; in values and both derivatives."""
    rule = RULES[rule]
    arrays = arrays_of(T, S)
    moved = [jnp.sin(x) for x in arrays]
    given = {"query_positions": jnp.arange(T)[None], "key_positions": jnp.arange(S)[None]}

    def results(kernel, **positions):
        def state(*arrays):
            return tuple(local_attention(*arrays, mask=rule, implementation=kernel, **positions))

        (out, lse), back = jax.vjp(state, *arrays)
        changes = jax.jvp(state, arrays, moved)[1]
        return out, lse, *back((jnp.cos(out), jnp.ones_like(lse))), *changes

    counted = results(Blockwise(SIZES))
    for found, wanted in zip(counted, results("reference", **given), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-11)
    for found, wanted in zip(counted, results(Blockwise(SIZES), **given), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-13)


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
    call = check_call(*arrays_of(T, S), mask=RULES[rule])
    blocks = grid(call.operands, call.settings.rule, SIZES)
    placed = with_places(call.operands, call.settings, blocks)
    assert (placed.key_positions is None) == counted


def test_no_array_of_positions():
    """Positions in the program of the usual call, which has an arithmetic of them for each block."""
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)

    def total(*arrays):
        return local_attention(*arrays, is_causal=True, implementation="blockwise").out.sum()

    text = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x).as_text()
    assert "4096xi32" not in text
    assert "4096xi1" not in text


@pytest.mark.parametrize("rule", ["all", "causal"])
def test_scores_of_what_fills_a_block(rule):
    """A position past the last one, for which a score is NaN, and so the gradient of a query."""
    T = 11
    query, key, value = arrays_of(T, T)
    table = jnp.sin(jnp.arange(1.0, T + 1))
    score = scores.Function(lambda s, at, table: s * jnp.take(table, at.key), table)

    def results(kernel):
        def state(*arrays):
            return tuple(
                local_attention(*arrays, score=score, mask=RULES[rule], implementation=kernel)
            )

        found, back = jax.vjp(state, query, key, value)
        return *found, *back((jnp.cos(found[0]), jnp.ones_like(found[1])))

    for found, wanted in zip(results(Blockwise(SIZES)), results("reference"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-11)
