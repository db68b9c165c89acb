"""Energies of one's own: by us, by `jax.nn` with arrays of scores, and by PyTorch's `flex_attention`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import energy_attn
from energy_attn import masks, scores

from ._observables import Job

_HEADS, _PREFIX, _CAP = 16, 256, 50.0
_SLOPES = 2.0 ** (-8 * np.arange(1, _HEADS + 1, dtype=np.float32) / _HEADS)
_SINK = np.linspace(-1, 1, _HEADS, dtype=np.float32)
BACKWARD = ", forward + backward"


class Energy(NamedTuple):
    """One energy of all sides.

    Attributes:
        ours: by this library.
        beside: what its time is compared with: the same without the score, the sink or the prefix.
        dense: with an array of the size of the scores.
        score, seen: the functions that `flex_attention` takes, given PyTorch and the length.
    """

    ours: Job
    beside: Job
    dense: Job
    score: Callable[[Any], Callable[..., Any]] | None = None
    seen: Callable[..., Any] | None = None


def _places(query: Array) -> tuple[Array, Array]:
    place = jnp.arange(query.shape[1], dtype=jnp.int32)
    return place[:, None], place[None]


def _soft_cap(query: Array, key: Array, value: Array) -> Array:
    products = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(_CAP * jnp.tanh(products / _CAP))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def _alibi(query: Array, key: Array, value: Array) -> Array:
    i, j = _places(query)
    bias = -_SLOPES[None, :, None, None] * jnp.abs(i - j)[None, None].astype(query.dtype)
    return jax.nn.dot_product_attention(query, key, value, bias=bias)


def _sink(query: Array, key: Array, value: Array) -> Array:
    """One more key, of zeros, whose score is that of the sink."""
    key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (key, value))
    bias = jnp.zeros((1, _HEADS, query.shape[1], key.shape[1]), query.dtype)
    bias = bias.at[..., -1].set(_SINK[None, :, None])
    return jax.nn.dot_product_attention(query, key, value, bias=bias)


def _prefix(query: Array, key: Array, value: Array) -> Array:
    i, j = _places(query)
    seen = ((j <= i) | (j < _PREFIX))[None, None]
    return jax.nn.dot_product_attention(query, key, value, mask=seen)


def _slopes(torch: Any) -> Callable[..., Any]:
    slopes = torch.from_numpy(_SLOPES)
    return lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()


def _ours(**fields: Callable[[], Any]) -> Job:
    """Attention of an energy whose fields are made when it is traced."""

    def attend(query: Array, key: Array, value: Array) -> Array:
        made = {name: make() for name, make in fields.items()}
        return energy_attn.FreeEnergy(**made).attention(query, key, value)

    return attend


_PLAIN = _ours()
_FORWARD = {
    "soft cap": Energy(
        _ours(score=lambda: scores.SoftCap(_CAP)),
        _PLAIN,
        _soft_cap,
        lambda torch: lambda s, b, h, i, j: _CAP * torch.tanh(s / _CAP),
    ),
    # slopes that are not learnt, as in the paper
    "ALiBi": Energy(
        _ours(score=lambda: scores.ALiBi(jnp.asarray(_SLOPES))), _PLAIN, _alibi, _slopes
    ),
    "sink": Energy(_ours(sink=lambda: jnp.asarray(_SINK)), _PLAIN, _sink),
    "prefix-LM": Energy(
        _ours(mask=lambda: masks.Causal() | masks.Prefix(_PREFIX)),
        _ours(is_causal=lambda: True),
        _prefix,
        seen=lambda b, h, i, j: (j <= i) | (j < _PREFIX),
    ),
}
ENERGIES = _FORWARD | {name + BACKWARD: energy for name, energy in _FORWARD.items()}


def flex(name: str, torch: Any, query: Any, key: Any, value: Any) -> Callable[[], Any]:
    """`flex_attention` of `[B, N, T, H]`, compiled where that works.

    Raises `NotImplementedError` for what it does not do on CPUs: derivatives, and the energies that sinks need.
    """
    from torch.nn.attention import flex_attention as module  # pyright: ignore[reportMissingImports]

    energy = ENERGIES[name]
    if name.endswith(BACKWARD) and query.device.type == "cpu":
        raise NotImplementedError("flex_attention has no backward on CPU")
    if energy.score is None and energy.seen is None:
        raise NotImplementedError("flex_attention returns no lse on CPU, which a sink needs")
    score = energy.score and energy.score(torch)
    length = query.shape[2]
    blocks = None
    if energy.seen is not None:
        blocks = module.create_block_mask(
            energy.seen, None, None, length, length, device=query.device.type
        )

    def run(attend: Any) -> Any:
        with torch.no_grad():
            return attend(query, key, value, score_mod=score, block_mask=blocks)

    compiled = torch.compile(module.flex_attention, dynamic=False)
    try:
        run(compiled)
    except Exception:  # without a compiler
        return lambda: run(module.flex_attention)
    return lambda: run(compiled)
