"""Benchmarks of custom energies, compared with `jax.nn` on dense scores and PyTorch's `flex_attention`."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import energy_attn
from energy_attn import masks, scores

from .attention import SQUARE, Job, Torch, gradient, on_arrays
from .runner import JAX_NN, ONE_GRADIENT, ONE_PASS, OURS, Case, Run

_HEADS, _PREFIX, _CAP = 16, 256, 50.0
_SLOPES = 2.0 ** (-8 * np.arange(1, _HEADS + 1, dtype=np.float32) / _HEADS)
_SINK = np.linspace(-1, 1, _HEADS, dtype=np.float32)


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
    """Dense attention with one more key, of zeros, whose score is the sink's."""
    key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (key, value))
    bias = jnp.zeros((1, _HEADS, query.shape[1], key.shape[1]), query.dtype)
    bias = bias.at[..., -1].set(_SINK[None, :, None])
    return jax.nn.dot_product_attention(query, key, value, bias=bias)


def _prefix(query: Array, key: Array, value: Array) -> Array:
    i, j = _places(query)
    mask = ((j <= i) | (j < _PREFIX))[None, None]
    return jax.nn.dot_product_attention(query, key, value, mask=mask)


def _ours(**fields: Callable[[], Any]) -> Job:
    """Attention of an energy whose fields are made when it is traced."""

    def attend(query: Array, key: Array, value: Array) -> Array:
        options = {name: make() for name, make in fields.items()}
        return energy_attn.FreeEnergy(**options).attention(query, key, value)

    return attend


def _flex(
    score: Callable[[Any], Any] | None = None, mask: Callable[..., Any] | None = None
) -> Torch:
    """`flex_attention`, compiled where that works, with a score that is made of PyTorch or with a mask."""

    def peer(torch: Any, *tensors: Any) -> Run:
        from torch.nn.attention import flex_attention as module  # pyright: ignore[reportMissingImports]

        length, device = tensors[0].shape[2], tensors[0].device.type
        options = {"score_mod": score and score(torch)}
        if mask is not None:
            blocks = module.create_block_mask(mask, None, None, length, length, device=device)
            options["block_mask"] = blocks

        def run(attend: Any) -> Any:
            with torch.no_grad():
                return attend(*tensors, **options)

        compiled = torch.compile(module.flex_attention, dynamic=False)
        try:
            run(compiled)
        except Exception:  # without a compiler
            return lambda: run(module.flex_attention)
        return lambda: run(compiled)

    return peer


def _absent(reason: str) -> Torch:
    def peer(*_: Any) -> Run:
        raise NotImplementedError(reason)

    return peer


def _slopes(torch: Any) -> Callable[..., Any]:
    slopes = torch.from_numpy(_SLOPES)
    return lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()


_PLAIN = _ours()


def _cases(name: str, ours: Job, dense: Job, peer: Torch, plain: Job = _PLAIN) -> Iterator[Case]:
    """Values and then gradients of an energy: ours, `jax.nn`'s, and our attention without the energy."""
    jobs = {OURS: ours, JAX_NN: dense, ONE_PASS: plain}
    yield Case(name, "float32", SQUARE, on_arrays(jobs, peer))
    jobs = {OURS: gradient(ours), JAX_NN: gradient(dense), ONE_GRADIENT: gradient(plain)}
    peer = _absent("flex_attention has no backward on CPUs")
    yield Case(f"{name}, forward + backward", "float32", SQUARE, on_arrays(jobs, peer))


CASES = (
    *_cases(
        "soft cap",
        _ours(score=lambda: scores.SoftCap(_CAP)),
        _soft_cap,
        _flex(lambda torch: lambda s, b, h, i, j: _CAP * torch.tanh(s / _CAP)),
    ),
    # slopes that are not learnt, as in the paper
    *_cases(
        "ALiBi", _ours(score=lambda: scores.ALiBi(jnp.asarray(_SLOPES))), _alibi, _flex(_slopes)
    ),
    *_cases(
        "sink",
        _ours(sink=lambda: jnp.asarray(_SINK)),
        _sink,
        _absent("flex_attention returns no lse on CPUs, which a sink needs"),
    ),
    *_cases(
        "prefix-LM",
        _ours(mask=lambda: masks.Causal() | masks.Prefix(_PREFIX)),
        _prefix,
        _flex(mask=lambda b, h, i, j: (j <= i) | (j < _PREFIX)),
        _ours(is_causal=lambda: True),
    ),
)
