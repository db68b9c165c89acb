"""The sampling distribution of tokens: logits after temperature, top-k, top-p and min-p."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

from energy_attn.kernels.internal import (
    check_finite_number,
    check_floating,
    check_integer,
    lse_dtype,
    received,
)


def process_logits(
    logits: Array,
    temperature: float | Array,
    top_k: int | None,
    top_p: float | Array | None,
    min_p: float | Array | None = None,
) -> Array:
    r"""Logits `[..., V]` whose softmax is the sampling distribution; minus infinity for excluded tokens.

    $$\ell \mapsto (\ell - \max \ell) / T$$

    Then the `top_k` largest are kept (all, if there are fewer), and of these the fewest whose
    probability reaches `top_p`, at least one. Ties go to the lower token, so that exactly that many
    are kept. Of these, those are kept that are at least `min_p` times as likely as the likeliest. The
    result is in float32 or wider. A row of minus infinities is unchanged; NaN is never excluded. The
    settings must have passed `check_sampling`.
    """
    dtype = lse_dtype(logits.dtype)
    logits = logits.astype(dtype)
    # Relative to the largest, and with a temperature that is not flushed to zero: a small one gives
    # minus infinity for the others, and no NaN.
    largest = logits.max(-1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    temperature = jnp.maximum(jnp.asarray(temperature, dtype), jnp.finfo(dtype).tiny)
    scaled = (logits - largest) / temperature
    # the logit of the likeliest token is 0
    least = None if min_p is None else jnp.log(jnp.asarray(min_p, dtype))
    count = scaled.shape[-1] if top_k is None else min(top_k, scaled.shape[-1])
    if count == scaled.shape[-1] and top_p is None:
        return scaled if least is None else jnp.where(scaled < least, -jnp.inf, scaled)
    scaled = jnp.where(scaled == 0, 0, scaled)  # sorting distinguishes -0 from 0
    values, tokens = lax.top_k(scaled, count)  # ties in order of their tokens
    last = jnp.full((*scaled.shape[:-1], 1), count - 1, jnp.int32)
    if top_p is not None:
        top_p = jnp.asarray(top_p, dtype)
        reached = jnp.cumsum(jax.nn.softmax(values, -1), -1)
        below = (reached < top_p).sum(-1, keepdims=True, dtype=jnp.int32)
        # the sum may round up to 1 before the last token
        last = jnp.where(top_p < 1, jnp.minimum(below, last), last)
    value, token = (jnp.take_along_axis(x, last, -1) for x in (values, tokens))
    token_index = lax.broadcasted_iota(jnp.int32, scaled.shape, scaled.ndim - 1)
    excluded = (scaled < value) | ((scaled == value) & (token_index > token))
    if least is not None:
        excluded |= scaled < least
    return jnp.where(excluded, -jnp.inf, scaled)


@functools.partial(jax.jit, static_argnames="top_k")
def sample_tokens(
    key: Array,
    logits: Array,
    temperature: float | Array,
    top_k: int | None,
    top_p: float | Array | None,
) -> Array:
    """Draws an int32 token from each row of `logits` `[..., V]`, after `process_logits`.

    The draws are independent. A row of minus infinities gives token 0.
    """
    processed = process_logits(logits, temperature, top_k, top_p)
    return jax.random.categorical(key, processed, axis=-1).astype(jnp.int32)


def check_sampling(
    temperature: object, top_k: object, top_p: object
) -> tuple[Any, int | None, Any]:
    """Returns the settings of `process_logits`: Python numbers, scalar arrays, or None for all tokens.

    Raises `TypeError` for another type, and `ValueError` for a concrete value that is out of range:
    a temperature that is not above 0, `top_k` below 1, `top_p` outside (0, 1].
    """
    temperature = check_positive("temperature", temperature, None)
    top_k = None if top_k is None else check_integer("top_k", top_k, least=1)
    top_p = None if top_p is None else check_positive("top_p", top_p, 1)
    is_all = isinstance(top_p, float) and top_p == 1  # avoids a sort
    return temperature, top_k, None if is_all else top_p


def check_positive(name: str, x: object, most: int | None) -> Any:
    """Returns a number or a floating scalar above 0 and at most `most`; traced ones are not read.

    Raises `TypeError` for another type, and `ValueError` for another value or shape.
    """
    number = x
    if isinstance(x, (jax.Array, np.ndarray)):
        check_floating(name, x)
        if x.ndim:
            raise ValueError(f"{name}: wanted a number or a floating scalar, got {received(x)}")
        if isinstance(x, Tracer):
            return x
        number = float(x)
    number = check_finite_number(name, number)
    if number <= 0 or (most is not None and number > most):
        bounds = "above 0" if most is None else f"above 0 and at most {most}"
        raise ValueError(f"{name}: wanted a number {bounds}, got {number}")
    return x if isinstance(x, jax.Array) else number
