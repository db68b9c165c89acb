"""Attention as one would write it in JAX without thinking of memory: the yardstick of what precision is to be had.

The kernels are compared with the float64 judge of `reference.py`, and may err by a small multiple of what this errs on
the same inputs in the same dtype.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from energy_attn.kernels import AttentionState
from energy_attn.kernels.call._kernel import as_read
from energy_attn.kernels.internal import cotangents as directions_of
from tests.support.arrays import array
from tests.support.problems import Problem, call_of, cast, cotangents, lse_dtype, tangents
from tests.support.reference import (
    blind_rows_and_hidden_keys,
    dense,
    dense_jvp,
    dense_vjp,
    largest,
    magnitudes,
    rows,
    visible,
)


def naive(arrays, mask, *, scale):
    """`(out, lse)` in the arrays' dtype, with jax.nn's choices: scores and softmax in float32 or wider, P rounded."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    accumulate = lse_dtype(query.dtype)
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2)
    dot = functools.partial(jnp.einsum, preferred_element_type=accumulate)
    scores = dot("btnh,bsnh->bnts", query, key) * jnp.asarray(scale, accumulate)
    if "bias" in arrays:
        scores = scores + jnp.broadcast_to(arrays["bias"], scores.shape).astype(accumulate)
    if "source" in arrays:
        scores = scores + dot("btnv,bsnv->bnts", arrays["source"], value)
    # Minus infinity would put NaN into the gradients of fully masked rows, so those rows are cut out and put back.
    mask = mask & jnp.logical_not(jnp.isneginf(scores))
    seen = mask.any(axis=-1)
    shift = jax.lax.stop_gradient(
        jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1, initial=-jnp.inf)
    )
    shift = jnp.where(seen, shift, 0)
    terms = jnp.where(mask, jnp.exp(jnp.where(mask, scores - shift[..., None], 0)), 0)
    total = jnp.where(seen, terms.sum(axis=-1), 1)
    weights = (terms / total[..., None]).astype(value.dtype)
    out = jnp.einsum("bnts,bsnv->btnv", weights, value)
    return out, jnp.where(seen, shift + jnp.log(total), -jnp.inf).transpose(0, 2, 1)


@functools.partial(jax.jit, static_argnames="scale")
def _state_and_gradients(arrays, mask, dout, dlse, *, scale):
    (out, lse), back = jax.vjp(functools.partial(naive, mask=mask, scale=scale), arrays)
    return {"out": out, "lse": lse} | back((dout, dlse))[0]


@functools.cache
def expected(problem: Problem, dtype, which: str):
    """`(exact, naive, magnitude)` of out, lse and all gradients, each a dictionary by name.

    `which` cotangents are not zero: those of "out", of "lse" or of "both". Where NumPy has longer floats than the
    dtype, and that dtype, the naive way is the judge's own in it, which needs no compiling.
    """
    arrays, rounded = cast(problem, dtype)
    given = select(which, *cotangents(problem, dtype))
    dout, dlse = (np.asarray(x, np.float64) for x in given)
    exact = dense_state_and_gradients(rounded, dout, dlse, longer(dtype))
    if has_judge(dtype):
        rough = dense_state_and_gradients(rounded, dout, dlse, jnp.dtype(dtype).type)
    else:
        scale = _scale_of(problem)
        rough = _state_and_gradients(arrays, array(visible(problem)), *given, scale=scale)
    return exact, rough, magnitudes(rounded, dout, dlse)


@functools.cache
def expected_state(problem: Problem, dtype):
    """`expected` of out and lse alone."""
    arrays, rounded = cast(problem, dtype)
    exact = _state(*dense(rounded, longer(dtype)))
    if has_judge(dtype):
        rough = _state(*dense(rounded, jnp.dtype(dtype).type))
    else:
        run = jax.jit(functools.partial(naive, scale=_scale_of(problem)))
        rough = _state(*run(arrays, array(visible(problem))))
    nothing = np.zeros_like(exact["out"]), np.zeros_like(exact["lse"])
    return exact, rough, magnitudes(rounded, *nothing)


def _scale_of(problem: Problem) -> float:
    return problem.query.shape[-1] ** -0.5 if problem.scale is None else problem.scale


def _state(out, lse) -> dict:
    return {"out": out, "lse": lse}


def longer(dtype) -> type:
    """The floats of the judge beside results in a dtype: longer than these, where NumPy has any."""
    return np.longdouble if jnp.dtype(dtype) == np.float64 else np.float64


def has_judge(dtype) -> bool:
    """Whether the judge computes in a dtype, with errors that those in longer floats show."""
    dtype = jnp.dtype(dtype)
    wide = dtype in (np.dtype(np.float32), np.dtype(np.float64))
    return wide and np.finfo(longer(dtype)).eps < np.finfo(dtype).eps


def dense_state_and_gradients(problem: Problem, dout, dlse, precision) -> dict[str, np.ndarray]:
    return _state(*dense(problem, precision)) | dense_vjp(problem, dout, dlse, precision)


def select(which, dout, dlse):
    """The cotangents, those not asked for zeroed."""
    zero_out, zero_lse = (array(np.zeros(x.shape, x.dtype)) for x in (dout, dlse))
    return (zero_out if which == "lse" else dout), (zero_lse if which == "out" else dlse)


def assert_close(actual, exact, rough, *, magnitude, scores=1.0, what, multiple=4):
    """`actual` is as near to `exact` as the naive `rough` is, within `multiple`, and has rough's shape and dtype.

    The bound is `multiple · max|rough − exact|` plus a floor, since the naive way may be exact by
    luck: of `magnitude`, the size of the terms summed (see `reference.magnitudes`), a quarter unit
    of rounding; and what rounding scores as large as `scores` in float32 (float64) does to it, for
    a backward that recomputes scores meets them rounded otherwise than the forward did.
    """
    actual, rough = np.asarray(actual), np.asarray(rough)
    assert actual.shape == rough.shape, f"{what}: shape {actual.shape}, expected {rough.shape}"
    assert actual.dtype == rough.dtype, f"{what}: dtype {actual.dtype}, expected {rough.dtype}"
    eps = float(jnp.finfo(actual.dtype).eps)
    score_eps = float(jnp.finfo(lse_dtype(actual.dtype)).eps)
    infinite, size = np.isinf(exact), actual.size

    def error(array, whose):
        array = array.astype(np.longdouble)
        assert not np.isnan(array).any(), (
            f"{whose}: {np.isnan(array).sum()} of {size} entries are NaN"
        )
        wrong = np.where(infinite | np.isinf(array), array != exact, False)
        assert not wrong.any(), (
            f"{whose}: {wrong.sum()} of {size} entries are infinite and should not be, or not and should"
        )
        return np.abs(np.where(infinite, 0, array) - np.where(infinite, 0, exact))

    errors, rough_error = error(actual, what), largest(error(rough, f"{what}, naive way"))
    floor = magnitude * (eps / 4 + score_eps * scores)
    bound = multiple * rough_error + floor
    assert np.all(errors <= bound), (
        f"{what}: error {largest(errors):.3g} exceeds {bound:.3g} = {multiple} × the naive way's {rough_error:.3g} + a "
        f"floor of {floor:.3g} (terms of size {magnitude:.3g}, scores of {scores:.3g}); "
        f"{np.mean(errors > bound):.1%} of {size} entries exceed it"
    )


def assert_all_close(actual: dict, problem: Problem, dtype, which: str, *, label, multiple=4):
    """`assert_close` for every quantity in `actual`: out and lse, or these and all gradients."""
    only_state = set(actual) == {"out", "lse"}
    exact, rough, magnitude = (
        expected_state(problem, dtype) if only_state else expected(problem, dtype, which)
    )
    assert set(actual) == set(exact), (
        f"{label}, {problem}: got {sorted(actual)}, expected {sorted(exact)}"
    )
    for name, found in actual.items():
        assert_close(
            found,
            exact[name],
            rough[name],
            magnitude=magnitude[name],
            scores=0.0 if name == "lse" else magnitude["scores"],
            multiple=multiple,
            what=f"{label}, {problem}, {jnp.dtype(dtype).name}, {name} with cotangents of {which}",
        )


ARGUMENTS = ("query", "key", "value")


def pushed(kernel, problem, dtype, moving, platform):
    """The kernel's derivative, and the problem and the directions in float64; it sees NaN where these are absent."""
    arrays, rounded = cast(problem, dtype)
    directions = {n: array(x, dtype) for n, x in tangents(problem).items() if n in moving}
    exact = {n: np.asarray(x, np.float64) for n, x in directions.items()}
    out, lse = dense(rounded)
    state = AttentionState(array(out, dtype), array(lse, lse_dtype(dtype)))

    @jax.jit
    def run(arrays, state, directions):
        call = call_of(**arrays, **problem.options, platform=platform)
        moved = directions_of(*(directions.get(name) for name in ARGUMENTS))
        return kernel.tangent(as_read(kernel, call), state, moved)

    arrays, directions = (with_holes(x, problem) for x in (arrays, directions))
    return run(arrays, state, directions), rounded, exact


def with_holes(arrays, problem):
    """The arrays with NaN in absent rows, and in slots that no query's position sees."""
    unmarked = replace(problem, query_segment_ids=None, key_segment_ids=None)
    blind, hidden = blind_rows_and_hidden_keys(unmarked)
    queries, slots = (~x.all(2, keepdims=True) for x in (blind, hidden))
    there = {"query": queries, "key": slots, "value": slots}
    return {
        n: array(np.where(there[n][..., None], np.asarray(x), np.asarray(np.nan, x.dtype)))
        for n, x in arrays.items()
    }


def naive_jvp(problem, dtype, directions):
    """The derivative of naive attention in the dtype, by the judge or by JAX; zero in fully masked rows."""
    if has_judge(dtype):
        return dense_jvp(problem, directions, jnp.dtype(dtype).type)
    arrays, mask = cast(problem, dtype)[0], array(visible(problem))
    scale = problem.query.shape[-1] ** -0.5 if problem.scale is None else problem.scale
    given = {n: array(directions.get(n, 0 * x), dtype) for n, x in problem.arrays.items()}
    run = functools.partial(naive, mask=mask, scale=scale)
    return jax.jit(lambda x, d: jax.jvp(run, (x,), (d,))[1])(arrays, given)


def tangent_magnitudes(problem, directions):
    """How large the terms are whose sums are the derivatives of out and of lse."""
    r = rows(problem)
    group = problem.query.shape[2] // problem.key.shape[2]
    d_query = abs(directions.get("query", 0 * problem.query))
    d_key, d_value = (
        np.repeat(abs(directions.get(n, 0 * getattr(problem, n))), group, axis=2)
        for n in ("key", "value")
    )
    d_scores = abs(r.scale) * (
        np.einsum("btnh,bsnh->bnts", d_query, abs(r.key))
        + np.einsum("btnh,bsnh->bnts", abs(r.query), d_key)
    )
    terms = r.weights * d_scores
    d_lse = terms.sum(-1).transpose(0, 2, 1)
    d_out = np.einsum("bnts,bsnv->btnv", terms, abs(r.value)) + d_lse[..., None] * abs(r.out)
    d_out += np.einsum("bnts,bsnv->btnv", r.weights, d_value)
    return largest(d_out), largest(d_lse), largest(r.scores)


def check_tangent(kernel, problem, moving, dtype, label, platform="cpu"):
    """Holds a kernel's derivative along random directions of `moving` to what JAX's of naive attention errs."""
    found, rounded, directions = pushed(kernel, problem, dtype, moving, platform)
    exact = dense_jvp(rounded, directions, longer(dtype))
    rough = naive_jvp(rounded, dtype, directions)
    *sizes, scores = tangent_magnitudes(rounded, directions)
    for i, name in enumerate(AttentionState._fields):
        assert_close(
            found[i],
            exact[i],
            rough[i],
            magnitude=sizes[i],
            scores=scores,
            what=f"{label}, {problem}, {jnp.dtype(dtype).name}, {name} along {moving}",
        )
