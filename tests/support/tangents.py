"""How the tangents of kernels, the state's derivative in a direction, are judged."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from energy_attn.kernels import AttentionState, KernelCall
from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.call._kernel import as_read
from energy_attn.kernels.call._operands import cotangents as directions_of
from tests.support.arrays import array
from tests.support.naive import assert_close, has_judge, longer, naive
from tests.support.problems import cast, lse_dtype, tangents
from tests.support.reference import dense, dense_jvp, largest, rows, visible
from tests.support.traits import blind_rows_and_hidden_keys

ALL = ("query", "key", "value")


def pushed(kernel, problem, dtype, moving, platform):
    """The kernel's derivative, and the problem and the directions in float64; it sees NaN where these are absent."""
    arrays, rounded = cast(problem, dtype)
    directions = {n: array(x, dtype) for n, x in tangents(problem).items() if n in moving}
    exact = {n: np.asarray(x, np.float64) for n, x in directions.items()}
    out, lse = dense(rounded)
    state = AttentionState(array(out, dtype), array(lse, lse_dtype(dtype)))

    @jax.jit
    def run(arrays, state, directions):
        call = check_call(**arrays, **problem.options)
        moved = directions_of(*(directions.get(name) for name in ALL))
        return kernel.tangent(
            as_read(kernel, KernelCall(call.operands, call.settings, platform)), state, moved
        )

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


def magnitudes(problem, directions):
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
    *sizes, scores = magnitudes(rounded, directions)
    for i, name in enumerate(AttentionState._fields):
        assert_close(
            found[i],
            exact[i],
            rough[i],
            magnitude=sizes[i],
            scores=scores,
            what=f"{label}, {problem}, {jnp.dtype(dtype).name}, {name} along {moving}",
        )
