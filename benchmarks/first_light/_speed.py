"""The steps `prefill` and `decode`: every kernel beside jax.nn, JAX's example in Mosaic GPU, and the ceilings."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._bench import Bench, Job, normal, out_of
from ._record import Result

STEPS_IN_ONE = 50  # decode steps of one program
CACHED = 60e6  # bytes: keys and values this small may stay in a cache of the GPU
MOST_SCORES = 4096  # rows of which XLA can hold all scores


class Square(NamedTuple):
    """As many queries as keys."""

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

    def flop(self, both: bool) -> float:
        """Of the forward pass, or of it and the backward; of causal attention, half of the products."""
        b, t, n, h, causal = self
        return 4 * b * t * t * n * h * (0.5 if causal else 1) * (3.5 if both else 1)

    def arrays(self, count: int) -> list[Array]:
        """So many random arrays `[B, T, N, H]`."""
        return [normal(i, self[:1] + self[1:4]) for i in range(count)]


def squares(bench: Bench) -> Iterator[Square]:
    """16k tokens of 2048 features, or one sequence if that is longer."""
    shapes = itertools.product((8192, 2048, 32768), (128, 64), (True, False))
    for t, h, causal in bench.some(list(shapes)):
        yield Square(16384 // t or 1, bench.length(t), 2048 // h, h, causal)


def prefill(bench: Bench) -> None:
    """Forward, and forward with backward."""
    for square in squares(bench):
        arrays = square.arrays(4)
        peers = _peers(bench, square).items()
        bench.measure(
            "prefill", [x for name, f in peers for x in _passes(bench, square, arrays, name, f)]
        )


def _peers(bench: Bench, square: Square) -> dict[str, Callable[..., Array]]:
    """Attention of `[B, T, N, H]` by name; what cannot run says so when it is compiled."""
    causal, dense = square.causal, jax.nn.dot_product_attention
    found: dict[str, Callable[..., Array]] = {
        name: functools.partial(out_of, implementation=name, is_causal=causal)
        for name in bench.kernels
    }
    found["jax.nn cudnn"] = functools.partial(dense, implementation="cudnn", is_causal=causal)
    if square.length <= MOST_SCORES:
        found["jax.nn xla"] = functools.partial(dense, implementation="xla", is_causal=causal)
    return found | {EXAMPLE: functools.partial(_example, causal)}


EXAMPLE = "JAX's attention_mgpu, float16"


def _example(causal: bool, query: Array, key: Array, value: Array) -> Array:
    """JAX's example of attention in Mosaic GPU, as a yardstick: it knows float16 alone."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    half, scale = jnp.float16, query.shape[-1] ** -0.5
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=128,
        max_concurrent_steps=2,
        causal=causal,
        block_q_dq=64,
        block_kv_dq=64,
        block_q_dkv=64,
        block_kv_dkv=64,
        compute_wgs_bwd=2,
    )
    arrays = query.astype(half) * half(scale), key.astype(half), value.astype(half)
    return attention_mgpu.attention(*arrays, config)


def _passes(
    bench: Bench, square: Square, arrays: list[Array], name: str, attend: Callable[..., Array]
) -> Iterator[Job]:
    top = bench.ceiling("matmul", "flop_per_s")

    def both(q: Array, k: Array, v: Array, d: Array) -> tuple[Array, ...]:
        out, back = jax.vjp(attend, q, k, v)
        return back(d.astype(out.dtype))

    passes = {"forward": (attend, arrays[:3]), "both": (both, arrays)}
    for which, (run, given) in passes.items():
        if which == "both" and name == EXAMPLE and square.causal:
            continue  # it has no causal backward

        def figures(seconds: float, which: str = which) -> Result:
            rate = square.flop(which == "both") / seconds
            return {"tflop_per_s": rate / 1e12, "of_matmul": rate / top if top else None}

        about = {"kernel": name, "pass": which, **square._asdict()}
        yield bench.timed(f"{square.label} {which} {name}", run, given, figures, **about)


class Cache(NamedTuple):
    """A few queries and many keys, of width 128."""

    batch: int
    queries: int
    heads: int
    kv_heads: int
    keys: int

    @property
    def label(self) -> str:
        """The sizes, in one line."""
        b, t, n, k, s = self
        return f"b{b} t{t} heads {n}/{k} keys {s}"

    def arrays(self) -> list[Array]:
        """Query, key and value."""
        b, t, n, k, s = self
        return [normal(i, x) for i, x in enumerate(((b, t, n, 128), *[(b, s, k, 128)] * 2))]


# The batch, queries, heads, key heads and keys.
CACHES = (
    *((1, 1, 32, 8, 2**16), (1, 1, 32, 8, 2**20), (1, 1, 8, 1, 2**18), (1, 1, 8, 1, 2**20)),
    *((1, 16, 32, 8, 2**16), (1, 9, 32, 8, 2**16), (32, 1, 32, 8, 2**13), (1, 1, 128, 1, 2**18)),
    *((1, 1, 32, 8, 2**13),),
)


def decode(bench: Bench) -> None:
    """One query, or a few, and a long cache: beside copying memory."""
    dense = jax.nn.dot_product_attention
    attentions: dict[str, Callable[..., Array]] = {
        name: functools.partial(out_of, implementation=name) for name in (*bench.kernels, "decode")
    }
    for name in ("xla", "cudnn"):
        attentions[f"jax.nn {name}"] = functools.partial(dense, implementation=name)
    for sizes in bench.some(CACHES):
        cache = Cache(*sizes)._replace(keys=bench.length(sizes[-1]))
        arrays = cache.arrays()
        jobs = [
            decoded(bench, cache, arrays, f"{cache.label} {name}", attend, kernel=name)
            for name, attend in attentions.items()
        ]
        bench.measure("decode", jobs)
        del arrays, jobs


def decoded(
    bench: Bench,
    cache: Cache,
    arrays: list[Array],
    label: str,
    attend: Callable[..., Array],
    **about: object,
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

    return bench.timed(label, run, arrays, figures, **about, **cache._asdict())
