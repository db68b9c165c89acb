"""Derivatives of attention libraries: each mode of each installed library, against dense float64.

    python tools/compare_modes.py

prints the rows of the table of `docs/derivatives.md` whose library is installed: some need different environments.
"""

import functools
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from budgets import ROOT

sys.path.insert(0, str(ROOT))

import energy_attn as ea

SHAPE, LONG = (1, 64, 8, 16), (1, 4096, 4, 64)
X, D = np.random.default_rng(0).standard_normal((2, 3, *SHAPE)).astype(np.float32)
Function = Callable[..., Any]


def dense(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Attention and its energies from the whole matrix of scores."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * SHAPE[-1] ** -0.5
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)
    return out, jax.nn.logsumexp(scores, -1).transpose(0, 2, 1)


def modes(f: Function, of: Any, sin: Function) -> list[Function]:
    """The modes of differentiation of `f(query, key, value)`, by `of`, which is jax or torch.func.

    Each is a function of a point and a direction: the gradient, the jvp, reverse over reverse, forward over reverse,
    reverse over forward, and forward over forward.
    """

    def gradient(f: Function) -> Function:
        return of.grad(lambda *x: sin(f(*x)).sum(), (0, 1, 2))

    def tangent(f: Function, d: Any) -> Function:
        return lambda *x: of.jvp(f, x, d)[1]

    return [
        lambda x, d: gradient(f)(*x),
        lambda x, d: tangent(f, d)(*x),
        lambda x, d: of.vjp(gradient(f), *x)[1](d),
        lambda x, d: tangent(gradient(f), d)(*x),
        lambda x, d: gradient(tangent(f, d))(*x),
        lambda x, d: tangent(tangent(f, d), d)(*x),
    ]


def modes_of_jax(out: Function, lse: Function) -> list[Function]:
    """The compiled modes of a function of JAX, and the gradient of its energies."""
    return list(map(jax.jit, [*modes(out, jax, jnp.sin), modes(lse, jax, jnp.sin)[0]]))


@functools.cache
def exact() -> list[Any]:
    """Computes all results densely in float64."""
    with jax.enable_x64(True):
        x, d = (tuple(jnp.asarray(y, jnp.float64) for y in z) for z in (X, D))
        return [
            mode(x, d) for mode in modes_of_jax(lambda *x: dense(*x)[0], lambda *x: dense(*x)[1])
        ]


def judged(mode: Callable[[], Any], exact: Any) -> str:
    """The cell of a result: `yes`, `wrong`, `zero` where it should not be, or `raises`."""
    try:
        results = [np.asarray(x) for x in jax.tree.leaves(mode())]
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return "raises"
    correct = [np.asarray(x) for x in jax.tree.leaves(exact)]
    largest = max(np.abs(x).max() for x in correct)
    errors = [np.abs(a - b).max() for a, b in zip(results, correct, strict=True)]
    if max(errors) < 1e-4 * largest:
        return "yes"
    return "zero" if not any(x.any() for x in results) else "wrong"


def of_jax(out: Function, lse: Function) -> list[str]:
    """The cells of a library of JAX, with the temporary memory of its gradient and its jvp at T = 4096."""
    x, d = (tuple(map(jnp.asarray, y)) for y in (X, D))
    all_modes = modes_of_jax(out, lse)
    cells = [judged(lambda m=m: m(x, d), y) for m, y in zip(all_modes, exact(), strict=True)]
    long = (jax.ShapeDtypeStruct(LONG, jnp.float32),) * 3
    for mode in all_modes[:2]:
        memory = mode.lower(long, long).compile().memory_analysis()
        cells.append(f"{memory.temp_size_in_bytes / 2**20:.0f}")
    return cells


def of_torch(attend: Function, lse: str) -> list[str]:
    """The cells of a function of PyTorch, with a note on its energies."""
    import torch

    x, d = (tuple(torch.from_numpy(z).transpose(1, 2) for z in y) for y in (X, D))

    def run(mode: Function) -> Any:
        return jax.tree.map(lambda y: y.detach().transpose(1, 2).numpy(), mode(x, d))

    all_modes = modes(attend, torch.func, torch.sin)
    cells = [judged(lambda m=m: run(m), y) for m, y in zip(all_modes, exact()[:6], strict=True)]
    return [*cells, lse, "—", "—"]


def jax_nn() -> list[str]:
    """`jax.nn.dot_product_attention`, which forms the matrix of weights; its residual has no derivative."""
    attend = jax.nn.dot_product_attention
    return of_jax(attend, lambda *x: attend(*x, return_residual=True)[1])


def fa4() -> list[str]:
    """fa4-jax on its pure JAX backend, which has the same derivative rules as its kernels."""
    from fa4_jax import flash_attn

    attend = functools.partial(flash_attn, backend="reference")
    return of_jax(attend, lambda *x: attend(*x, return_lse=True)[1].transpose(0, 2, 1))


def sdpa(backend: str) -> list[str]:
    """`scaled_dot_product_attention` with one of its kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return of_torch(scaled_dot_product_attention, "not returned")


def flex() -> list[str]:
    """`flex_attention`, not compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return of_torch(flex_attention, "—")


LIBRARIES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "energy_attn": ("jax", lambda: of_jax(ea.attention, ea.free_energy)),
    "jax.nn (XLA)": ("jax", jax_nn),
    "fa4-jax (reference backend)": ("fa4-jax", fa4),
    "PyTorch SDPA (flash)": ("torch", lambda: sdpa("FLASH_ATTENTION")),
    "PyTorch SDPA (math)": ("torch", lambda: sdpa("MATH")),
    "PyTorch flex_attention": ("torch", flex),
}

if __name__ == "__main__":
    for name, (package, library) in LIBRARIES.items():
        try:
            cells = [f"{name}, {package} {version(package)}", *library()]
        except PackageNotFoundError:
            continue
        print(f"| {' | '.join(cells)} |", flush=True)
