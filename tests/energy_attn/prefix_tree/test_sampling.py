"""The sampling distribution of tokens: temperature, top-k and top-p against a sort in NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.prefix_tree._accept import check_sampling, process_logits, sample_tokens
from tests.support.compare import close
from tests.support.complaints import complains
from tests.support.observables import distribution


def rows_of_logits():
    """Ordinary rows; ties of many tokens; rows with impossible tokens, and one with a single possible one."""
    rng = np.random.default_rng(0)
    logits = np.concatenate([rng.standard_normal((6, 11)) * 2, rng.integers(0, 3, (6, 11))])
    logits[2, ::2] = logits[9, ::3] = logits[11, 1:] = -np.inf
    logits[3] += 1e4
    return logits


def softmax(logits):
    terms = np.exp(np.asarray(logits, np.float64))
    return terms / terms.sum(-1, keepdims=True)


@partial(jax.jit, static_argnums=2)
def processed(logits, temperature, top_k, top_p):
    return process_logits(logits, temperature, top_k, top_p)


@pytest.mark.product
@pytest.mark.parametrize("top_k", [None, 1, 4, 50])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_distribution(top_k, dtype):
    """One token too many or too few, ties kept in whole, cuts made in another order or of another distribution."""
    logits = jnp.asarray(rows_of_logits().astype(jnp.dtype(dtype)))
    exact = np.asarray(logits, np.float64)
    for temperature in (0.5, 1.0, 3.0):
        for top_p in (None, 0.05, 0.33, 0.61, 0.97):
            found = processed(logits, temperature, top_k, top_p)
            assert found.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
            want = np.stack([distribution(row, temperature, top_k, top_p) for row in exact])
            np.testing.assert_array_equal(np.isfinite(found), want > 0)
            tolerance = 1e-14 if dtype == "float64" else 1e-6
            close(softmax(found), want, tolerance=tolerance)


def test_min_p():
    """A threshold on logits before the temperature, on what is left, or that excludes ties or the likeliest token."""
    rows = rows_of_logits()
    for way in ((None, None), (4, None), (None, 0.9)):
        for min_p in (0.05, 0.4, 1.0, jnp.float32(0.2)):
            found = process_logits(jnp.asarray(rows), 2.0, *way, min_p)
            want = np.stack([distribution(row, 2.0, *way) for row in rows])
            want = np.where(want < float(min_p) * want.max(-1, keepdims=True), 0, want)
            np.testing.assert_array_equal(np.isfinite(found), want > 0)
            close(softmax(found), want / want.sum(-1, keepdims=True), tolerance=1e-14)


def test_exactly_so_many():
    """Equal logits: a threshold keeps all of them or none; the lower tokens must stay."""
    even = np.zeros((1, 8), np.float32)
    signed = np.asarray([[-0.0, 0.0, -0.0, 0.0, -1, -1, -1, -1]], np.float32)
    for logits in (even, signed, np.float32(-1e-30) * even):
        for k in (1, 3, 4):
            kept = np.isfinite(processed(logits, 1.0, k, None)).tolist()
            assert kept == [[n < k for n in range(8)]]
    kept = np.isfinite(processed(even, 1.0, None, 0.3)).tolist()  # two have 0.25, three 0.375
    assert kept == [[n < 3 for n in range(8)]]
    assert np.isfinite(processed(even, 1.0, 4, 0.5)).sum() == 2  # of the four that are left


def test_all_of_it():
    """A sum in float32 that reaches 1 before its end, and so excludes a possible token."""
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((1, 20000)) * 5, jnp.float32)
    assert np.isfinite(processed(logits, 1.0, None, jnp.float32(1))).all()
    assert np.isfinite(processed(logits, 1.0, 900, 1.0)).sum() == 900
    assert check_sampling(1, None, 1) == check_sampling(1, None, 1.0) == (1.0, None, None)


def test_extremes():
    """Infinity over infinity, and rows with nothing left: NaN that is drawn as some token."""
    logits = np.asarray([[3.0, 5.0, 5.0, -1e30], [1e38, -1e38, 0, 0]], np.float32)
    for temperature in (1e-45, 1e-40, 1e-30, jnp.float32(1e-38)):
        found = np.asarray(processed(logits, temperature, None, 0.9))
        assert not np.isnan(found).any()
        close(softmax(found), np.asarray([[0, 0.5, 0.5, 0], [1, 0, 0, 0]]), tolerance=1e-7)
    hot = processed(logits[:1], 1e38, None, None)
    close(softmax(hot), np.full((1, 4), 0.25), tolerance=1e-6)
    # what is no number is never drawn around: it is the largest, as for argmax
    rows = np.asarray([*[[-np.inf] * 3] * 2, [0.0, 9.0, np.nan]])

    @jax.jit
    def all_ways(rows):
        ways = (None, None), (2, None), (None, 0.5)
        first, key = rows[:2], jax.random.key(0)
        return [(processed(first, 1, *x), sample_tokens(key, rows, 1.0, *x)) for x in ways]

    for found, tokens in all_ways(rows):
        assert np.isneginf(found).all() and tokens.tolist() == [0, 0, 2]


@pytest.mark.usefixtures("unchecked", "user_settings")
def test_bad_input():
    """Settings that give NaN, an empty row, or an error of XLA's; and that arrays pass where numbers do."""
    vector = jnp.ones(2)
    for name in ("temperature", "top_p"):
        wrong = [
            (0.0, ValueError, "0.0", "above 0"),
            (-1, ValueError, "-1", "above 0"),
            (jnp.float32(-1), ValueError, "-1.0", "above 0"),
            (float("nan"), ValueError, "nan", "finite"),
            (float("inf"), ValueError, "inf", "finite"),
            (vector, ValueError, "float32[2]", "scalar"),
            (jnp.int32(1), TypeError, "int32[]", "float32"),
            ("hot", TypeError, "str 'hot'", "real number"),
            (True, TypeError, "bool True", "real number"),
        ]
        if name == "top_p":
            wrong.append((1.01, ValueError, "1.01", "at most 1"))
        else:
            wrong.append((None, TypeError, "None", "real number"))
        for value, error, got, wanted in wrong:
            settings = {"temperature": 1.0, "top_k": None, "top_p": None, name: value}
            complains(partial(check_sampling, **settings), error, name, got, wanted)
    complains(partial(check_sampling, 1.0, 0, None), ValueError, "top_k", "0", "at least 1")
    complains(partial(check_sampling, 1.0, 2.0, None), TypeError, "top_k", "float 2.0", "integer")
    complains(partial(check_sampling, 1.0, True, None), TypeError, "top_k", "bool", "integer")
    assert check_sampling(np.float32(0.5), np.int64(3), 1) == (0.5, 3, None)
    passed = jax.jit(lambda t: check_sampling(t, None, t)[0])(jnp.float32(-1))
    assert passed == -1  # what is traced cannot be judged
