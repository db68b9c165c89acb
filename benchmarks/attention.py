"""Benchmarks of attention, its gradients, `jax.grad` of F and compilation, compared with other implementations."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import energy_attn
from energy_attn.kernels import local_attention
from energy_attn.kernels.internal import platform_here

from .runner import JAX_NN, OURS, PYTORCH, Case, Output, Run, Sides, torch

BARE = "the bare kernel"

Job = Callable[..., Any]  # of query, key and value
Torch = Callable[..., Run]  # from PyTorch and its query, key and value `[B, N, T, H]`


def shapes(B: int, T: int, S: int, N: int, K: int, H: int) -> list[tuple[int, ...]]:
    """The shapes of query, key and value."""
    return [(B, T, N, H), (B, S, K, H), (B, S, K, H)]


def arrays(dtype: str, **shape: int) -> list[Array]:
    """Random query, key and value, drawn on the device."""
    keys = jax.random.split(jax.random.key(0), 3)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return [draw(k, x, jnp.dtype(dtype)) for k, x in zip(keys, shapes(**shape), strict=True)]


def on_arrays(jobs: dict[str, Job], peer: Torch | None = None) -> Callable[..., Sides]:
    """The sides of jobs on the same query, key and value, jitted; and PyTorch's, if there is one."""

    def sides(dtype: str, **shape: int) -> Sides:
        inputs = arrays(dtype, **shape)

        def jitted(job: Job) -> Run:
            return functools.partial(jax.jit(job), *inputs)

        def of_torch(peer: Torch) -> Run:
            torch_, device = torch(), "cuda" if platform_here() == "cuda" else "cpu"
            # the same [B, T, N, H] layout in memory, viewed in PyTorch's order of axes
            tensors = [torch_.from_dlpack(x).to(device).transpose(1, 2) for x in inputs]
            return peer(torch_, *tensors)

        all_sides: Sides = {name: functools.partial(jitted, job) for name, job in jobs.items()}
        return all_sides | ({PYTORCH: functools.partial(of_torch, peer)} if peer else {})

    return sides


def gradient(attend: Job) -> Job:
    """The gradients of the outputs' sum of squares."""

    def loss(*inputs: Array) -> Array:
        return (attend(*inputs).astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1, 2))


def torch_attention(causal: bool, backward: bool) -> Torch:
    """PyTorch's attention, or its gradients of the output's sum of squares."""

    def peer(torch_: Any, *tensors: Any) -> Run:
        attend = functools.partial(
            torch_.nn.functional.scaled_dot_product_attention,
            is_causal=causal,
            enable_gqa=tensors[0].shape[1] != tensors[1].shape[1],
        )

        def forward() -> Any:
            with torch_.no_grad():
                return attend(*tensors)

        def forward_backward() -> Any:
            leaves = [x.detach().requires_grad_() for x in tensors]
            out = attend(*leaves)
            return torch_.autograd.grad(out, leaves, 2 * out.detach())

        return forward_backward if backward else forward

    return peer


_ATTENTIONS: dict[str, Job] = {OURS: energy_attn.attention, JAX_NN: jax.nn.dot_product_attention}
_GRADIENTS = {name: gradient(attend) for name, attend in _ATTENTIONS.items()}


def _gradient_of_energy(q: Array, k: Array, v: Array) -> Array:
    def total(source: Array) -> Array:
        return energy_attn.free_energy(q, k, v, source=source).sum()

    return jax.grad(total)(np.zeros(q.shape, q.dtype))


def compilation(causal: bool, layers: int, dtype: str, **shape: int) -> Sides:
    """Compiles the gradient of `layers` attentions in a row, with JAX's in-memory caches empty; and its memory."""

    def compiled(attend: Job) -> Output:
        def in_a_row(q: Array, k: Array, v: Array) -> Array:
            for _ in range(layers):
                q = attend(q, k, v, is_causal=causal)
            return q

        jax.clear_caches()
        types = [jax.ShapeDtypeStruct(x, jnp.dtype(dtype)) for x in shapes(**shape)]
        program = jax.jit(gradient(in_a_row)).lower(*types).compile()
        memory: Any = program.memory_analysis()
        return Output(None, {"temporary_bytes": int(memory.temp_size_in_bytes)})

    return {
        name: lambda attend=_ATTENTIONS[name]: functools.partial(compiled, attend)
        for name in _ATTENTIONS
    }


def key_bytes(dtype: str, B: int, S: int, K: int, H: int, **_: int) -> int:
    """The bytes of keys and values."""
    return 2 * B * S * K * H * jnp.dtype(dtype).itemsize


def _sizes(T: int, S: int, N: int = 16, K: int = 16, H: int = 64) -> dict[str, int]:
    return {"B": 1, "T": T, "S": S, "N": N, "K": K, "H": H}


_HERE = on_arrays(_ATTENTIONS, torch_attention(causal=False, backward=False))
SQUARE = _sizes(2048, 2048)
CPU = (
    *(Case("prefill", dtype, SQUARE, _HERE) for dtype in ("float32", "bfloat16")),
    *(
        Case("decode", dtype, _sizes(1, keys), _HERE, reads=key_bytes)
        for keys in (65536, 262144)
        for dtype in ("float32", "bfloat16")
    ),
    Case(
        "forward + backward",
        "float32",
        SQUARE,
        on_arrays(_GRADIENTS, torch_attention(causal=False, backward=True)),
    ),
    # compared with our own kernel, called by hand
    Case(
        "jax.grad of F",
        "float32",
        SQUARE,
        on_arrays({OURS: _gradient_of_energy, BARE: lambda *x: local_attention(*x).out}),
    ),
    *(
        Case(
            "compilation, forward + backward",
            "float32",
            _sizes(length, length, 8, 8),
            compilation,
            {"causal": causal, "layers": layers},
        )
        # the last for its temporary memory
        for length, layers, causal in (
            *((2048, 1, False), (2048, 1, True), (2048, 32, False), (2048, 32, True)),
            (16384, 1, False),
        )
    ),
)
