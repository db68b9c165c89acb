"""Only minus infinity is empty, and absent slots are not read: every implementation, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import AttentionState, local_attention, masks
from tests.support.arrays import array
from tests.support.compare import close, same
from tests.support.selection import few, few_rows
from tests.support.traits import RUNNABLE, of_any_rows

TWO_NAMES = pytest.mark.parametrize("name", few(RUNNABLE, "blockwise", "pallas_gpu"))
SHAPES = (2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 6)
LENGTHS = np.array([3, 9])
COUNTED, NINE = np.arange(5)[None], np.arange(9)[None]
HOLES = np.where(NINE % 3 == 1, -1, NINE)
NARROW = {"local_window_size": 1, "key_positions": NINE}
RAGGED = {"query_seq_lengths": np.array([2, 5]), "key_value_seq_lengths": LENGTHS}
# The slots of the first batch entry that no query sees, for each way to hide them.
ABSENT = {
    "positions": ({"query_positions": COUNTED, "key_positions": HOLES}, slice(1, 9, 3)),
    "causal": ({"is_causal": True}, slice(5, 9)),
    "window": (NARROW | {"query_positions": np.array([[0, 1, 2, 7, 8]])}, slice(4, 6)),
    "queries": (RAGGED | {"is_causal": True}, slice(2, 9)),
}
# Those of `make test`: each kind, and each kernel, by programs that other tests run as well.
FIRST = [
    ("blockwise", "positions"),
    ("pallas_gpu", "positions"),
    ("decode_cpu", "queries"),
    ("pallas_tpu", "causal"),
    ("decode", "window"),
    ("reference", "queries"),
]
SMOKE = [("pallas_gpu", "positions"), ("pallas_tpu", "causal"), ("decode_cpu", "queries")]
ROWS = [
    pytest.param(name, kind, marks=pytest.mark.smoke if (name, kind) in SMOKE else ())
    if (name, kind) in FIRST
    else pytest.param(name, kind, marks=pytest.mark.full)
    for name in RUNNABLE
    for kind in ABSENT
]


def arrays():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in SHAPES)


def with_some(x, at, value):
    """A copy with another value at some places."""
    x = x.copy()
    x[at] = value
    return x


@functools.partial(jax.jit, static_argnames=("name", "static"))
def state_and_gradients(query, key, value, traced, cotangent, *, name, static=()):
    def run(*arrays):
        return local_attention(*arrays, implementation=of_any_rows(name), **traced, **dict(static))

    state, back = jax.vjp(run, query, key, value)
    return state, back(cotangent)


def evaluate(name, query, key, value, options, d_out=None):
    """The state, and the gradients of half of `out` and twice `lse`: a program for each name and kind of options."""
    shape = (*query.shape[:3], value.shape[-1])
    d_out = np.full(shape, 0.5, np.float32) if d_out is None else d_out
    cotangent = AttentionState(d_out, np.full(shape[:3], 2.0, np.float32))
    traced = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    static = tuple((k, v) for k, v in options.items() if k not in traced)
    given = map(array, (query, key, value))
    traced, cotangent = jax.tree.map(array, (traced, cotangent))
    found = state_and_gradients(*given, traced, cotangent, name=name, static=static)
    return jax.device_get(found)


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_what_is_absent_is_not_read(name, kind):
    """0 · inf: the contents of slots that no query sees, in values or in gradients. Compared with zeros there.

    Nor what a stale slot holds that is large, and finite.
    """
    options, slots = ABSENT[kind]
    query, key, value = arrays()
    wanted = evaluate(name, query, *(with_some(x, (0, slots), 0) for x in (key, value)), options)
    for bad in (np.nan, np.inf, 1e5):
        stale = (with_some(x, (0, slots), bad) for x in (key, value))
        same(evaluate(name, query, *stale, options), wanted, str(bad))
    gradients = wanted[1]
    assert not any(x[0, slots].any() for x in gradients[1:])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_what_is_absent_is_not_read_by_what_is_mapped_over():
    """A condition for each row, whose branches both run under vmap."""
    query, key, value = arrays()
    lengths, given = array(LENGTHS), array(query)
    away = 0, slice(3, None)

    def run(query, key, value, length):
        return local_attention(
            query, key, value, key_value_seq_lengths=length, implementation="decode_cpu"
        )

    mapped = jax.jit(jax.vmap(run))
    # the second sum, which reads the values again, is in a branch
    program = mapped.lower(given, array(key), array(value), lengths).compile()
    assert "conditional" in program.as_text()
    wanted, *others = (
        jax.device_get(program(given, array(key), array(with_some(value, away, x)), lengths))
        for x in (0, np.nan, np.inf)
    )
    for found in others:
        close(found, wanted, tolerance=1e-6)


# Queries that are absent or fully masked, for each way to say so.
PLACES = {"query_positions": np.array([[0, 1, -1, 3, -1]]), "key_positions": NINE}
HIDDEN = np.ones((2, 1, 5, 9), bool)
HIDDEN[:, :, [2, 4]] = False
BLIND = {
    "positions": PLACES,
    "mask": {"mask": HIDDEN, "bias": np.zeros((2, 1, 1, 9), np.float32)},
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "positions") for name in ("blockwise", "pallas_gpu")),
        *((name, "mask") for name in ("blockwise", "decode")),
        *few_rows(
            [
                *((x, "positions") for x in RUNNABLE if x not in ("blockwise", "pallas_gpu")),
                ("reference", "mask"),
            ],
            0,
        ),
    ],
)
def test_absent_queries_ask_nothing(name, kind):
    """NaN in a fully masked row, or in its cotangent, that reaches the gradients of keys and values."""
    options, away = BLIND[kind], np.s_[:, [2, 4]]
    query, key, value = arrays()
    wanted = evaluate(name, with_some(query, away, 0), key, value, options)
    d_out = with_some(np.full_like(wanted[0].out, 0.5), away, np.nan)
    found = evaluate(name, with_some(query, away, np.nan), key, value, options, d_out)
    same(found, wanted)
    assert np.isneginf(found[0].lse[away]).all() and not found[0].out[away].any()


def test_absent_queries_have_no_scale():
    """0 · NaN in the derivative of a scale that is an array, which sums over all queries."""
    query, *others = arrays()
    key, value = map(array, others)
    away, positions = np.s_[:, [2, 4]], np.array([[0, 1, -1, 3, -1]])

    def energies(query, scale):
        state = local_attention(query, key, value, scale=scale, query_positions=positions)
        return jnp.where(jnp.isneginf(state.lse), 0, state.lse).sum() + (state.out**2).sum()

    slope = jax.jit(jax.grad(energies, argnums=1))
    scale = array(0.3, jnp.float32)
    wanted, found = (slope(array(with_some(query, away, x)), scale) for x in (0, np.nan))
    assert wanted != 0 and found == wanted


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(masks.Window(0, 4), id="window"),
        pytest.param(~masks.Causal(), id="later", marks=pytest.mark.full),
    ],
)
def test_queries_without_keys_ask_nothing(rule):
    """The same of a row that is fully masked by a mask alone, where no positions are given."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, size, 2, 3)) for size in (6, 3, 3))

    @jax.jit
    def run(fill, query, key, value):
        state, back = jax.vjp(
            lambda *x: local_attention(*x, mask=rule, implementation="blockwise"), query, key, value
        )
        away = jnp.isneginf(state.lse)
        d_out = jnp.where(away[..., None], fill, jnp.full_like(state.out, 0.5))
        return away, back(AttentionState(d_out, jnp.where(away, fill, 2.0)))

    (away, wanted), found = (run(array(x), query, key, value) for x in (0.0, np.nan))
    assert away.any() and not away.all()
    same(found[1], wanted)


MASKED = few(["blockwise", "decode", "reference"], "blockwise", "decode")


@pytest.mark.parametrize("name", [*MASKED, "decode_cpu"])
def test_what_a_mask_hides_from_all_is_not_read(name):
    """The padding of a batch as a mask, as in jax.nn; and with a bias of minus infinity."""
    query, key, value = arrays()
    shown = (np.arange(9)[None] < LENGTHS[:, None])[:, None, None]
    mask = np.broadcast_to(shown, (2, 1, 5, 9))
    wanted, found = (
        evaluate(
            name,
            query,
            *(with_some(stored, np.s_[0, 3:], x) for stored in (key, value)),
            {"mask": mask, "bias": np.where(shown, 0.5, x).astype(np.float32)},
        )
        for x in (0, np.nan)
    )
    same(found, wanted)


@TWO_NAMES
def test_what_is_broken_reaches_the_answer(name):
    """A row of NaN that is reported as empty (out = 0, lse = -inf): training goes on and the loss looks healthy."""
    query, key, value = arrays()
    options = {"query_positions": COUNTED, "key_positions": np.arange(9)[None]}
    others = np.ones((2, 5, 4), bool)
    others[0, 4, 1] = False
    for bad in (np.nan, np.inf):
        broken = with_some(query, (0, 4, 1), bad)
        (out, lse), gradients = evaluate(name, broken, key, value, options)
        assert np.isnan(out[~others]).all() and np.isnan(lse[~others]).all()
        assert np.isfinite(out[others]).all() and np.isfinite(lse[others]).all()
        assert np.isnan(gradients[0][~others]).all() and np.isnan(gradients[1][0, :, 0]).all()
        assert np.isfinite(gradients[0][others]).all() and np.isfinite(gradients[2][1]).all()

        broken = with_some(value, (0, 0, 1, 3), bad)
        (out, lse), _ = evaluate(name, query, key, broken, options)
        assert not np.isfinite(out[0, :, 2:, 3]).any() and np.isfinite(lse).all()

    broken = with_some(key, (0, 0, 1), np.nan)
    (out, lse), _ = evaluate(name, query, broken, value, options)
    assert np.isnan(out[0, :, 2:]).all() and np.isnan(lse[0, :, 2:]).all()
    assert np.isfinite(out[1]).all() and np.isfinite(lse[1]).all()
