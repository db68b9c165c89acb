"""The steps `prefill`, `rules` and `decode`: times of kernels, of other libraries and of the ceilings."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ._bench import Bench, Job, normal, out_of
from ._record import Result

STEPS_IN_ONE = 50  # decode steps of one program
CACHED = 60e6  # bytes: keys and values this small may stay in a cache of the GPU
MOST_SCORES = 4096  # rows of which XLA can hold all scores
EXAMPLE = "JAX's attention_mgpu, float16"

Attention = Callable[..., Array]
_dense = jax.nn.dot_product_attention


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

    def flop(self, backward: bool) -> float:
        """Floating-point operations of a pass, with the backward if asked; half of them if causal."""
        b, t, n, h, causal = self
        return 4 * b * t * t * n * h * (0.5 if causal else 1) * (3.5 if backward else 1)


def squares(bench: Bench) -> Iterator[Square]:
    """16k tokens of 2048 features, or one sequence if that is longer."""
    shapes = itertools.product((8192, 2048, 32768), (128, 64), (True, False))
    for t, h, causal in bench.selected(list(shapes)):
        yield Square(16384 // t or 1, bench.length(t), 2048 // h, h, causal)


def prefill(bench: Bench) -> None:
    """Forward, and forward with backward."""
    for square in squares(bench):
        arrays = [normal(i, square[:-1]) for i in range(4)]
        attentions: dict[str, Attention] = {
            name: functools.partial(out_of, implementation=name) for name in bench.kernels
        }
        attentions["jax.nn cudnn"] = functools.partial(_dense, implementation="cudnn")
        if square.length <= MOST_SCORES:
            attentions["jax.nn xla"] = functools.partial(_dense, implementation="xla")
        attentions[EXAMPLE] = _example
        jobs = [
            job
            for name, attend in attentions.items()
            for job in _passes(
                bench, square, arrays, name, functools.partial(attend, is_causal=square.causal)
            )
        ]
        bench.measure("prefill", jobs)


def rules(bench: Bench) -> None:
    """Packed documents, and queries and keys at given positions, as in a ring: calls that cuDNN's kernel declines."""
    top = bench.ceiling("matmul", "flop_per_s")
    t = bench.length(8192)
    numbers = jnp.arange(2 * t, dtype=jnp.int32)[None]
    documents = np.searchsorted(np.sort(np.random.default_rng(0).choice(t, 7)), np.arange(t))
    segments = jnp.asarray(documents, jnp.int32)[None]
    # half a sequence of queries and the keys of the other half and of their own, as a ring's devices hold them
    far = jnp.concatenate([numbers[:, : t // 2], numbers[:, t : t + t // 2]], axis=1)
    calls = {
        "documents": {"query_segment_ids": segments, "key_segment_ids": segments},
        "positions": {"query_positions": far, "key_positions": far},
    }
    sizes = [(2048 // h, h) for h in bench.selected((128, 64))]
    for (name, options), (n, h) in itertools.product(calls.items(), sizes):
        arrays = [normal(i, (1, t, n, h)) for i in range(4)]
        same = documents[:, None] == documents[None] if name == "documents" else True
        pairs = int(np.tril(np.broadcast_to(same, (t, t))).sum())
        about = {"rule": name, "length": t, "heads": n, "width": h}
        jobs = []
        for kernel in (*bench.kernels, "blockwise"):
            attend = functools.partial(out_of, implementation=kernel, is_causal=True, **options)

            def both(q: Array, k: Array, v: Array, d: Array, attend: Attention = attend) -> Any:
                return jax.vjp(attend, q, k, v)[1](d)

            def moved(q: Array, k: Array, v: Array, d: Array, attend: Attention = attend) -> Any:
                return jax.jvp(attend, (q, k, v), (d, d, d))

            for kind, run, inputs, products in (
                ("forward", attend, arrays[:3], 1),
                ("both", both, arrays, 3.5),
                ("tangent", moved, arrays, 2.5),
            ):

                def figures(seconds: float, flop: float = 4 * pairs * n * h * products) -> Result:
                    rate = flop / seconds
                    return {"tflop_per_s": rate / 1e12, "of_matmul": rate / top if top else None}

                label = f"{name} h{h} {kind} {kernel}"
                jobs.append(
                    bench.timed(
                        label, run, inputs, figures, kernel=kernel, **{"pass": kind}, **about
                    )
                )
        bench.measure("rules", jobs)


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


def _passes(
    bench: Bench, square: Square, arrays: list[Array], name: str, attend: Attention
) -> Iterator[Job]:
    top = bench.ceiling("matmul", "flop_per_s")

    def forward_backward(q: Array, k: Array, v: Array, d: Array) -> tuple[Array, ...]:
        out, back = jax.vjp(attend, q, k, v)
        return back(d.astype(out.dtype))

    passes = {"forward": (attend, arrays[:3]), "both": (forward_backward, arrays)}
    for kind, (run, inputs) in passes.items():
        if kind == "both" and name == EXAMPLE and square.causal:
            continue  # it has no causal backward

        def figures(seconds: float, kind: str = kind) -> Result:
            rate = square.flop(kind == "both") / seconds
            return {"tflop_per_s": rate / 1e12, "of_matmul": rate / top if top else None}

        about = {"kernel": name, "pass": kind, **square._asdict()}
        yield bench.timed(f"{square.label} {kind} {name}", run, inputs, figures, **about)


# Caches of width 128: the batch, queries, heads, key heads and keys.
CACHES = (
    *((1, 1, 32, 8, 2**16), (1, 1, 32, 8, 2**20), (1, 1, 8, 1, 2**18), (1, 1, 8, 1, 2**20)),
    *((1, 16, 32, 8, 2**16), (1, 9, 32, 8, 2**16), (32, 1, 32, 8, 2**13), (1, 1, 128, 1, 2**18)),
    *((1, 1, 32, 8, 2**13),),
)


def decode(bench: Bench) -> None:
    """Times one query, or a few, over a long cache, and a copy of as much memory."""
    attentions: dict[str, Attention] = {
        name: functools.partial(out_of, implementation=name) for name in (*bench.kernels, "decode")
    }
    for name in ("xla", "cudnn"):
        attentions[f"jax.nn {name}"] = functools.partial(_dense, implementation=name)
    for b, t, n, k, keys in bench.selected(CACHES):
        s = bench.length(keys)
        sizes = {"batch": b, "queries": t, "heads": n, "kv_heads": k, "keys": s}
        shapes = (b, t, n, 128), (b, s, k, 128), (b, s, k, 128)
        arrays = [normal(i, shape) for i, shape in enumerate(shapes)]
        label = f"b{b} t{t} heads {n}/{k} keys {s}"
        jobs = [
            _steps(bench, arrays, f"{label} {name}", attend, kernel=name, **sizes)
            for name, attend in attentions.items()
        ]
        bench.measure("decode", jobs)
        del arrays, jobs


def _steps(
    bench: Bench, arrays: list[Array], label: str, attend: Attention, **about: object
) -> Job:
    """Many decode steps in one program, each query made of the last answer."""
    top = bench.ceiling("copy", "bytes_per_s")
    steps = 2 if bench.trial else STEPS_IN_ONE
    moved = arrays[1].nbytes + arrays[2].nbytes

    def run(q: Array, k: Array, v: Array) -> Array:
        def step(_: Array, q: Array) -> Array:
            return q + attend(q, k, v) * q.dtype.type(1e-3)

        return jax.lax.fori_loop(0, steps, step, q)

    def figures(seconds: float) -> Result:
        rate = moved * steps / seconds
        return {
            "us_per_step": seconds / steps * 1e6,
            "bytes_per_s": rate,
            "of_copy": rate / top if top else None,
            "cached": moved < CACHED,
        }

    return bench.timed(label, run, arrays, figures, **about)
