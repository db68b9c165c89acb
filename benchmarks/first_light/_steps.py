"""The steps of first light in their order, and the process that takes them.

`python -m benchmarks.first_light._steps BENCH` takes the steps of a `Bench` in JSON.
"""

import functools
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from energy_attn.kernels import local_attention

from ..runner import OURS, difference
from ..tiles import TOLERANCE, calls, cores_here, program, trial_calls
from ._bench import Bench, Job, Late, Lost, Result, failure, normal
from ._check import check, check_large

_PACKAGES = (
    *("energy_attn", "jax", "jaxlib", "equinox", "torch"),
    *("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    *("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-runtime", "fa4-jax"),
)
_SAYS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
_COMMANDS = {
    "nvidia-smi": ["nvidia-smi", f"--query-gpu={_SAYS}", "--format=csv,noheader"],
    "ptxas": ["ptxas", "--version"],
}
# Floating-point operations of a pass, relative to those of the forward pass.
_PRODUCTS = {"forward": 1.0, "both": 3.5, "tangent": 2.5}
STEPS_IN_ONE = 50  # decode steps of one program
CACHED = 60e6  # bytes: keys and values this small may stay in a cache of the GPU
MOST_SCORES = 4096  # rows of which XLA can hold all scores
EXAMPLE = "JAX's attention_mgpu, float16"
# Caches of width 128: the batch, queries, heads, key heads and keys.
CACHES = (
    *((1, 1, 32, 8, 2**16), (1, 1, 32, 8, 2**20), (1, 1, 8, 1, 2**18), (1, 1, 8, 1, 2**20)),
    *((1, 16, 32, 8, 2**16), (1, 9, 32, 8, 2**16), (32, 1, 32, 8, 2**13), (1, 1, 128, 1, 2**18)),
    (1, 1, 32, 8, 2**13),
)

Attention = Callable[..., Array]
_dense = jax.nn.dot_product_attention


def about(bench: Bench) -> None:
    """Versions, the device and its clocks; and which kernels take an ordinary call and compile."""
    with bench.guarded("about", "versions"):
        device = jax.devices()[0]
        versions = {name: _version(name) for name in _PACKAGES}
        description = {
            "device": device.device_kind,
            "capability": getattr(device, "compute_capability", None),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        }
        installed = {name: x for name, x in versions.items() if x is not None}
        bench.put("about", "versions", description | installed)
    for name, command in _COMMANDS.items():
        with bench.guarded("about", name):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            output = (done.stdout or done.stderr).strip().splitlines()
            bench.put("about", name, {"said": output[-1][:300]})
    shape, find = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16), lambda _: {"compiles": True}
    jobs = [
        Job(name, _kernel(name, is_causal=True), (shape,) * 3, find, {"kernel": name})
        for name in bench.kernels
    ]
    bench.measure("about", jobs)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernel(name: str, **options: Any) -> Attention:
    return lambda *arrays, **others: (
        local_attention(*arrays, implementation=name, **options, **others).out
    )


def roof(bench: Bench) -> None:
    """The peak rates of copying and reading memory and of bfloat16 products, and the overhead of a program."""

    def copy(x: Float[Array, " n"]) -> Array:
        return x + 1

    def read(x: Float[Array, " n"]) -> Array:
        return x.reshape(-1, 4096).astype(jnp.float32).sum(1)

    x, timed = jnp.ones(2**31 // bench.shrink**2, jnp.bfloat16), bench.timed
    size, n = x.nbytes, bench.length(8192)
    moved = [
        timed("copy", copy, [x], lambda s: {"bytes_per_s": 2 * size / s}),
        timed("read", read, [x], lambda s: {"bytes_per_s": size / s}),
    ]
    bench.measure("roof", moved)
    del x, moved
    factors = normal(1, (n, n)), normal(2, (n, n))
    multiply = timed("matmul", jnp.matmul, factors, lambda s: {"flop_per_s": 2 * n**3 / s})
    bench.measure("roof", [multiply, timed("nothing", copy, [jnp.zeros(8)])])


class Square(NamedTuple):
    """Sizes of an attention with as many queries as keys."""

    batch: int
    length: int
    heads: int
    width: int
    causal: bool

    @property
    def label(self) -> str:
        """The sizes, in one line."""
        b, t, n, h, causal = self
        return f"b{b} t{t} n{n} h{h} {'causal' if causal else 'full'}"

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, of one head."""
        return self.batch * self.length**2 * (0.5 if self.causal else 1)

    def flop(self, kind: str, pairs: float) -> float:
        """Floating-point operations of a kind of pass over pairs of a query and a key."""
        return 4 * pairs * self.heads * self.width * _PRODUCTS[kind]


def squares(bench: Bench) -> Iterator[Square]:
    """16k tokens of 2048 features, or one sequence if that is longer."""
    shapes = itertools.product((8192, 2048, 32768), (128, 64), (True, False))
    for t, h, causal in bench.selected(list(shapes)):
        yield Square(16384 // t or 1, bench.length(t), 2048 // h, h, causal)


def _pass(kind: str, attend: Attention) -> Callable[..., PyTree]:
    """A function of query, key, value and a direction: an attention, with its gradients or its derivative."""

    def both(q: Array, k: Array, v: Array, d: Array) -> PyTree:
        out, back = jax.vjp(attend, q, k, v)
        return back(d.astype(out.dtype))

    def tangent(q: Array, k: Array, v: Array, d: Array) -> PyTree:
        return jax.jvp(attend, (q, k, v), (d, d, d))

    return {"forward": lambda q, k, v, _: attend(q, k, v), "both": both, "tangent": tangent}[kind]


def _passes(
    bench: Bench,
    label: str,
    attentions: dict[str, Attention],
    kinds: Iterable[str],
    square: Square,
    pairs: float,
    **sizes: Any,
) -> list[Job]:
    """Jobs that time each attention in each kind of pass over `pairs` of queries and keys."""
    arrays = [normal(i, square[:-1]) for i in range(4)]
    jobs = []
    for (name, attend), kind in itertools.product(attentions.items(), kinds):
        if name == EXAMPLE and kind == "both" and square.causal:
            continue  # it has no causal backward

        def figures(seconds: float, kind: str = kind) -> Result:
            rate = square.flop(kind, pairs) / seconds
            return {
                "tflop_per_s": rate / 1e12,
                "of_matmul": bench.share(rate, "matmul", "flop_per_s"),
            }

        fields = {"kernel": name, "pass": kind, **sizes}
        job = bench.timed(f"{label} {kind} {name}", _pass(kind, attend), arrays, figures, **fields)
        jobs.append(job)
    return jobs


def prefill(bench: Bench) -> None:
    """Forward, and forward with backward."""
    for square in squares(bench):
        options = {"is_causal": square.causal}
        attentions = {name: _kernel(name, **options) for name in bench.kernels}
        for name in ("cudnn", *(["xla"] if square.length <= MOST_SCORES else [])):
            attentions[f"jax.nn {name}"] = functools.partial(_dense, implementation=name, **options)
        attentions[EXAMPLE] = functools.partial(_example, **options)
        of_square = square.label, attentions, ("forward", "both"), square, square.pairs
        bench.measure("prefill", _passes(bench, *of_square, **square._asdict()))


def rules(bench: Bench) -> None:
    """Packed documents, and queries and keys at given positions, as in a ring: calls that cuDNN's kernel declines."""
    t = bench.length(8192)
    numbers = jnp.arange(2 * t, dtype=jnp.int32)[None]
    documents = np.searchsorted(np.sort(np.random.default_rng(0).choice(t, 7)), np.arange(t))
    segments = jnp.asarray(documents, jnp.int32)[None]
    # half a sequence of queries and the keys of the other half and of their own, as a ring's devices hold them
    far = jnp.concatenate([numbers[:, : t // 2], numbers[:, t : t + t // 2]], axis=1)
    same = np.tril(documents[:, None] == documents[None])
    calls = {
        "documents": (
            {"query_segment_ids": segments, "key_segment_ids": segments},
            int(same.sum()),
        ),
        "positions": ({"query_positions": far, "key_positions": far}, t * (t + 1) // 2),
    }
    for (rule, (options, pairs)), h in itertools.product(calls.items(), bench.selected((128, 64))):
        kernels = (*bench.kernels, "blockwise")
        attentions = {name: _kernel(name, is_causal=True, **options) for name in kernels}
        square, kinds = Square(1, t, 2048 // h, h, True), ("forward", "both", "tangent")
        of_rule = f"{rule} h{h}", attentions, kinds, square, pairs
        sizes = {"rule": rule, "length": t, "heads": square.heads, "width": h}
        bench.measure("rules", _passes(bench, *of_rule, **sizes))


def _example(query: Array, key: Array, value: Array, is_causal: bool) -> Array:
    """JAX's example of attention in Mosaic GPU, for comparison; it supports only float16."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    tiles: dict[str, Any] = {
        f"block_{name}": 64 for name in ("q", "q_dq", "kv_dq", "q_dkv", "kv_dkv")
    }
    config = attention_mgpu.TuningConfig(
        **tiles, block_kv=128, max_concurrent_steps=2, causal=is_causal, compute_wgs_bwd=2
    )
    half, scale = jnp.float16, query.shape[-1] ** -0.5
    arrays = query.astype(half) * half(scale), key.astype(half), value.astype(half)
    return attention_mgpu.attention(*arrays, config)


def decode(bench: Bench) -> None:
    """Times one query, or a few, over a long cache: many steps in one program, each query made of the last answer."""
    steps = 2 if bench.trial else STEPS_IN_ONE
    attentions = {name: _kernel(name) for name in (*bench.kernels, "decode")}
    for name in ("xla", "cudnn"):
        attentions[f"jax.nn {name}"] = functools.partial(_dense, implementation=name)

    def loop(attend: Attention, q: Array, k: Array, v: Array) -> Array:
        def step(_: Array, q: Array) -> Array:
            return q + attend(q, k, v) * q.dtype.type(1e-3)

        return jax.lax.fori_loop(0, steps, step, q)

    def figures(seconds: float, cached: int) -> Result:
        rate = cached * steps / seconds
        return {
            "us_per_step": seconds / steps * 1e6,
            "bytes_per_s": rate,
            "of_copy": bench.share(rate, "copy", "bytes_per_s"),
            "cached": cached < CACHED,
        }

    for b, t, n, k, keys in bench.selected(CACHES):
        s = bench.length(keys)
        sizes = {"batch": b, "queries": t, "heads": n, "kv_heads": k, "keys": s}
        arrays = [normal(i, x) for i, x in enumerate([(b, t, n, 128), *[(b, s, k, 128)] * 2])]
        of_cache = functools.partial(figures, cached=arrays[1].nbytes + arrays[2].nbytes)
        jobs = []
        for name, attend in attentions.items():
            label = f"b{b} t{t} heads {n}/{k} keys {s} {name}"
            run = functools.partial(loop, attend)
            jobs.append(bench.timed(label, run, arrays, of_cache, kernel=name, **sizes))
        bench.measure("decode", jobs)
        del arrays, jobs


def sweep(bench: Bench) -> None:
    """Times each kernel of `pallas_gpu` with all candidate tiles, and checks their results."""
    for call in trial_calls() if bench.trial else calls(bench.shrink):
        arrays = tuple(call.arrays())
        reference = functools.cache(lambda call=call, x=arrays: jax.jit(program(call, None))(*x))

        def find(run: Callable[..., Any], call=call, arrays=arrays, reference=reference) -> Result:
            differs = difference(reference(), run(*arrays))
            timing = bench.seconds(functools.partial(run, *arrays))
            timing["seconds"] /= call.steps
            return {"good": differs <= TOLERANCE, "difference": differs, **timing}

        jobs = []
        for name, tiles in {OURS: None, **call.tiles(cores_here())}.items():
            fields = {"kernel": "pallas_gpu", "call": call.label, "tiles": name}
            jobs.append(Job(f"{call.label}: {name}", program(call, tiles), arrays, find, fields))
        bench.measure("sweep", jobs)


def torch(bench: Bench) -> None:
    """PyTorch's attention by cuDNN and by FlashAttention, on the shapes of `prefill`."""
    backends = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}
    for square, (name, backend), kind in itertools.product(
        squares(bench), backends.items(), ("forward", "both")
    ):
        label = f"{square.label} {kind} torch {name}"
        if bench.known("torch", label):
            continue
        with bench.guarded("torch", label):
            module: Any = importlib.import_module("torch")
            timing = bench.seconds(_torch_run(module, backend, square, kind == "both"))
            rate = square.flop(kind, square.pairs) / timing["seconds"]
            fields = {"kernel": f"torch {name}", "pass": kind, **square._asdict()}
            fields |= {"torch": module.__version__, "tflop_per_s": rate / 1e12}
            bench.put("torch", label, fields | timing)


def _torch_run(module: Any, backend: str, square: Square, backward: bool) -> Callable[[], Any]:
    attention: Any = importlib.import_module("torch.nn.attention")
    shape, options = square[:-1], {"device": "cuda", "dtype": module.bfloat16}
    *leaves, cotangent = (module.randn(shape, **options).transpose(1, 2) for _ in range(4))
    leaves = [x.requires_grad_(backward) for x in leaves]

    def run() -> Any:
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            out = module.nn.functional.scaled_dot_product_attention(
                *leaves, is_causal=square.causal
            )
        return module.autograd.grad(out, leaves, cotangent) if backward else out

    return run


# The most important come first, in case time runs out.
STEPS: dict[str, Callable[[Bench], None]] = {
    step.__name__: step
    for step in (about, roof, check, decode, prefill, rules, sweep, check_large, torch)
}


def take(bench: Bench) -> int:
    """Takes the steps, in this process. Returns 0, or 1 if the device does not work any more."""
    for name in bench.steps:
        try:
            STEPS[name](bench)
        except Late:
            print("the time is spent", flush=True)
            break
        except Lost:
            print(f"{name}: the device takes no further work from this process", flush=True)
            return 1
        except Exception as reason:  # that of arrays which do not fit, for one
            bench.put("failed", name, failure(reason))
    bench.end()
    return 0


if __name__ == "__main__":
    status = take(Bench(*json.loads(sys.argv[1])))
    sys.stdout.flush()
    os._exit(status)  # a broken context of the device may not come to an end
