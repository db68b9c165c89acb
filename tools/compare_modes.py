"""Derivatives of attention libraries: each mode of each installed library, against dense float64.

    python tools/compare_modes.py

prints the table of `docs/derivatives.md` and writes `docs/benchmarks/modes.json`. A library that is not installed keeps
its entry in the file, so that libraries which need different environments can be run one after the other.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, collectives, make_mesh

FILE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "modes.json"
SHAPE, LONG = (1, 64, 8, 16), (1, 4096, 4, 64)
COLUMNS = {
    "grad": "grad",
    "jvp": "jvp",
    "reverse over reverse": "rev∘rev",
    "forward over reverse": "fwd∘rev",
    "reverse over forward": "rev∘fwd",
    "forward over forward": "fwd∘fwd",
    "cotangent of lse": "grad of lse",
    "mesh": "jvp on a mesh",
    "MiB of grad": "MiB, grad",
    "MiB of jvp": "MiB, jvp",
}
Function = Callable[..., Any]
X, D = np.random.default_rng(0).standard_normal((2, 3, *SHAPE)).astype(np.float32)


def dense(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Attention and its energies from the whole matrix of scores."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * SHAPE[-1] ** -0.5
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)
    return out, jax.nn.logsumexp(scores, -1).transpose(0, 2, 1)


def compositions(f: Function) -> dict[str, Function]:
    """The modes of differentiation of `f(query, key, value)`, as functions of points and directions."""

    def gradient(x: Any) -> Any:
        return jax.grad(lambda x: jnp.sin(f(*x)).sum())(x)

    def tangent(x: Any, d: Any) -> Any:
        return jax.jvp(lambda x: f(*x), (x,), (d,))[1]

    return {
        "grad": lambda x, d: gradient(x),
        "jvp": tangent,
        "reverse over reverse": lambda x, d: jax.vjp(gradient, x)[1](d),
        "forward over reverse": lambda x, d: jax.jvp(gradient, (x,), (d,))[1],
        "reverse over forward": lambda x, d: jax.grad(lambda x: jnp.sin(tangent(x, d)).sum())(x),
        "forward over forward": lambda x, d: jax.jvp(lambda x: tangent(x, d), (x,), (d,))[1],
    }


def wanted() -> dict[str, list[np.ndarray]]:
    """Computes all results densely in float64."""
    with jax.enable_x64(True):
        x, d = (tuple(jnp.asarray(y, jnp.float64) for y in z) for z in (X, D))
        modes = compositions(lambda *x: dense(*x)[0])
        modes["cotangent of lse"] = compositions(lambda *x: dense(*x)[1])["grad"]
        derivatives = {name: jax.jit(mode)(x, d) for name, mode in modes.items()}
        return {name: list(map(np.asarray, jax.tree.leaves(y))) for name, y in derivatives.items()}


def judged(run: Callable[[], Any], exact: list[np.ndarray]) -> str:
    """`yes`, `wrong`, `zero` where it should not be, or the first words of the error."""
    try:
        results = [np.asarray(x) for x in run()]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    largest = max(np.abs(x).max() for x in exact)
    differences = [np.abs(a - b).max() for a, b in zip(results, exact, strict=True)]
    if max(differences) < 1e-4 * largest:
        return "yes"
    return "zero" if not any(x.any() for x in results) else "wrong"


def of_jax(out: Function, lse: Function | None, exact: dict[str, Any]) -> dict[str, Any]:
    """The derivatives that a library of JAX has, and the temporary memory of its programs at T = 4096."""
    x, d = (tuple(map(jnp.asarray, y)) for y in (X, D))

    def run(mode: Function) -> Callable[[], Any]:
        return lambda: jax.tree.leaves(jax.jit(mode)(x, d))

    verdicts = {name: judged(run(mode), exact[name]) for name, mode in compositions(out).items()}
    verdicts["cotangent of lse"] = (
        judged(run(compositions(lse)["grad"]), exact["cotangent of lse"]) if lse else "not returned"
    )
    long = (jax.ShapeDtypeStruct(LONG, jnp.float32),) * 3
    for name in ("grad", "jvp"):
        if verdicts[name] == "yes":
            program = jax.jit(compositions(out)[name]).lower(long, long).compile()
            verdicts[f"MiB of {name}"] = round(program.memory_analysis().temp_size_in_bytes / 2**20)
    return verdicts


def on_a_mesh(out: Function, exact: list[np.ndarray]) -> str:
    """A jvp of few queries over keys that are sharded over eight devices: its verdict and the bytes it sends."""
    with jax.set_mesh(make_mesh((8,), ("device",))):
        shardings = [
            jax.sharding.NamedSharding(jax.sharding.get_mesh(), s)
            for s in (jax.P(), jax.P(None, "device"))
        ]
        places = [shardings[0], shardings[1], shardings[1]]
        x, d = (tuple(map(jax.device_put, y, places)) for y in (X, D))
        mode = jax.jit(compositions(out)["jvp"])
        verdict = judged(lambda: [mode(x, d)], exact)
        sent = sum(c.bytes for c in collectives(mode.lower(x, d).compile()))
    return verdict if verdict != "yes" else f"yes, {sent / 1024:.0f} KiB"


def ours(exact: dict[str, Any]) -> dict[str, Any]:
    """Derivatives of this library, on one device and on a mesh."""
    verdicts = of_jax(ea.attention, ea.free_energy, exact)
    over = SequenceParallel("device")
    return verdicts | {"mesh": on_a_mesh(lambda *x: ea.attention(*x, parallel=over), exact["jvp"])}


def jax_nn(exact: dict[str, Any]) -> dict[str, Any]:
    """`jax.nn.dot_product_attention`, which forms the matrix of weights; its residual has no derivative."""
    attend = jax.nn.dot_product_attention
    verdicts = of_jax(attend, lambda *x: attend(*x, return_residual=True)[1], exact)
    return verdicts | {"mesh": on_a_mesh(attend, exact["jvp"])}


def fa4(exact: dict[str, Any]) -> dict[str, Any]:
    """fa4-jax on its pure JAX backend, which has the same derivative rules as its kernels."""
    from fa4_jax import flash_attn

    def lse(*x: Any) -> Any:
        return flash_attn(*x, backend="reference", return_lse=True)[1].transpose(0, 2, 1)

    return of_jax(lambda *x: flash_attn(*x, backend="reference"), lse, exact)


def of_torch(attend: Function, exact: dict[str, Any]) -> dict[str, Any]:
    """The derivatives that a function of PyTorch has by `torch.func`."""
    import torch

    x, d = (tuple(torch.from_numpy(z).transpose(1, 2) for z in y) for y in (X, D))

    def total(*x: Any) -> Any:
        return torch.sin(attend(*x)).sum()

    def gradient(*x: Any) -> Any:
        return torch.func.grad(total, (0, 1, 2))(*x)

    def tangent(*x: Any) -> Any:
        return torch.func.jvp(attend, x, d)[1]

    modes = {
        "grad": lambda: gradient(*x),
        "jvp": lambda: [tangent(*x)],
        "reverse over reverse": lambda: torch.func.vjp(gradient, *x)[1](d),
        "forward over reverse": lambda: torch.func.jvp(gradient, x, d)[1],
        "reverse over forward": lambda: torch.func.grad(
            lambda *x: torch.sin(tangent(*x)).sum(), (0, 1, 2)
        )(*x),
        "forward over forward": lambda: [torch.func.jvp(tangent, x, d)[1]],
    }

    def run(mode: Function) -> Callable[[], Any]:
        return lambda: [y.detach().transpose(1, 2).numpy() for y in mode()]

    return {name: judged(run(mode), exact[name]) for name, mode in modes.items()}


def sdpa(backend: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`scaled_dot_product_attention` with one of its kernels."""

    def verdicts(exact: dict[str, Any]) -> dict[str, Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return of_torch(scaled_dot_product_attention, exact) | {
                "cotangent of lse": "not returned"
            }

    return verdicts


def flex(exact: dict[str, Any]) -> dict[str, Any]:
    """`flex_attention`, not compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return of_torch(flex_attention, exact)


LIBRARIES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "energy_attn": ("jax", ours),
    "jax.nn (XLA)": ("jax", jax_nn),
    "fa4-jax (reference backend)": ("fa4-jax", fa4),
    "PyTorch SDPA (flash)": ("torch", sdpa("FLASH_ATTENTION")),
    "PyTorch SDPA (math)": ("torch", sdpa("MATH")),
    "PyTorch flex_attention": ("torch", flex),
}


def measured(stored: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The results of each library that is installed, and the stored ones of the others."""
    exact = wanted()
    for name, (package, library) in LIBRARIES.items():
        try:
            number = version(package)
        except PackageNotFoundError:
            if name in stored:
                yield name, stored[name]
            continue
        yield name, {"version": f"{package} {number}", **library(exact)}


def table(results: dict[str, dict[str, Any]]) -> str:
    """A table in Markdown; an error is shown as `raises`."""

    def cell(x: Any) -> str:
        return "raises" if ": " in str(x) else str(x)

    lines = [["", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1)]
    lines += [
        [f"{name}, {x['version']}", *(cell(x.get(column, "—")) for column in COLUMNS)]
        for name, x in results.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Runs, prints and writes; returns 0."""
    flags = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = flags  # read when JAX first computes
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=FILE, help="the file of results")
    out = parser.parse_args().out
    stored = json.loads(out.read_text()) if out.exists() else {}
    results = dict(measured(stored))
    print(table(results))
    out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
