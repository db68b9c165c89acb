"""The judge: attention states and their derivatives in dense NumPy, by hand-derived formulas and without JAX.

Everything is the definition written out over a `[B, N, T, S]` array of scores,

    s_a = scale q·k_a + bias_a + ζ·v_a  over the visible keys,   lse = log Σ_a e^{s_a},   P_a = e^{s_a − lse},
    out = Σ_a P_a v_a,

with no blocks, no online maximum and nothing shared with the kernels but the meaning of the arguments. `precision` is
the floating type of all arithmetic: float64, or `np.longdouble` to judge float64 kernels by something finer. The
gradients here are themselves checked against finite differences in `test_reference.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.support.masks import RULES

if TYPE_CHECKING:
    from tests.support.problems import Problem


class Rows(NamedTuple):
    """A problem written out: keys and values repeated to the query heads, and every row's distribution."""

    scale: np.floating
    query: np.ndarray  # [B, T, N, H]
    key: np.ndarray  # [B, S, N, H], repeated
    value: np.ndarray  # [B, S, N, V], repeated
    source: np.ndarray  # [B, T, N, V], zeros if the problem has none
    scores: np.ndarray  # [B, N, T, S], −inf where not visible
    weights: np.ndarray  # [B, N, T, S], P; all zeros in a fully masked row
    out: np.ndarray  # [B, T, N, V]
    lse: np.ndarray  # [B, T, N]


def visible(problem: Problem) -> np.ndarray:
    """Which query sees which key, `[B, N, T, S]`, by the definitions in `local_attention`."""
    B, T, N, _ = problem.query.shape
    S = problem.key.shape[1]
    query_positions = _positions(problem.query_positions, problem.query_seq_lengths, B, T)
    key_positions = _positions(problem.key_positions, problem.key_value_seq_lengths, B, S)
    q, k = query_positions[:, :, None], key_positions[:, None, :]
    seen = (q >= 0) & (k >= 0)
    if problem.is_causal:
        seen &= k <= q
    if problem.local_window_size is not None:
        window = problem.local_window_size
        left, right = (window, window) if isinstance(window, int) else window
        seen &= (q - left <= k) & (k <= q + right)
    if problem.query_segment_ids is not None:
        seen = seen & (problem.query_segment_ids[:, :, None] == problem.key_segment_ids[:, None, :])
    if problem.rule is not None:
        seen = seen & RULES[problem.rule].sees(np.arange(B)[:, None, None], q, k)
    seen = np.broadcast_to(seen[:, None], (B, N, T, S))
    return seen if problem.mask is None else seen & problem.mask


def blind_rows_and_hidden_keys(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Which rows see no key, `[B, T, N]`, and which keys no row sees, `[B, S, K]`."""
    seen = visible(problem)  # [B, N, T, S]
    if problem.bias is not None:
        seen = seen & (problem.bias > -np.inf)
    batch, keys, kv_heads, _ = problem.key.shape
    group = problem.query.shape[2] // kv_heads
    looked_at = seen.any(axis=2).reshape(batch, kv_heads, group, keys).any(axis=2)
    return ~seen.any(axis=-1).transpose(0, 2, 1), ~looked_at.transpose(0, 2, 1)


def _positions(positions, lengths, batch, size):
    indices = np.broadcast_to(np.arange(size), (batch, size))
    # 64 bits: a window added to the last positions overflows 32
    positions = indices if positions is None else np.asarray(positions, np.int64)
    positions = np.broadcast_to(positions, (batch, size))
    return (
        positions
        if lengths is None
        else np.where(indices < np.asarray(lengths)[:, None], positions, -1)
    )


def rows(problem: Problem, precision=np.float64) -> Rows:
    """The problem's scores, weights and state, in `precision`."""
    query, key, value = (
        np.asarray(x, precision) for x in (problem.query, problem.key, problem.value)
    )
    N, H = query.shape[2:]
    # Query head n reads key/value head n // (N / K), as in jax.nn.dot_product_attention.
    group = N // key.shape[2]
    key, value = np.repeat(key, group, axis=2), np.repeat(value, group, axis=2)
    scale = (
        precision(1) / np.sqrt(precision(H)) if problem.scale is None else precision(problem.scale)
    )
    scores = scale * np.einsum("btnh,bsnh->bnts", query, key)
    if problem.bias is not None:
        scores = scores + np.asarray(problem.bias, precision)
    source = np.zeros((*query.shape[:3], value.shape[-1]), precision)
    if problem.source is not None:
        source = np.asarray(problem.source, precision)
        scores = scores + np.einsum("btnv,bsnv->bnts", source, value)
    scores = np.where(visible(problem), scores, -np.inf)

    # The shift by the row's maximum is for range only: exp overflows beyond 709 in float64.
    shift = np.max(scores, axis=-1, initial=-np.inf, keepdims=True)
    shift = np.where(np.isneginf(shift), 0, shift)
    terms = np.exp(scores - shift)
    total = terms.sum(axis=-1, keepdims=True)
    some = total > 0
    weights = terms / np.where(some, total, 1)
    lse = np.where(some, shift + np.log(np.where(some, total, 1)), -np.inf)[..., 0]
    out = np.einsum("bnts,bsnv->btnv", weights, value)
    return Rows(scale, query, key, value, source, scores, weights, out, lse.transpose(0, 2, 1))


def dense(problem: Problem, precision=np.float64) -> tuple[np.ndarray, np.ndarray]:
    """The state `(out [B, T, N, V], lse [B, T, N])`; a fully masked row has `out = 0`, `lse = −∞`."""
    r = rows(problem, precision)
    return r.out, r.lse


def dense_vjp(problem: Problem, dout, dlse, precision=np.float64) -> dict[str, np.ndarray]:
    """Gradients of `L = <dout, out> + <dlse, lse>` in each differentiable array that the problem has.

    For one row,   ∂lse/∂s_a = P_a   and   ∂P_b/∂s_a = P_b (δ_ab − P_a),   so   ∂out/∂s_a = P_a (v_a − out):

        ds_a = P_a [dout·(v_a − out) + dlse].

    The scores are `s_a = scale q·k_a + bias_a + ζ·v_a`, and `v_a` enters `out` directly too:

        dq   = scale Σ_a ds_a k_a                  db_a = ds_a  (summed over the axes on which bias is broadcast)
        dk_a = scale Σ_rows ds_a q                 dζ   = Σ_a ds_a v_a
        dv_a = Σ_rows [P_a dout + ds_a ζ]

    where the sum over rows runs over the queries and over the query heads that share the key/value head. A fully
    masked row has P = 0 and so contributes nothing, whatever its cotangents.
    """
    return _pullback(rows(problem, precision), problem, dout, dlse, sign=-1)


def magnitudes(problem: Problem, dout, dlse) -> dict[str, float]:
    """How large the terms are whose sums `dense` and `dense_vjp` return: the scale of unavoidable rounding errors.

    The largest entry of each result with every product replaced by its absolute value, so that nothing cancels. One key
    alone, for instance, has `dq = 0` exactly, as the difference of two equal terms of size |dout·v| |k|.
    """
    r = rows(problem)
    absolute = r._replace(
        scale=abs(r.scale),
        **{name: abs(getattr(r, name)) for name in ("query", "key", "value", "source")},
        out=np.einsum("bnts,bsnv->btnv", r.weights, abs(r.value)),
    )
    scores = largest(r.scores)
    sizes = _pullback(absolute, problem, abs(dout), abs(dlse), sign=+1)
    sizes |= {"out": absolute.out, "lse": np.asarray(max(scores, largest(r.lse), 1.0))}
    return {name: largest(size) for name, size in sizes.items()} | {"scores": scores}


def _pullback(r: Rows, problem: Problem, dout, dlse, sign) -> dict[str, np.ndarray]:
    precision = r.out.dtype.type
    dout, dlse = np.asarray(dout, precision), np.asarray(dlse, precision)
    along = np.einsum("btnv,bsnv->bnts", dout, r.value)
    mean = np.einsum("btnv,btnv->bnt", dout, r.out)
    dscores = r.weights * (along + (sign * mean + dlse.transpose(0, 2, 1))[..., None])
    gradients = {
        "query": r.scale * np.einsum("bnts,bsnh->btnh", dscores, r.key),
        "key": _sum_groups(r.scale * np.einsum("bnts,btnh->bsnh", dscores, r.query), problem),
        "value": _sum_groups(
            np.einsum("bnts,btnv->bsnv", r.weights, dout)
            + np.einsum("bnts,btnv->bsnv", dscores, r.source),
            problem,
        ),
    }
    if problem.bias is not None:
        broadcast = tuple(axis for axis in range(4) if problem.bias.shape[axis] == 1)
        gradients["bias"] = dscores.sum(axis=broadcast, keepdims=True)
    if problem.source is not None:
        gradients["source"] = np.einsum("bnts,bsnv->btnv", dscores, r.value)
    return gradients


def _sum_groups(gradient, problem):
    """The transpose of repeating key/value heads to the query heads that read them."""
    B, S, K, _ = problem.key.shape
    return gradient.reshape(B, S, K, gradient.shape[2] // K, gradient.shape[-1]).sum(axis=3)


def dense_jvp(
    problem: Problem, tangents: dict, precision=np.float64
) -> tuple[np.ndarray, np.ndarray]:
    """The derivative of `(out, lse)` along `tangents` (a missing name is zero).

    `dlse = Σ_a P_a ds_a` and `dout = Σ_a P_a dv_a + Σ_a P_a (ds_a − dlse) v_a`. A fully masked row has zeros.
    """
    r = rows(problem, precision)
    group = problem.query.shape[2] // problem.key.shape[2]
    zeros = {name: np.zeros_like(getattr(r, name)) for name in ("query", "key", "value", "source")}
    dq, dk, dv, dsource = (
        np.asarray(tangents.get(name, zero), precision) for name, zero in zeros.items()
    )
    dk, dv = (np.repeat(d, group, axis=2) if d.shape[2] != r.key.shape[2] else d for d in (dk, dv))
    dscores = r.scale * (
        np.einsum("btnh,bsnh->bnts", dq, r.key) + np.einsum("btnh,bsnh->bnts", r.query, dk)
    )
    dscores = (
        dscores
        + np.einsum("btnv,bsnv->bnts", dsource, r.value)
        + np.einsum("btnv,bsnv->bnts", r.source, dv)
    )
    if "bias" in tangents:
        dscores = dscores + np.asarray(tangents["bias"], precision)
    dlse = np.einsum("bnts,bnts->bnt", r.weights, dscores)
    dweights = r.weights * (dscores - dlse[..., None])
    dout = np.einsum("bnts,bsnv->btnv", r.weights, dv) + np.einsum(
        "bnts,bsnv->btnv", dweights, r.value
    )
    return dout, dlse.transpose(0, 2, 1)


def dense_hvp(
    problem: Problem, dout, dlse, tangents: dict, *, step=2.0**-7
) -> dict[str, np.ndarray]:
    """The Hessian of `L = <dout, out> + <dlse, lse>` times `tangents`, by differences of the exact gradient.

    Central differences have errors in even powers of the step, so two Richardson extrapolations leave O(step⁶): about
    1e-11 relative to sixth derivatives of order one, and in `np.longdouble` nothing is lost to rounding.
    """

    def difference(h):
        ahead, behind = (
            dense_vjp(
                shifted(problem, tangents, sign * np.longdouble(h)), dout, dlse, np.longdouble
            )
            for sign in (1, -1)
        )
        return {name: (ahead[name] - behind[name]) / (2 * np.longdouble(h)) for name in ahead}

    coarse, middle, fine = (difference(h) for h in (step, step / 2, step / 4))
    product = {}
    for name in coarse:
        fourth = [(4 * b[name] - a[name]) / 3 for a, b in ((coarse, middle), (middle, fine))]
        product[name] = ((16 * fourth[1] - fourth[0]) / 15).astype(np.float64)
    return product


def dense_covariance(problem: Problem) -> np.ndarray:
    """`∇²_ζ F = Cov_P(v) = Σ_a P_a (v_a − out)(v_a − out)ᵀ`, `[B, T, N, V, V]`; zero in a fully masked row."""
    r = rows(problem)
    centred = r.value[:, None] - r.out[:, :, None]  # [B, T, S, N, V]
    return np.einsum("bnts,btsnv,btsnw->btnvw", r.weights, centred, centred)


def shifted(problem: Problem, tangents: dict, step) -> Problem:
    """The problem with each array moved by `step` along its tangent."""
    moved = {
        name: getattr(problem, name) + step * np.asarray(tangent)
        for name, tangent in tangents.items()
    }
    return replace(problem, **moved)


def largest(array) -> float:
    """The largest finite absolute value, 0 of an empty array."""
    array = np.abs(np.asarray(array, np.float64))
    return float(np.max(array, initial=0.0, where=np.isfinite(array)))
