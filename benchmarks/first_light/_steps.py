"""The steps of first light in their order; `python -m benchmarks.first_light._steps STEP BENCH` takes one."""

import contextlib
import functools
import importlib.metadata
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from energy_attn.kernels import local_attention

from ..attention import arrays, on_arrays, torch_attention
from ..runner import JAX_NN, OURS, PYTORCH, machine
from ..tiles import calls, cores_here, program, trial_calls
from ._bench import Bench, Result, failure, label_of

GPU_KERNELS = ("cudnn", "fa4", "mosaic_gpu", "pallas_gpu", "flash")  # in the order of the tables
PEERS = (f"{JAX_NN} cudnn", f"{JAX_NN} xla")
# Floating-point operations of a pass, relative to those of the forward pass.
_PRODUCTS = {"forward": 1.0, "both": 3.5, "tangent": 2.5}
STEPS_IN_ONE = 50  # decode steps of one program
MOST_SCORES = 4096  # rows of which XLA can hold all scores
# Caches of width 128: the batch, queries, heads, key heads and keys. The last one has more than 2^31 elements.
CACHES = (
    *((1, 1, 32, 8, 2**16), (1, 1, 32, 8, 2**20), (1, 1, 8, 1, 2**18), (1, 1, 8, 1, 2**20)),
    *((1, 16, 32, 8, 2**16), (1, 9, 32, 8, 2**16), (32, 1, 32, 8, 2**13), (1, 1, 128, 1, 2**18)),
    *((1, 1, 32, 8, 2**13), (1, 1, 32, 8, 2**21 + 2**13)),
)

Attention = Callable[..., Any]


def about(bench: Bench) -> None:
    """The device, versions and the date."""
    with bench.guarded("about", "versions"):
        versions = machine() | {"date": time.strftime("%Y-%m-%d")}
        versions["capability"] = getattr(jax.devices()[0], "compute_capability", None)
        for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cuda-runtime", "fa4-jax"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        bench.put("about", "versions", versions)


def roof(bench: Bench) -> None:
    """The peak rates of copying and reading memory and of bfloat16 products, and the overhead of a program."""
    x, n = jnp.ones(2**31 // bench.shrink**2, jnp.bfloat16), bench.length(8192)
    factors = list(jax.random.normal(jax.random.key(0), (2, n, n), jnp.bfloat16))

    def copy(x: Array) -> Array:
        return x + 1

    def read(x: Array) -> Array:
        return x.reshape(-1, 4096).astype(jnp.float32).sum(1)

    for name, function, inputs, figures in (
        ("copy", copy, [x], lambda s: {"bytes_per_s": 2 * x.nbytes / s}),
        ("read", read, [x], lambda s: {"bytes_per_s": x.nbytes / s}),
        ("matmul", jnp.matmul, factors, lambda s: {"flop_per_s": 2 * n**3 / s}),
        ("nothing", copy, [jnp.zeros(8)], lambda _: {}),
    ):
        bench.measure("roof", [({"kernel": name}, function)], inputs, figures)


def _kernel(name: str, **options: Any) -> Attention:
    """The output of attention by a kernel of ours, or by one of `jax.nn`, whose names begin with it."""
    if name.startswith(JAX_NN):
        dense, name = jax.nn.dot_product_attention, name.removeprefix(f"{JAX_NN} ")
        return functools.partial(dense, implementation=name, **options)
    return lambda *x: local_attention(*x, implementation=name, **options).out


def _exactly(function: Attention, inputs: list[Array]) -> Callable[[], PyTree]:
    """Returns a function's results in float64, computed once."""

    @functools.cache
    def results() -> PyTree:
        with jax.enable_x64(True):
            exact = jax.jit(function)(*(x.astype(jnp.float64) for x in inputs))
            return jax.tree.map(lambda x: x.astype(jnp.float32), exact)

    return results


def _pass(kind: str, attend: Attention) -> Attention:
    """Attention, with its gradients for the output as cotangent, or its derivative along the arrays themselves."""

    def both(*x: Array) -> PyTree:
        out, back = jax.vjp(attend, *x)
        return out, back(out)

    return {"forward": attend, "both": both, "tangent": lambda *x: jax.jvp(attend, x, x)}[kind]


def _passes(
    bench: Bench,
    step: str,
    sizes: Result,
    pairs: float,
    kinds: Iterable[str],
    kernels: Iterable[str],
    **options: Any,
) -> None:
    """Times passes over `pairs` of queries and keys by each kernel, and compares `blockwise` in float64."""
    b, t, n, h = (sizes[name] for name in ("batch", "length", "heads", "width"))
    shape = {"B": b, "T": t, "S": t, "N": n, "K": n, "H": h}
    inputs = arrays("bfloat16", **shape)
    for kind in kinds:
        flop = 4 * pairs * n * h * _PRODUCTS[kind]

        def figures(seconds: float, flop: float = flop) -> Result:
            return {"tflop_per_s": flop / seconds / 1e12}

        exact = _exactly(_pass(kind, _kernel("blockwise", **options)), inputs)
        programs = [
            ({"kernel": name, "pass": kind, **sizes}, _pass(kind, _kernel(name, **options)))
            for name in kernels
        ]
        bench.measure(step, programs, inputs, figures, exact)
        fields = {"kernel": PYTORCH, "pass": kind, **sizes}
        if step == "prefill" and not bench.known(step, label_of(fields)):
            with bench.guarded(step, label_of(fields)):
                sides = on_arrays({}, torch_attention(options["is_causal"], kind == "both"))
                run = sides("bfloat16", **shape)[PYTORCH]()
                bench.put(step, label_of(fields), fields | bench.timed(run, figures))


def prefill(bench: Bench) -> None:
    """Forward, and forward with backward, of 16k tokens of 2048 features, or of one sequence if that is longer."""
    shapes = list(itertools.product((8192, 2048, 32768), (128, 64), (True, False)))
    for t, h, causal in shapes[:1] if bench.trial else shapes:
        batch, length = 16384 // t or 1, bench.length(t)
        sizes = {"batch": batch, "length": length, "heads": 2048 // h, "width": h, "causal": causal}
        pairs = batch * length**2 * (0.5 if causal else 1)
        kernels = (*GPU_KERNELS, *(PEERS if length <= MOST_SCORES else PEERS[:1]))
        _passes(bench, "prefill", sizes, pairs, ("forward", "both"), kernels, is_causal=causal)


def rules(bench: Bench) -> None:
    """Packed documents, and queries and keys at given positions, as in a ring: calls that cuDNN's kernel declines."""
    t = bench.length(8192)
    document = np.searchsorted(np.sort(np.random.default_rng(0).choice(t, 7)), np.arange(t))
    segments = jnp.asarray(document, jnp.int32)[None]
    # half a sequence of queries and the keys of the other half and of their own, as a ring's devices hold them
    numbers = jnp.arange(2 * t, dtype=jnp.int32)[None]
    far = jnp.concatenate([numbers[:, : t // 2], numbers[:, t : t + t // 2]], axis=1)
    same = np.tril(document[:, None] == document).sum()
    cases = {
        "documents": ({"query_segment_ids": segments, "key_segment_ids": segments}, float(same)),
        "positions": ({"query_positions": far, "key_positions": far}, t * (t + 1) / 2),
    }
    for (rule, (options, pairs)), h in itertools.product(cases.items(), (128, 64)):
        sizes = {"rule": rule, "batch": 1, "length": t, "heads": 2048 // h, "width": h}
        kernels, options = (*GPU_KERNELS, "blockwise"), options | {"is_causal": True}
        _passes(bench, "rules", sizes, pairs, _PRODUCTS, kernels, **options)


def decode(bench: Bench) -> None:
    """One query, or a few, over a long cache: many steps in one program, each query made of the last answer."""
    steps = 2 if bench.trial else STEPS_IN_ONE
    copying = bench.results.get("roof", {}).get("copy", {}).get("bytes_per_s")

    def loop(attend: Attention, q: Array, k: Array, v: Array) -> Array:
        def step(_: Array, out: Array) -> Array:
            return attend(q + out * q.dtype.type(1e-3), k, v)

        return jax.lax.fori_loop(0, steps, step, jnp.zeros_like(q))

    for b, t, n, k, keys in CACHES[:1] if bench.trial else CACHES:
        s = bench.length(keys)
        sizes = {"batch": b, "queries": t, "heads": n, "kv_heads": k, "keys": s}
        inputs = arrays("bfloat16", B=b, T=t, S=s, N=n, K=k, H=128)
        size = inputs[1].nbytes + inputs[2].nbytes

        def figures(seconds: float, size: int = size) -> Result:
            share = size * steps / seconds / copying if copying else None
            return {"us_per_step": seconds / steps * 1e6, "of_copy": share}

        exact = _exactly(functools.partial(loop, _kernel("blockwise")), inputs)
        programs = [
            ({"kernel": name, **sizes}, functools.partial(loop, _kernel(name)))
            for name in (*GPU_KERNELS, "decode", *PEERS)
        ]
        bench.measure("decode", programs, inputs, figures, exact)
        del inputs, exact  # before the arrays of the next cache are made


def sweep(bench: Bench) -> None:
    """Times all candidate tiles of each kernel of `pallas_gpu`, and compares results with its default tiles."""
    for call in trial_calls() if bench.trial else calls():
        inputs, figures = call.arrays(), lambda s, n=call.steps: {"us_per_step": s / n * 1e6}
        exact = functools.cache(functools.partial(jax.jit(program(call, None)), *inputs))
        fields = {"kernel": "pallas_gpu", "call": call.label}
        choices = {OURS: None, **call.tiles(cores_here())}
        programs = [(fields | {"tiles": x}, program(call, y)) for x, y in choices.items()]
        bench.measure("sweep", programs, inputs, figures, exact)


def check(bench: Bench) -> None:
    """Compares values, energies and derivatives with dense attention in float64, by the tests of kernels."""
    from ._check import run_tests  # needs pytest

    run_tests(bench)


# The most important come first, in case time runs out.
STEPS = {step.__name__: step for step in (about, roof, decode, prefill, check, rules, sweep)}

if __name__ == "__main__":
    name, bench = sys.argv[1], Bench(*json.loads(sys.argv[2]))
    try:
        STEPS[name](bench)
    except Exception as reason:  # that of arrays which do not fit, for one
        bench.put(name, "failed", failure(reason))
    sys.stdout.flush()
    os._exit(0)  # a broken context of the device may not come to an end
