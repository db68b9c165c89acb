"""`python -m energy_attn reproducible`: whether rows are bitwise equal in all computations, and the cost."""

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from energy_attn.distributed import (
    KVCache,
    SequenceParallel,
    make_mesh,
    shard_sequence,
    unshard_sequence,
)
from energy_attn.kernels.internal import FORMAT

from .. import __version__, attention
from ..models import Llama, LlamaConfig
from ._command import byte_llama, held_out_text, refuse, table

LENGTH, STEPS, HEADS, KEY_HEADS, WIDTH = 1024, 64, 8, 2, 64
FEW = 96  # tokens of a prompt of one leaf
_ROUNDS = 5


class Call(NamedTuple):
    """Query, key and value of one prompt, `[1, T, N, H]`, and a cotangent."""

    query: Array
    key: Array
    value: Array
    weight: Array


class EqualBits(NamedTuple):
    """The share of numbers with the same bits in another computation, with the option and without."""

    way: str
    reproducible: float
    plain: float


class Cost(NamedTuple):
    """The time of a program with the option, in seconds, and without."""

    program: str
    reproducible: float
    plain: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `reproducible`."""
    add = parser.add_argument
    add("--dtype", default="float32", choices=("float16", "bfloat16", "float32", "float64"))
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    add("--digest", action="store_true", help="print only the digest of the bits")


def run(args: argparse.Namespace) -> int:
    """Prints the share of equal bits and the cost; returns 0 if all bits are equal, 1 if not, 2 if it cannot run."""
    if args.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    call = _draw(args.dtype)
    if args.digest:
        print(_digest(call))
        return 0
    if args.json and not args.json.parent.is_dir():
        wanted = "a path in a folder that exists"
        return refuse("reproducible", f"--json wanted {wanted}, got {args.json}")
    machine = f"{jax.default_backend()}, {os.cpu_count()} cores, {jax.device_count()} devices"
    print(
        f"energy_attn {__version__}, format {FORMAT}, jax {jax.__version__}, {args.dtype}, {machine}\n"
    )
    lines = [*_lines(call), _one_core(call, args.dtype)]
    print(_table(lines), flush=True)
    programs = {
        "a prompt": _attend,
        f"{STEPS} steps of a scan": _steps,
        "gradients of a prompt": _gradients,
    }
    costs = [Cost(name, *_times(f, call)) for name, f in programs.items()]
    print("\nand what it costs, as a multiple of the time without\n")
    for cost in costs:
        print(
            f"{cost.program:<36} {cost.reproducible / cost.plain:6.2f}   ({1e3 * cost.plain:.2f} ms)"
        )
    if args.json:
        report = {"format": FORMAT, "jax": jax.__version__, "machine": machine, "dtype": args.dtype}
        tables = {"bits": lines, "costs": costs}
        report |= {name: [x._asdict() for x in rows] for name, rows in tables.items()}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    broken = [line.way for line in lines if line.reproducible < 1]
    for way in broken:
        print(f"energy_attn reproducible: other bits: {way}", file=sys.stderr)
    return 1 if broken else 0


def _draw(dtype: str) -> Call:
    rng = np.random.default_rng(0)
    heads = HEADS, KEY_HEADS, KEY_HEADS, HEADS
    return Call._make(jnp.asarray(rng.standard_normal((1, LENGTH, n, WIDTH)), dtype) for n in heads)


def _attend(call: Call, reproducible: bool, **options: Any) -> Any:
    return attention(*call[:3], is_causal=True, reproducible=reproducible, **options)


def _gradients(call: Call, reproducible: bool, **options: Any) -> Any:
    def loss(query: Array, key: Array, value: Array) -> Array:
        result = _attend(Call(query, key, value, call.weight), reproducible, **options)
        out, *energies = result if "return_energy" in options else (result,)
        total = jnp.vdot(out.astype(jnp.float32), call.weight.astype(jnp.float32))
        return total + sum(0.01 * jnp.square(energy).sum() for energy in energies)

    return jax.grad(loss, (0, 1, 2))(*call[:3])


def _gradients_of_few(call: Call, reproducible: bool) -> Any:
    few = jax.tree.map(lambda x: x[:, :FEW], call)
    return _gradients(few, reproducible, return_energy=True)


def _lines(call: Call) -> list[EqualBits]:
    """Compares other computations of the prompt's last rows, or of its gradients, with one call on one device."""
    ways = {**_of_rows(call), **_over_devices(call), **_of_model()}
    shares: dict[str, list[float]] = {}
    for reproducible in (True, False):
        computed = {of for of, _ in ways.values()}
        whole = {f: jax.jit(partial(f, reproducible=reproducible))(call) for f in computed}
        for name, (of, way) in ways.items():
            shares.setdefault(name, []).append(_equal(way(reproducible), whole[of]))
    return [EqualBits(name, *pair) for name, pair in shares.items()]


def _equal(result: PyTree[Array], expected: PyTree[Array]) -> float:
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    same = [(_bits(x) == _bits(y[:, -x.shape[1] :])).reshape(-1) for x, y in pairs]
    return float(np.mean(np.concatenate(same)))


def _bits(x: Array) -> np.ndarray:
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


# A function of a prompt, and another computation of its last rows, with the option or without.
Way = tuple[Callable[..., Any], Callable[[bool], Any]]


def _of_rows(call: Call) -> dict[str, Way]:
    """Computations by chunks, steps, batches and transformations."""
    rng = np.random.default_rng(1)
    others = jax.tree.map(lambda x: jnp.concatenate([x[:, ::-1], x, -x]), call)
    order = rng.permutation(LENGTH)
    places = {
        "query_positions": jnp.arange(LENGTH, dtype=jnp.int32)[None],
        "key_positions": jnp.asarray(order[None], jnp.int32),
    }
    shuffled = call._replace(key=call.key[:, order], value=call.value[:, order])

    def chunks(reproducible: bool) -> Any:
        ends = np.cumsum([0, 7, 93, 500, LENGTH - 600]).tolist()
        return jnp.concatenate(
            [_chunk(call, *x, reproducible) for x in itertools.pairwise(ends)], 1
        )

    def batch(reproducible: bool, f: Callable = _attend) -> Any:
        result = jax.jit(partial(f, reproducible=reproducible))(others)
        return jax.tree.map(lambda x: x[1:2], result)

    def mapped(reproducible: bool) -> Any:
        run = jax.vmap(partial(_attend, reproducible=reproducible))
        return jax.jit(run)(jax.tree.map(lambda x: x[:, None], others))[1]

    def other_order(reproducible: bool) -> Any:
        return jax.jit(partial(_attend, reproducible=reproducible, **places))(shuffled)

    def remat(reproducible: bool) -> Any:
        return jax.jit(jax.checkpoint(partial(_gradients, reproducible=reproducible)))(call)

    return {
        "in chunks": (_attend, chunks),
        "step by step, in a scan over a cache": (_attend, partial(_steps, call)),
        "in a batch": (_attend, batch),
        "by vmap": (_attend, mapped),
        "without jit": (_attend, partial(_attend, call)),
        "keys in another order": (_attend, other_order),
        "gradients in a batch": (_gradients, partial(batch, f=_gradients)),
        "gradients by jax.checkpoint": (_gradients, remat),
        "gradients of energies in a batch": (
            _gradients_of_few,
            partial(batch, f=_gradients_of_few),
        ),
    }


@partial(jax.jit, static_argnums=(1, 2, 3))
def _chunk(call: Call, begin: int, end: int, reproducible: bool) -> Array:
    places = {
        "query_positions": jnp.arange(begin, end, dtype=jnp.int32)[None],
        "key_positions": jnp.arange(end, dtype=jnp.int32)[None],
    }
    query, key, value = call.query[:, begin:end], call.key[:, :end], call.value[:, :end]
    return _attend(Call(query, key, value, call.weight), reproducible, **places)


@partial(jax.jit, static_argnums=1)
def _steps(call: Call, reproducible: bool) -> Array:
    first = LENGTH - STEPS
    cache = KVCache.empty(1, 2 * LENGTH, KEY_HEADS, WIDTH, dtype=call.key.dtype)
    cache = cache.append(call.key[:, :first], call.value[:, :first])

    def step(cache: KVCache, new: tuple[Array, ...]) -> tuple[KVCache, Array]:
        query, key, value = (x[None, None] for x in new)
        cache = cache.append(key, value)
        return cache, cache.attend(query, reproducible=reproducible).out[0, 0]

    tail = tuple(x[0, first:] for x in call[:3])
    return lax.scan(step, cache, tail)[1][None]


def _over_devices(call: Call) -> dict[str, Way]:
    devices = jax.device_count()
    if devices == 1:
        return {}

    def over(f: Callable, method: str, layout: str, reproducible: bool) -> Any:
        parallel = SequenceParallel("device", method, layout=layout)  # pyright: ignore[reportArgumentType]
        with jax.set_mesh(make_mesh((devices,), ("device",))):
            sharded = jax.tree.map(lambda x: shard_sequence(x, parallel), call)
            result = jax.jit(partial(f, reproducible=reproducible, parallel=parallel))(sharded)
            return jax.tree.map(lambda x: unshard_sequence(x, parallel), result)

    kinds = ["tree", "ring, zigzag", "gather, striped"]
    kinds += ["ulysses"] if HEADS % devices == 0 else []
    ways: dict[str, Way] = {}
    for kind in kinds:
        method, _, layout = kind.partition(", ")
        way = partial(over, _attend, method, layout or "contiguous")
        ways[f"{devices} devices, {kind}"] = _attend, way
    ways["gradients over the devices"] = _gradients, partial(over, _gradients, "ring", "zigzag")
    return ways


def _of_model() -> dict[str, Way]:
    """Logits of the byte-level Llama that comes with the library, and of a random one of odd widths."""
    model, text = byte_llama(), jnp.asarray(held_out_text()[None, :LENGTH], jnp.int32)
    first = LENGTH - STEPS

    def read(call: Call, reproducible: bool) -> Array:
        del call
        return model(text, reproducible=reproducible).logits

    @partial(jax.jit, static_argnums=0)
    def steps(reproducible: bool) -> Array:
        cache: Any = model.empty_cache(1, 2 * LENGTH)
        cache = model.prefill(text[:, :first], cache, reproducible=reproducible).cache

        def step(cache: PyTree, token: Array) -> tuple[PyTree, Array]:
            out = model(token[None, None], cache=cache, reproducible=reproducible)
            return out.cache, out.logits[0, 0]

        return lax.scan(step, cache, text[0, first:])[1][None]

    def batch(reproducible: bool) -> Array:
        others = jnp.concatenate([text[:, ::-1], text])
        return jax.jit(partial(model, reproducible=reproducible))(others).logits[1:]

    # no width is a multiple of a vector's
    config = LlamaConfig(1001, 100, 300, 1, 2, 1, head_dim=50)
    odd = Llama(config, key=jax.random.key(0))

    def few(call: Call, reproducible: bool) -> Array:
        del call
        return odd(text[:, :32], reproducible=reproducible).logits

    def among_others(reproducible: bool) -> Array:
        return jax.jit(partial(odd, reproducible=reproducible))(text).logits[:, :32]

    return {
        "a decoder's logits, step by step": (read, steps),
        "a decoder's logits in a batch": (read, batch),
        "few tokens of a decoder of odd widths": (few, among_others),
    }


def _one_core(call: Call, dtype: str) -> EqualBits:
    command = [sys.executable, "-m", "energy_attn", "reproducible", "--digest", "--dtype", dtype]
    done = subprocess.run(
        command, env=os.environ | {"NPROC": "1"}, capture_output=True, text=True, check=True
    )
    digests = [dict(x.split() for x in text.splitlines()) for text in (_digest(call), done.stdout)]
    shares = (float(digests[0][x] == digests[1][x]) for x in ("with", "without"))
    return EqualBits("another process, one thread", *shares)


def _digest(call: Call) -> str:
    lines = []
    for name, reproducible in (("with", True), ("without", False)):
        results = [
            jax.jit(partial(f, reproducible=reproducible))(call) for f in (_attend, _gradients)
        ]
        content = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(results))
        lines.append(f"{name} {hashlib.sha256(content).hexdigest()}")
    return "\n".join(lines)


def _table(lines: list[EqualBits]) -> str:
    rows = [("", "reproducible=True", "without")]
    for line in lines:
        share = "✓ all bits" if line.reproducible == 1 else f"✗ {line.reproducible:.1%}"
        rows.append((line.way, share, f"{line.plain:.1%}"))
    return "\n".join(table(rows))


def _times(f: Callable[..., Any], call: Call) -> tuple[float, float]:
    run = {x: jax.jit(f, static_argnums=1).lower(call, x).compile() for x in (True, False)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * _ROUNDS + 2):
        began = time.perf_counter()
        jax.block_until_ready(run[turn % 2 == 0](call))
        seconds[turn % 2 == 0].append(time.perf_counter() - began)
    return statistics.median(seconds[True][1:]), statistics.median(seconds[False][1:])
