"""`attention` in place of `jax.nn.dot_product_attention`: every argument means the same, results are as exact.

Both are compared with the float64 judge: `attention` may err by a small multiple of what `jax.nn` errs, and `jax.nn`
must agree with the judge, so that the arguments are known to mean the same to all three. Run as users run JAX: float32
on, float64 off, NumPy's promotion (`jax.nn` accepts no other).
"""

import functools
import inspect
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.functional import _free_energy
from tests.support.compare import close
from tests.support.naive import assert_close
from tests.support.problems import PROBLEMS, Problem, cast
from tests.support.reference import dense, dense_vjp, magnitudes, rows
from tests.support.selection import few, few_rows

pytestmark = pytest.mark.usefixtures("user_settings")

BASE = PROBLEMS["grouped"]  # B=2, T=5, S=7, N=6, K=2, H=4
DTYPES = ("float32", "bfloat16")


def normal(*shape):
    return np.random.default_rng(shape).standard_normal(shape)


def keep(*shape):
    """A mask in which every query sees the first key (jax.nn gives a fully masked row the mean of the values)."""
    mask = np.random.default_rng(shape).random(shape) < 0.6
    mask[..., 0] = True
    return mask


def ints(*values):
    return np.asarray(values, np.int32)


CASES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "scale_negative": {"scale": -1.7},
    "causal": {"is_causal": True},
    "window": {"local_window_size": 3},
    "window_pair": {"local_window_size": (4, 1)},
    "window_causal": {"local_window_size": (2, 2), "is_causal": True},
    "keys_ragged": {"key_value_seq_lengths": ints(7, 3)},
    "queries_ragged": {"query_seq_lengths": ints(2, 5)},
    "ragged": dict(query_seq_lengths=ints(4, 1), key_value_seq_lengths=ints(2, 6), is_causal=True),
    "bias": {"bias": normal(2, 6, 5, 7)},
    "bias_of_heads": {"bias": normal(1, 6, 1, 1)},
    "bias_of_keys": {"bias": normal(2, 1, 1, 7)},
    "bias_of_three_axes": {"bias": normal(6, 5, 7)},
    "bias_of_two_axes": {"bias": normal(5, 7)},
    "mask": {"mask": keep(2, 6, 5, 7)},
    "mask_of_keys": {"mask": keep(2, 1, 1, 7)},
    "mask_of_three_axes": {"mask": keep(1, 5, 7)},
    "mask_of_two_axes": {"mask": keep(5, 7)},
    "everything": {
        "bias": normal(1, 6, 5, 7),
        "mask": keep(2, 1, 5, 7),
        "scale": 0.6,
        "is_causal": True,
        "query_seq_lengths": ints(5, 3),
        "key_value_seq_lengths": ints(6, 4),
        "local_window_size": (5, 0),
    },
}


def problem_of(case: str) -> Problem:
    return replace(BASE, name=case, **CASES[case])


# An argument of each kind, of another meaning in each; the others are its other shapes and forms.
CHOSEN = (
    ("scale_negative", "float32"),
    ("window", "float32"),
    ("window_pair", "float32"),
    ("keys_ragged", "float32"),
    ("queries_ragged", "float32"),
    ("bias_of_three_axes", "float32"),
    ("mask_of_two_axes", "float32"),
    ("everything", "bfloat16"),
)
OTHERS = tuple(x for x in itertools.product(CASES, DTYPES) if x not in CHOSEN)


@functools.cache
def results(rows: tuple) -> dict:
    """`{(case, dtype): (ours, energy, jax.nn's)}`, by one program, since compilation dominates the time."""
    problems = {(case, dtype): problem_of(case) for case, dtype in rows}
    given = {
        row: (cast(p, jnp.dtype(row[1]))[0], arrays_of(p.options)) for row, p in problems.items()
    }

    def run(attend, row, arrays, traced):
        arguments = [arrays[name] for name in ("query", "key", "value")]
        options = {k: v for k, v in problems[row].options.items() if k not in traced} | traced
        return attend(*arguments, arrays.get("bias"), options.pop("mask", None), **options)

    @jax.jit
    def everything(given):
        ours = functools.partial(ea.attention, return_energy=True)
        return {
            row: (*run(ours, row, *x), run(jax.nn.dot_product_attention, row, *x))
            for row, x in given.items()
        }

    return jax.device_get(everything(given))


def arrays_of(options):
    return {name: x for name, x in options.items() if isinstance(x, jax.Array)}


@pytest.mark.parametrize(("case", "dtype"), few_rows((*CHOSEN, *OTHERS), len(CHOSEN)))
def test_like_jax_nn(case, dtype):
    """An argument that means something else than in jax.nn, or a result that is less exact than its."""
    problem = problem_of(case)
    _, rounded = cast(problem, jnp.dtype(dtype))
    rows_ = CHOSEN if (case, dtype) in CHOSEN else OTHERS
    ours, energy, theirs = results(rows_)[case, dtype]
    out, lse = dense(rounded)
    allowed = 1e-5 if dtype == "float32" else 0.04
    np.testing.assert_allclose(theirs.astype(np.float64), out, atol=allowed)
    full = rounded
    if problem.bias is not None:  # the judge's gradients want four axes
        axes = (1,) * (4 - problem.bias.ndim) + problem.bias.shape
        full = replace(rounded, bias=rounded.bias.reshape(axes))
    sizes = magnitudes(full, np.ones_like(out), np.ones_like(lse))
    assert_close(ours, out, theirs, magnitude=sizes["out"], scores=sizes["scores"], what=case)
    assert energy.dtype == np.float32
    np.testing.assert_allclose(energy, lse, rtol=1e-5, atol=1e-5)


def test_unbatched():
    """`[T, N, H]` taken for a batch of T, or lengths of one element refused where jax.nn takes them."""
    given = {}
    for case in ("causal", "bias_of_three_axes", "mask_of_two_axes", "keys_ragged"):
        problem = problem_of(case)
        options = dict(problem.options)
        arrays, _ = cast(problem, jnp.float32)
        query, key, value = (arrays[name][0] for name in ("query", "key", "value"))
        arguments = query, key, value, arrays.get("bias"), options.pop("mask", None)
        if "key_value_seq_lengths" in options:
            options["key_value_seq_lengths"] = options["key_value_seq_lengths"][1:]
        given[case] = arguments, options

    @jax.jit
    def run():
        attends = ea.attention, jax.nn.dot_product_attention
        return {case: [f(*x, **options) for f in attends] for case, (x, options) in given.items()}

    for case, (ours, theirs) in run().items():
        assert ours.shape == BASE.query.shape[1:]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=case)


@pytest.mark.parametrize("dtype", few(["float16", "bfloat16", "float32"], "bfloat16"))
def test_return_energy(dtype):
    """The energy in a narrow dtype, of a wrong shape, or not the one that normalises `out`."""
    problem = PROBLEMS["decode_ragged"]  # the second row of the batch sees no key
    arrays, rounded = cast(problem, jnp.dtype(dtype))

    @jax.jit
    def run(arrays):
        both = ea.attention(**arrays, **problem.options, return_energy=True)
        return *both, ea.attention(**arrays, **problem.options)

    out, energy, alone = run(arrays)
    assert out.dtype == dtype and energy.dtype == jnp.float32
    assert out.shape == (*problem.query.shape[:-1], problem.value.shape[-1])
    np.testing.assert_array_equal(out, alone)
    np.testing.assert_allclose(energy, rows(rounded).lse, rtol=1e-5)
    assert np.isneginf(energy[1]).all() and not np.asarray(out[1]).any()


def test_row_that_sees_nothing():
    """The documented difference to jax.nn, which gives such a row the mean of the values: here it is zero."""
    query, key, value = (x.astype(np.float32) for x in BASE.arrays.values())
    mask = np.ones((1, 1, 5, 7), bool)
    mask[:, :, 2] = False

    @jax.jit
    def run(*arrays):
        attends = ea.attention, jax.nn.dot_product_attention
        return [f(*arrays, mask=jnp.asarray(mask)) for f in attends]

    ours, theirs = map(np.asarray, run(query, key, value))
    assert not ours[:, 2].any()
    mean = np.repeat(value.mean(1), 3, axis=1)
    np.testing.assert_allclose(theirs[:, 2], mean, rtol=0, atol=1e-6)
    others = np.asarray([0, 1, 3, 4])
    np.testing.assert_allclose(ours[:, others], theirs[:, others], rtol=0, atol=1e-5)


def residuals_of_jax_nn() -> bool:
    """Whether this JAX has `return_residual`; 0.8 does not."""
    return "return_residual" in inspect.signature(jax.nn.dot_product_attention).parameters


@pytest.mark.parametrize("dtype", few(["bfloat16", "float32"], "bfloat16"))
def test_residual_like_jax_nn(dtype):
    """A residual of another shape or dtype than jax.nn's, or with its gradient, which is silently zero."""
    problem = problem_of("everything")
    arrays, rounded = cast(problem, jnp.dtype(dtype))
    options = dict(problem.options)
    arguments = arrays["key"], arrays["value"], arrays["bias"], options.pop("mask")

    def residual(query, attend):
        out, residual = attend(query, *arguments, **options, return_residual=True)
        return residual.sum(where=jnp.abs(residual) < 1e4), (out, residual)

    @functools.partial(jax.jit, static_argnums=0)
    def both(attend):
        return jax.grad(residual, has_aux=True)(arrays["query"], attend)

    slope, (out, found) = both(ea.attention)
    _, lse = dense(rounded)
    assert found.shape == problem.query.shape[:-1] and found.dtype == out.dtype == dtype
    narrow = dtype != "float32"
    np.testing.assert_allclose(found.astype(np.float32), lse, rtol=4e-3 if narrow else 1e-5)
    exact = dense_vjp(rounded, np.zeros(out.shape), np.isfinite(lse).astype(float))["query"]
    np.testing.assert_allclose(slope.astype(np.float32), exact, atol=0.03 if narrow else 1e-5)
    assert abs(exact).max() > 0.1
    if residuals_of_jax_nn():
        slope, theirs = both(jax.nn.dot_product_attention)
        assert [(x.shape, x.dtype) for x in theirs] == [(x.shape, x.dtype) for x in (out, found)]
        seen = np.isfinite(lse)
        pair = (x.astype(np.float32)[seen] for x in (found, theirs[1]))
        np.testing.assert_allclose(*pair, atol=0.02)
        assert not np.asarray(slope).any()  # what the documentation says of it


# Calls of jax.nn, positional arguments included, in the dtypes and the forms in which programs make them.
TOKENS, HEADS = 8, 4
CALLS = {
    "vmap": {"groups": 2, "vmap": True},
    "one key head": {"groups": 4, "implementation": "xla", "dtype": "float32"},
    "bias": {"bias": (1, HEADS, TOKENS, TOKENS)},
    "bias, vmap": {"bias": (2, HEADS, TOKENS, TOKENS), "vmap": True, "mask": (1, 1, TOKENS)},
    "wide bias": {"bias": (2, 1, 1, TOKENS), "wide": True},
    "bias, causal": {"bias": (1, HEADS, TOKENS, TOKENS), "is_causal": True},
    "padding": {"lengths": True},
    "padding, causal": {"lengths": True, "is_causal": True, "implementation": "xla"},
    "mask": {"mask": (1, 1, TOKENS, TOKENS), "groups": 2},
    "mask, padding": {"mask": (1, 1, TOKENS, TOKENS), "lengths": True},
    "window": {"is_causal": True, "local_window_size": (3, 2)},
    "left": {"local_window_size": (3, 0), "implementation": "xla"},
}


def called(attend, arrays, cotangent, implementation=None, vmap=False, **options):
    """`out` and what comes back through it, lengths and masks among the arguments that are differentiated."""

    def run(query, key, value, bias, mask, rows, keys):
        lengths = {"query_seq_lengths": rows, "key_value_seq_lengths": keys}
        given = {**lengths, **options, "implementation": implementation}
        return attend(query, key, value, bias, mask, **given)

    if vmap:
        of_bias = None if arrays[3] is None else 0
        run = jax.vmap(run, in_axes=(0, 0, 0, of_bias, None, None, None))
    out, back = jax.vjp(run, *arrays)
    return out, [x for x in back(cotangent) if x is not None and x.dtype != jax.dtypes.float0]


@pytest.mark.full
def test_called_as_jax_nn():
    """A call that jax.nn takes and we refuse, or one that we take for another."""
    rng = np.random.default_rng(7)
    given, forms = {}, {}
    for name, form in CALLS.items():
        form = dict(form)
        dtype, groups = jnp.dtype(form.pop("dtype", "bfloat16")), form.pop("groups", 1)
        sizes = {k: form.pop(k, None) for k in ("bias", "mask")}
        wide = jnp.float32 if form.pop("wide", False) else dtype
        shape = (2, TOKENS, HEADS // groups, 8)
        shapes = (2, TOKENS, HEADS, 8), shape, shape
        arrays = [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]
        bias, mask = (s and rng.standard_normal(s) for s in sizes.values())
        arrays.append(None if bias is None else jnp.asarray(bias, wide))
        arrays.append(None if mask is None else jnp.asarray(mask > -1).at[..., 0].set(True))
        ragged = form.pop("lengths", False)
        arrays += [ints(4, 2), ints(3, 6)] if ragged else [None, None]
        cotangent = jnp.asarray(rng.standard_normal((2, TOKENS, HEADS, 8)), dtype)
        given[name], forms[name] = (arrays, cotangent), form

    @jax.jit
    def everything(given):
        return {
            name: [
                called(f, *given[name], **form)
                for f in (ea.attention, jax.nn.dot_product_attention)
            ]
            for name, form in forms.items()
        }

    for name, (ours, theirs) in everything(given).items():
        for mine, wanted in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            assert (mine.shape, mine.dtype) == (wanted.shape, wanted.dtype), name
            near = (x.astype(np.float32) for x in (mine, wanted))
            np.testing.assert_allclose(*near, atol=0.05, rtol=0.02, err_msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"key": normal(2, 7, 2, 4)},
        {"value": normal(2, 6, 2, 5)},
        {"query": normal(2, 5, 3, 5)},
        {"query": normal(1, 2, 5, 6, 5)},
        {"mask": normal(2, 6, 5, 7)},
        {"mask": keep(1, 2, 6, 5, 7)},
        {"bias": normal(1, 2, 6, 5, 7)},
        {"key_value_seq_lengths": ints(7)},
        {"query_seq_lengths": normal(2)},
        {"implementation": "mine"},
    ],
    ids=lambda changes: f"{next(iter(changes))}-{np.ndim(next(iter(changes.values())))}",
)
def test_refused_as_jax_nn(changes, unchecked):
    """Calls that jax.nn refuses and `attention` would accept."""
    arrays = {name: getattr(BASE, name) for name in ("query", "key", "value")}
    given = {
        name: x if isinstance(x, str) or x.dtype != np.float64 else x.astype(np.float32)
        for name, x in {**arrays, **changes}.items()
    }
    for attend in (jax.nn.dot_product_attention, ea.attention):
        with pytest.raises((ValueError, TypeError)):
            attend(**given)


def test_arguments_are_checked_once(monkeypatch):
    """Checks again for each state, source, sink and derivative of a call, as eager calls and traces would pay for."""
    checked = []

    def counting(*args, **options):
        checked.append(options)
        return check_scored(*args, **options)

    check_scored = _free_energy.arguments.check_scored
    monkeypatch.setattr(_free_energy.arguments, "check_scored", counting)
    arrays, _ = cast(BASE, jnp.float32)
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    source = jnp.ones((*query.shape[:-1], value.shape[-1]))

    def total(query, source, scale, sink):
        options = {"scale": scale, "sink": sink, "key_value_seq_lengths": ints(7, 3)}
        return ea.free_energy(query, key, value, source=source, **options).sum()

    sink = jnp.zeros(query.shape[-2])
    jax.grad(total, (0, 1, 2, 3))(query, source, jnp.float32(0.3), sink)
    assert len(checked) == 1
    ea.attention(query, key, value, sink=sink, is_causal=True)
    assert len(checked) == 2
    ea.FreeEnergy().at(query, key, value).tilt(source).entropy()
    assert len(checked) == 4  # when it is made, and for what it is asked


@pytest.mark.parametrize(
    "option",
    [
        lambda x: {"scale": x},
        lambda x: {"score": ea.scores.SoftCap(x)},
        lambda x: {"local_window_size": (jnp.int32(10 * x), 0)},
    ],
    ids=["scale", "score", "window"],
)
def test_a_sweep_over_numbers(option):
    """A program for each number of a sweep under one `jit`, or a number that the first program keeps."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 9, 2, 4)), jnp.float32)
    swept = jax.jit(lambda number: ea.attention(x, x, x, **option(number)))
    outs = [swept(number) for number in (0.2, 0.5)]
    for number, out in zip((0.2, 0.5), outs, strict=True):
        close(out, ea.attention(x, x, x, **option(number)), tolerance=1e-6)
    assert swept._cache_size() == 1 and not jnp.allclose(*outs)
