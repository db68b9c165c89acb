"""Attention as one would write it in JAX without thinking of memory: the yardstick of what precision is to be had.

The kernels are compared with the float64 judge of `reference.py`, and may err by a small multiple of what this errs on
the same inputs in the same dtype.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.problems import Problem, cast, cotangents, lse_dtype
from tests.support.reference import dense, dense_vjp, largest, magnitudes, visible


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

    `which` cotangents are not zero: those of "out", of "lse" or of "both". Where NumPy has longer
    floats than float64, the naive way in float64 is the judge's own, which needs no compiling.
    """
    arrays, rounded = cast(problem, dtype)
    given = select(which, *cotangents(problem, dtype))
    dout, dlse = (np.asarray(x, np.float64) for x in given)
    exact = dense_state_and_gradients(rounded, dout, dlse, np.longdouble)
    if dtype == jnp.float64 and np.finfo(np.longdouble).eps < np.finfo(np.float64).eps:
        rough = dense_state_and_gradients(rounded, dout, dlse, np.float64)
    else:
        scale = problem.query.shape[-1] ** -0.5 if problem.scale is None else problem.scale
        rough = _state_and_gradients(arrays, jnp.asarray(visible(problem)), *given, scale=scale)
    return exact, rough, magnitudes(rounded, dout, dlse)


def dense_state_and_gradients(problem: Problem, dout, dlse, precision) -> dict[str, np.ndarray]:
    out, lse = dense(problem, precision)
    return {"out": out, "lse": lse} | dense_vjp(problem, dout, dlse, precision)


def select(which, dout, dlse):
    """The cotangents, those not asked for zeroed."""
    return (0 * dout if which == "lse" else dout), (0 * dlse if which == "out" else dlse)


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
    exact, rough, magnitude = expected(problem, dtype, which)
    assert set(actual) in ({"out", "lse"}, set(exact)), (
        f"{label}, {problem}: got {sorted(actual)}, expected {sorted(exact)}"
    )
    for name, array in actual.items():
        assert_close(
            array,
            exact[name],
            rough[name],
            magnitude=magnitude[name],
            scores=0.0 if name == "lse" else magnitude["scores"],
            multiple=multiple,
            what=f"{label}, {problem}, {jnp.dtype(dtype).name}, {name} with cotangents of {which}",
        )
