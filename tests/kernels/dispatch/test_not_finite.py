"""Only minus infinity is empty, and absent slots are not read: every implementation, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import AttentionState, local_attention, masks
from tests.support.selection import few
from tests.support.traits import RUNNABLE, of_any_rows

NAMES = pytest.mark.parametrize("name", RUNNABLE)
TWO_NAMES = pytest.mark.parametrize("name", few(RUNNABLE, "blockwise", "pallas_gpu", "decode_cpu"))
SHAPES = (2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 6)
LENGTHS = np.array([3, 9])
# The slots of the first batch entry that no query sees, for each way to hide them.
ABSENT = {
    "positions": (
        {"key_positions": np.where(np.arange(9) % 3 == 1, -1, np.arange(9))[None]},
        slice(1, 9, 3),
    ),
    "causal": ({"is_causal": True}, slice(5, 9)),
    "window": (
        {
            "local_window_size": 1,
            "query_positions": np.array([[0, 1, 2, 7, 8]]),
            "key_positions": np.arange(9)[None],
        },
        slice(4, 6),
    ),
    "queries": (
        {
            "is_causal": True,
            "query_seq_lengths": np.array([2, 5]),
            "key_value_seq_lengths": LENGTHS,
        },
        slice(2, 9),
    ),
}


def arrays():
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in SHAPES)


@functools.partial(jax.jit, static_argnames=("name", "static"))
def state_and_gradients(query, key, value, traced, cotangent, *, name, static=()):
    def run(*arrays):
        return local_attention(*arrays, implementation=of_any_rows(name), **traced, **dict(static))

    state, back = jax.vjp(run, query, key, value)
    return state, back(jax.tree.map(lambda x, c: c * jnp.ones_like(x), state, cotangent))


def evaluate(name, query, key, value, options, cotangent=(0.5, 2.0)):
    traced = {k: jnp.asarray(v) for k, v in options.items() if isinstance(v, np.ndarray)}
    static = tuple((k, v) for k, v in options.items() if k not in traced)
    return state_and_gradients(
        query, key, value, traced, AttentionState(*cotangent), name=name, static=static
    )


@pytest.mark.product
@NAMES
@pytest.mark.parametrize("kind", ABSENT)
def test_what_is_absent_is_not_read(name, kind):
    """0 · inf: the contents of slots that no query sees, in values or in gradients. Compared with zeros there."""
    options, slots = ABSENT[kind]
    query, key, value = arrays()
    clean = [x.at[0, slots].set(0.0) for x in (key, value)]
    wanted = evaluate(name, query, *clean, options)
    for bad in (np.nan, np.inf):
        found = evaluate(name, query, *(x.at[0, slots].set(bad) for x in (key, value)), options)
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    gradients = wanted[1]
    assert not any(np.asarray(x[0, slots]).any() for x in gradients[1:])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_what_is_absent_is_not_read_by_what_is_mapped_over():
    """A condition for each row, whose branches both run under vmap."""
    query, key, value = arrays()
    lengths = jnp.asarray(LENGTHS)

    def run(query, key, value, length):
        return local_attention(
            query, key, value, key_value_seq_lengths=length, implementation="decode"
        )

    mapped = jax.jit(jax.vmap(run))
    wanted = mapped(query, key, value.at[0, 3:].set(0), lengths)
    for bad in (np.nan, np.inf):
        found = mapped(query, key, value.at[0, 3:].set(bad), lengths)
        for mine, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
    # the second sum, which reads the values again, is in a branch
    assert "conditional" in mapped.lower(query, key, value, lengths).compile().as_text()


@TWO_NAMES
def test_absent_queries_ask_nothing(name):
    """NaN in a padded query, or in its cotangent, that reaches the gradients of keys and values."""
    options = {
        "query_positions": np.array([[0, 1, -1, 3, -1]]),
        "key_positions": np.arange(9)[None],
    }
    query, key, value = arrays()
    away = np.array([2, 4])
    wanted = evaluate(name, query.at[:, away].set(0), key, value, options)
    cotangent = (jnp.full((2, 5, 1, 1), 0.5).at[:, away].set(np.nan), 2.0)
    found = evaluate(name, query.at[:, away].set(np.nan), key, value, options, cotangent)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert np.isneginf(found[0].lse[:, away]).all() and not found[0].out[:, away].any()


def test_absent_queries_have_no_scale():
    """0 · NaN in the derivative of a scale that is an array, which sums over all queries."""
    query, key, value = arrays()
    away, positions = np.array([2, 4]), np.array([[0, 1, -1, 3, -1]])

    def energies(query, scale):
        state = local_attention(query, key, value, scale=scale, query_positions=positions)
        return jnp.where(jnp.isneginf(state.lse), 0, state.lse).sum() + (state.out**2).sum()

    slope = jax.jit(jax.grad(energies, argnums=1))
    wanted, found = (slope(query.at[:, away].set(x), jnp.float32(0.3)) for x in (0, np.nan))
    assert wanted != 0 and found == wanted


@pytest.mark.parametrize("rule", [masks.Window(1, 0), ~masks.Causal()], ids=["window", "later"])
def test_queries_without_keys_ask_nothing(rule):
    """The same of a row that is fully masked by a rule alone, where no positions are given."""
    arrays = [jnp.asarray(x) for x in np.random.default_rng(0).normal(size=(3, 2, 6, 2, 3))]
    query, key, value = arrays[0], *(x[:, :3] for x in arrays[1:])

    def gradients(name, fill):
        (out, lse), back = jax.vjp(
            lambda *x: tuple(local_attention(*x, mask=rule, implementation=name)), query, key, value
        )
        away = np.isneginf(lse)
        assert away.any() and not away.all()
        d_out = jnp.where(away[..., None], fill, jnp.full_like(out, 0.5))
        return back((d_out, jnp.where(away, fill, 2.0)))

    wanted = gradients("reference", 0.0)
    for mine, theirs in zip(gradients("blockwise", np.nan), wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["blockwise", "decode"])
def test_masked_queries_ask_nothing(name):
    """The same of a row from which a mask array hides all keys."""
    mask = np.ones((2, 1, 5, 9), bool)
    mask[:, :, 2] = False
    query, key, value = arrays()
    wanted = evaluate(name, query.at[:, 2].set(0), key, value, {"mask": mask})
    cotangent = (jnp.full((2, 5, 1, 1), 0.5).at[:, 2].set(np.nan), 2.0)
    bad = query.at[:, 2].set(np.nan)
    found = evaluate(name, bad, key, value, {"mask": mask}, cotangent)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", [x for x in RUNNABLE if not x.startswith("pallas")])
def test_what_a_mask_hides_from_all_is_not_read(name):
    """The padding of a batch as a mask, as in jax.nn; and with a bias of minus infinity."""
    query, key, value = arrays()
    mask = (np.arange(9)[None] < LENGTHS[:, None])[:, None, None]
    hidden, broken = (
        {"mask": mask, "bias": np.where(mask, 0.5, x).astype(np.float32)} for x in (0, np.nan)
    )
    wanted = evaluate(name, query, *(x.at[0, 3:].set(0) for x in (key, value)), hidden)
    found = evaluate(name, query, *(x.at[0, 3:].set(np.nan) for x in (key, value)), broken)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@TWO_NAMES
def test_what_is_broken_reaches_the_answer(name):
    """A row of NaN that is reported as empty (out = 0, lse = -inf): training goes on and the loss looks healthy."""
    query, key, value = arrays()
    others = np.ones((2, 5, 4), bool)
    others[0, 4, 1] = False
    for bad in (np.nan, np.inf):
        broken = query.at[0, 4, 1].set(bad)
        (out, lse), gradients = evaluate(name, broken, key, value, {"is_causal": True})
        assert np.isnan(out[~others]).all() and np.isnan(lse[~others]).all()
        assert np.isfinite(out[others]).all() and np.isfinite(lse[others]).all()
        assert np.isnan(gradients[0][~others]).all() and np.isnan(gradients[1][0, :5, 0]).all()
        assert np.isfinite(gradients[0][others]).all() and np.isfinite(gradients[2][1]).all()

        broken = value.at[0, 0, 1, 3].set(bad)
        (out, lse), _ = evaluate(name, query, key, broken, {"is_causal": True})
        assert not np.isfinite(out[0, :, 2:, 3]).any() and np.isfinite(lse).all()

    broken = key.at[0, 0, 1].set(np.nan)
    (out, lse), _ = evaluate(name, query, broken, value, {"is_causal": True})
    assert np.isnan(out[0, :, 2:]).all() and np.isnan(lse[0, :, 2:]).all()
    assert np.isfinite(out[1]).all() and np.isfinite(lse[1]).all()
