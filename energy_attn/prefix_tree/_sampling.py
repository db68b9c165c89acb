"""From logits to the law that tokens are drawn from: temperature, top-k, top-p."""

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


def process_logits(logits: Array, temperature: Any, top_k: int | None, top_p: Any) -> Array:
    r"""Logits `[..., V]` whose softmax is the law to draw from; minus infinity where it is cut off.

    $$\ell \mapsto (\ell - \max \ell) / T$$

    Then the `top_k` largest are kept (all, if there are fewer), and of these the fewest whose
    probability reaches `top_p`. Among equals those of lower token come first, so that exactly that
    many are kept, at least one. Float32 or wider. A row of minus infinities stays what it is; NaN
    is never cut off. Arguments are those that `check_sampling` has passed.
    """
    wide = lse_dtype(logits.dtype)
    logits = logits.astype(wide)
    # Relative to the largest, and with a temperature that is not flushed to zero: a small one makes
    # the others minus infinity, and nothing NaN.
    largest = logits.max(-1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    temperature = jnp.maximum(jnp.asarray(temperature, wide), jnp.finfo(wide).tiny)
    scaled = (logits - largest) / temperature
    kept = scaled.shape[-1] if top_k is None else min(top_k, scaled.shape[-1])
    if kept == scaled.shape[-1] and top_p is None:
        return scaled
    scaled = jnp.where(scaled == 0, 0, scaled)  # sorting would tell -0 from 0
    values, tokens = lax.top_k(scaled, kept)  # equals in order of their tokens
    last = jnp.full((*scaled.shape[:-1], 1), kept - 1, jnp.int32)
    if top_p is not None:
        top_p = jnp.asarray(top_p, wide)
        reached = jnp.cumsum(jax.nn.softmax(values, -1), -1)
        short = (reached < top_p).sum(-1, keepdims=True, dtype=jnp.int32)
        # a sum may round up to 1 before its end
        last = jnp.where(top_p < 1, jnp.minimum(short, last), last)
    value, token = (jnp.take_along_axis(x, last, -1) for x in (values, tokens))
    token_index = lax.broadcasted_iota(jnp.int32, scaled.shape, scaled.ndim - 1)
    after = (scaled < value) | ((scaled == value) & (token_index > token))
    return jnp.where(after, -jnp.inf, scaled)


@functools.partial(jax.jit, static_argnames="top_k")
def sample_tokens(
    key: Array, logits: Array, temperature: Any, top_k: int | None, top_p: Any
) -> Array:
    """Tokens, int32, each drawn from its row of `logits` `[..., V]` as `process_logits` makes them.

    Independent of one another. A row of minus infinities gives token 0.
    """
    warped = process_logits(logits, temperature, top_k, top_p)
    return jax.random.categorical(key, warped, axis=-1).astype(jnp.int32)


def check_sampling(temperature: Any, top_k: Any, top_p: Any) -> tuple[Any, int | None, Any]:
    """Returns the settings of `process_logits`: numbers as Python's, scalar arrays as they are, None for all.

    Raises `TypeError` for another type and `ValueError` for what is out of range, so far as values
    are known: a temperature that is not above 0, `top_k` below 1, `top_p` outside of (0, 1].
    """
    temperature = _check_positive("temperature", temperature, None)
    top_k = None if top_k is None else check_integer("top_k", top_k, least=1)
    top_p = None if top_p is None else _check_positive("top_p", top_p, 1)
    is_all = isinstance(top_p, float) and top_p == 1  # nothing is sorted then
    return temperature, top_k, None if is_all else top_p


def _check_positive(name: str, x: Any, most: int | None) -> Any:
    number = x
    if isinstance(x, (jax.Array, np.ndarray)):
        x = check_floating(name, x)
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
