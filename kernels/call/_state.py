"""The state of an attention over a set of keys, and the monoid that merges states."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._checks import (
    check_axis,
    check_floating,
    check_floating_dtype,
    check_integer,
    check_shape,
    received,
)


class AttentionState(NamedTuple):
    r"""The state of attention over a set of keys $A$: $(\nabla F_A, F_A)$.

    $$F_A = \log \sum_{a \in A} e^{s_a}, \qquad \nabla F_A = \sum_{a \in A} e^{s_a - F_A}\, v_a$$

    Attributes:
        out: the gradient of the free energy in the source, which is attention over these keys alone. Shape `[..., H]`,
            usually `[B, T, N, H]`; any floating dtype. Zero in fully masked rows.
        lse: the free energy itself, in nats (natural logarithm). The shape of `out` less its last
            axis; float32, or float64 where `out` is. Minus infinity in fully masked rows.

    States of disjoint key sets form a commutative monoid under [`merge`][energy_attn.kernels.merge] with identity
    [`empty_state`][energy_attn.kernels.empty_state].

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.kernels import AttentionState, merge
        >>> left = AttentionState(jnp.ones((2, 4)), jnp.zeros(2))
        >>> right = AttentionState(-jnp.ones((2, 4)), jnp.zeros(2))
        >>> merge(left, right).out.tolist()[0]
        [0.0, 0.0, 0.0, 0.0]
    """

    out: Float[Array, "*batch width"]
    lse: Float[Array, "*batch"]


class CovarianceState(NamedTuple):
    r"""The state of attention over a set of keys $A$ with the covariance of its values:
    $(\nabla^2 F_A, \nabla F_A, F_A)$.

    $$\nabla^2 F_A = \sum_{a \in A} P_a\, (v_a - \mathrm{out})(v_a - \mathrm{out})^T,
      \qquad P_a = e^{s_a - F_A}$$

    Attributes:
        covariance: of the values under the attention weights; `[..., H, H]`, in the dtype of `out`.
        out: their mean, which is attention; `[..., H]`, usually `[B, T, N, H]`.
        lse: the free energy, in nats; as in [`AttentionState`][energy_attn.kernels.AttentionState].

    In fully masked rows `lse` is minus infinity and the others are zero. A commutative monoid under
    [`merge`][energy_attn.kernels.merge], by the law of total covariance.

    Source: Tree Attention (arXiv 2408.04093), equation 11 of second order, for cumulants.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.kernels import CovarianceState, merge
        >>> left = CovarianceState(jnp.zeros((1, 1)), jnp.ones(1), jnp.zeros(()))
        >>> right = CovarianceState(jnp.zeros((1, 1)), -jnp.ones(1), jnp.zeros(()))
        >>> merge(left, right).covariance.tolist()  # two points, each of weight one half
        [[1.0]]
    """

    covariance: Float[Array, "*batch width width"]
    out: Float[Array, "*batch width"]
    lse: Float[Array, "*batch"]


# Either state, the same one throughout a signature.
State = TypeVar("State", AttentionState, CovarianceState)


def lse_dtype(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype of energies and of accumulation: float64 if any of `dtypes` is float64, else float32."""
    any_float64 = any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes)
    return jnp.dtype(jnp.float64 if any_float64 else jnp.float32)


def precision(dtype: jax.typing.DTypeLike) -> lax.Precision | None:
    """The precision of products of queries and keys of `dtype`: full for float32.

    By default GPUs and TPUs multiply 10 or 7 bits of the mantissa, an error that energies in nats
    would show. `jax.default_matmul_precision` takes precedence where it is set.
    """
    told = jax.config.jax_default_matmul_precision is not None  # pyright: ignore[reportAttributeAccessIssue]
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 and not told else None


def dot_rows(a: Array, b: Array) -> Array:
    """The sum of products along the last axis, in full precision.

    As a product: for `(a * b).sum(-1)` of 16 million numbers, XLA:CPU took 209 ms on JAX 0.10.2 and 4 on 0.12.0.
    """
    return jnp.einsum("...h,...h->...", a, b, precision=lax.Precision.HIGHEST)


def empty_state(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike = jnp.float32
) -> AttentionState:
    r"""The state of no keys, $(0, -\infty)$: the identity of `merge`.

    Args:
        shape: the shape of `out`, usually `(B, T, N, H)`. `lse` has the same less the last axis.
        dtype: the dtype of `out`. `lse` is float32, or float64 where `out` is.

    Raises:
        TypeError: if `dtype` is not floating or `shape` is not a tuple of integers.
        ValueError: if `shape` has no axis or a negative size.

    Source: the identity of the fold in Tree Attention (arXiv 2408.04093), Algorithm 3.

    Examples:
        >>> from energy_attn.kernels import empty_state
        >>> empty_state((1, 2, 3, 4)).lse.shape
        (1, 2, 3)
    """
    dtype = check_floating_dtype("dtype", dtype)
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"shape: wanted a tuple of integers, got {received(shape)}")
    shape = tuple(check_integer("shape", size, least=0) for size in shape)
    if len(shape) == 0:
        raise ValueError("shape: wanted at least the width axis, got ()")
    lse = jnp.full(shape[:-1], -jnp.inf, lse_dtype(dtype))
    return AttentionState(jnp.zeros(shape, dtype), lse)


# The fold of states, written once. `maximum` and `total` reduce over the parts: along an array axis
# here, along a mesh axis in `energy_attn.distributed`.
#
#     m = max_i F_i,   w_i = e^{F_i - m},   F = m + log Σ w_i,   out = Σ w_i out_i / Σ w_i
#
# F does not depend on m, so m is held constant, and JAX differentiates these lines to any order in either mode. They
# introduce no NaN: empty parts enter as (0, -inf), whose weight is e^{-inf} = 0 with derivative 0, and the divisor of
# an empty fold is replaced by 1. A NaN or an overflow in a part is in the weights or in the sum, whatever a maximum
# over devices makes of it, and so reaches the result.
def all_computed(out: Array, *rows: Array) -> tuple[Array, ...]:
    """Returns `out`, `[*axes, W]`, and arrays `[*axes]` unchanged; a traced program that uses one computes all.

    JAX and XLA remove unused results from a program. A program that uses one result of a loop and another one of an
    equal loop would then have two different loops, which XLA does not merge.
    """
    known = lax.optimization_barrier(jnp.asarray(True))
    total: Any = sum(x.astype(out.dtype) for x in rows)
    others = out[..., 0] + total
    return (
        jnp.where(known, out, total[..., None]),
        *(jnp.where(known, x, others.astype(x.dtype)) for x in rows),
    )


def holds_keys(lse: Array) -> Array:
    """Whether parts hold keys: `lse` is not minus infinity. A NaN holds keys."""
    return lse != -jnp.inf


def safe_shift(maximum: Array) -> Array:
    """The shift of scores in a softmax: their maximum, or 0 for a row without keys."""
    return jnp.where(holds_keys(maximum), maximum, 0.0)


def exp_from(scores: Array, shift: Array) -> Array:
    """`exp(scores - shift)` of scores that are rounded first, as their maximum is."""
    return jnp.exp(unfused(scores) - shift)


def unfused(scores: Array) -> Array:
    """Rounds each score before a shift is subtracted from it.

    Scores end in a product. XLA fuses a product with a difference that follows, and then does not round it: from 5e9 on
    it may differ from its own maximum by more than an exponential can take. XLA fuses nothing across a select; this one
    changes no value, NaNs and derivatives included.
    """
    # https://github.com/openxla/xla/issues/41579; NaN in a softmax: https://github.com/jax-ml/jax/issues/37234
    return jnp.where(scores == scores, scores, scores + scores)


def of_each(f: Callable[..., Array], *arrays: Array) -> Array:
    """Applies an elementwise `f`, with bits that do not depend on the shape.

    XLA:CPU computes exponentials and logarithms by another program in the remainder of a vector loop and where the last
    axis is short.
    """
    size, shape = arrays[0].size, arrays[0].shape
    rows = [jnp.pad(x.reshape(-1), (0, -size % 8)) for x in arrays]
    result = unfused(f(*lax.optimization_barrier(rows)))
    return lax.optimization_barrier(result)[:size].reshape(shape)


def divided(cotangent: AttentionState, factor: Array) -> AttentionState:
    """The cotangent times `factor`, the inverse of the sum of the weights."""
    out = cotangent.out.astype(factor.dtype) * factor[..., None]
    lse = None if cotangent.lse is None else cotangent.lse * factor
    return AttentionState(out.astype(cotangent.out.dtype), lse)  # pyright: ignore[reportArgumentType]


def fold(
    state: AttentionState,
    maximum: Callable[[Any], Any],
    total: Callable[[Any], Any],
    kept: Callable[[Any], Any] = lambda shift: shift,
) -> AttentionState:
    r"""Folds states: energies by logaddexp, outputs by their shares $e^{F_i - F}$.

    `total` takes the pair (numerator, denominator), so that a distributed one can send both
    together. If it returns only some of the rows, `kept` selects the same rows of the maxima.
    `out` keeps its dtype; the arithmetic is in the dtype of `lse`.
    """
    shift = safe_shift(maximum(lax.stop_gradient(state.lse)))
    numerator, denominator = total(_weighed(state, shift))
    return _divided(numerator, denominator, kept(shift), state.out.dtype)


def _weighed(state: AttentionState, shift: Array) -> tuple[Array, Array]:
    # The terms of parts in the two sums of a fold: w_i out_i and w_i, with w_i = e^{F_i - m}.
    # Each is rounded before the sum. A compiler that computes a state twice, to keep and to send, may fuse another one
    # of its products with the sum each time, and two devices would then go on with numbers that differ in the last bit.
    weight = jnp.exp(state.lse - shift)
    out = jnp.where(holds_keys(state.lse)[..., None], state.out.astype(weight.dtype), 0.0)
    return unfused(out * weight[..., None]), weight


def _divided(
    numerator: Array, denominator: Array, shift: Array, dtype: jnp.dtype
) -> AttentionState:
    # out = Σ w_i out_i / Σ w_i, F = m + log Σ w_i
    empty = denominator == 0
    denominator = jnp.where(empty, 1.0, denominator)
    lse = jnp.where(empty, -jnp.inf, shift + jnp.log(denominator))
    return AttentionState((numerator / denominator[..., None]).astype(dtype), lse)


def merge(a: State, b: State) -> State:
    r"""The state of the union of two disjoint key sets.

    $$F = \log(e^{F_a} + e^{F_b}), \qquad
      \mathrm{out} = \mathrm{out}_a e^{F_a - F} + \mathrm{out}_b e^{F_b - F}$$

    and for covariances as in [`merge_all`][energy_attn.kernels.merge_all]. A commutative monoid with identity
    $(0, -\infty)$; empty merged with empty is empty, forward and backward, without a NaN. A part whose `lse` is minus
    infinity holds no keys, whatever its `out`; any other value that is not finite makes the result NaN.

    Args:
        a: the state of the first key set, an `AttentionState` or a `CovarianceState`.
        b: the state of the second, of the same kind and of equal shapes and dtypes.

    Returns:
        The merged state, in the dtypes of the parts.

    Raises:
        TypeError: if `a` or `b` is not a state, or their kinds or dtypes differ.
        ValueError: if their shapes differ.

    Source: $F_{A \cup B} = \mathrm{logaddexp}(F_A, F_B)$ and its derivatives; Tree Attention
    (arXiv 2408.04093), the associative operation of section 5.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.kernels import AttentionState, empty_state, merge
        >>> some = AttentionState(jnp.ones((1, 2)), jnp.zeros(1))
        >>> merge(some, empty_state((1, 2))).out.tolist()
        [[1.0, 1.0]]
    """
    check_state("a", a)
    check_state("b", b)
    if type(a) is not type(b):
        raise TypeError(f"b: wanted the kind of state of a, {type(a).__name__}, got {received(b)}")
    for mine, theirs, field in zip(a, b, a._fields, strict=True):
        for fact, error in (("shape", ValueError), ("dtype", TypeError)):
            wanted = getattr(mine, fact)
            if wanted != getattr(theirs, fact):
                raise error(
                    f"b.{field}: wanted the {fact} of a's, {wanted}, got {received(theirs)}"
                )
    # The larger part first. XLA fuses one of the two products into the sum, where it is rounded less
    # than the other. In the order of the arguments, merge(a, b) and merge(b, a) would differ in the last bit, as
    # would two devices that exchange their states and each merge "mine, theirs". Parts of equal lse
    # have the weights 1 and 1, whose products are exact.
    larger = a.lse >= b.lse

    def either(x: Array, y: Array) -> Array:
        return jnp.where(larger.reshape(*larger.shape, *[1] * (x.ndim - larger.ndim)), x, y)

    # Not a stacked array: XLA fuses this into one loop over elements, which allocates only the result.
    first, second = jax.tree.map(either, a, b), jax.tree.map(either, b, a)
    shift = safe_shift(lax.stop_gradient(first.lse))
    parts = (_weighed(AttentionState(x.out, x.lse), shift) for x in (first, second))
    numerator, denominator = map(jnp.add, *parts)
    merged = _divided(numerator, denominator, shift, a.out.dtype)
    if isinstance(a, AttentionState):
        return merged
    # the law of total covariance, as in `merge_all`
    covariance = covariance_term(first, merged) + covariance_term(second, merged)
    return CovarianceState(covariance.astype(a.covariance.dtype), *merged)


def merge_all(stacked: State, axis: int = 0) -> State:
    r"""The state of the union of many disjoint key sets, in one pass.

    $$F = \log \sum_i e^{F_i}, \qquad \mathrm{out} = \sum_i \mathrm{out}_i\, e^{F_i - F}$$

    and for covariances the law of total covariance:

    $$\Sigma = \sum_i e^{F_i - F} \left(\Sigma_i
      + (\mathrm{out}_i - \mathrm{out})(\mathrm{out}_i - \mathrm{out})^T\right)$$

    Args:
        stacked: states stacked along one axis of `lse`, and along the same axis of the others.
        axis: that axis, as an axis of `lse`; may be negative. If its length is 0, the result is the empty state.

    Returns:
        The merged state, with `axis` removed.

    Raises:
        TypeError: if `stacked` is not a state or `axis` is not an integer.
        ValueError: if the shapes do not fit or `axis` is out of range.

    Source: Tree Attention (arXiv 2408.04093), Algorithm 3 on one device.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.kernels import AttentionState, merge_all
        >>> parts = AttentionState(jnp.ones((8, 1, 2)), jnp.zeros((8, 1)))
        >>> float(merge_all(parts).lse[0])  # log 8
        2.0794415...
    """
    check_state("stacked", stacked)
    axis = check_axis("axis", axis, stacked.lse.ndim, "stacked.lse")

    def total(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        return _sum(pair[0], axis), _sum(pair[1], axis)

    parts = AttentionState(stacked.out, stacked.lse)
    whole = fold(parts, lambda x: x.max(axis, keepdims=True, initial=-jnp.inf), total)
    merged = AttentionState(whole.out.squeeze(axis), whole.lse.squeeze(axis))
    if isinstance(stacked, AttentionState):
        return merged
    covariance = _sum(covariance_term(stacked, whole), axis).squeeze(axis)
    return CovarianceState(covariance.astype(stacked.covariance.dtype), *merged)


def share(part: Array, whole: Array) -> Array:
    r"""$e^{F_i - F}$: the share of a part in the whole; 0 if it has no keys."""
    some = holds_keys(part)
    return jnp.where(some, jnp.exp(jnp.where(some, part - whole, -jnp.inf)), 0.0)


def covariance_term(part: CovarianceState, whole: AttentionState) -> Array:
    """The term of a part in the covariance of the whole, in the dtype of `lse`."""
    # e^{F_i - F} (Σ_i + (out_i - out)(out_i - out)^T), the law of total covariance
    dtype = part.lse.dtype
    portion = share(part.lse, whole.lse)
    # zeroed before it is multiplied, so that a part without keys makes no NaN in a derivative either
    some = holds_keys(part.lse)[..., None]
    out = jnp.where(some, part.out.astype(dtype), 0.0)
    covariance = jnp.where(some[..., None], part.covariance.astype(dtype), 0.0)
    deviation = out - whole.out.astype(dtype)
    return (covariance + deviation[..., :, None] * deviation[..., None, :]) * portion[
        ..., None, None
    ]


def _sum(x: Array, axis: int) -> Array:
    # XLA:CPU on JAX 0.10.2 sums a first axis of 8, of 16 million numbers, in 161 ms, and slices in 3; on 0.12.0 in 6
    # (https://github.com/jax-ml/jax/issues/25187).
    count = x.shape[axis]
    if not 1 <= count <= 16:
        return x.sum(axis, keepdims=True)
    return functools.reduce(jnp.add, (lax.index_in_dim(x, i, axis) for i in range(count)))


def check_state(name: str, state: object) -> None:
    """Raises `TypeError` and `ValueError` unless `state` is one of the states above, of arrays that fit."""
    if not isinstance(state, (AttentionState, CovarianceState)):
        raise TypeError(f"{name}: wanted an AttentionState, got {received(state)}")
    check_floating(f"{name}.out", state.out)
    check_floating(f"{name}.lse", state.lse)
    if state.out.ndim == 0:
        raise ValueError(f"{name}.out: wanted at least the width axis, got {received(state.out)}")
    check_shape(f"{name}.lse", state.lse, state.out.shape[:-1])
    wanted = lse_dtype(state.out.dtype)
    if state.lse.dtype not in (wanted, jnp.float64):
        raise TypeError(
            f"{name}.lse: wanted {wanted} or wider with {state.out.dtype} outputs, "
            f"got {received(state.lse)}"
        )
    if isinstance(state, CovarianceState):
        check_floating(f"{name}.covariance", state.covariance)
        shape = (*state.out.shape, state.out.shape[-1])
        check_shape(f"{name}.covariance", state.covariance, shape)
