"""Steps over caches in a `lax.scan`: each layer appends the tokens of a step to its cache, and attends."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from energy_attn.distributed import KVCache, SequenceParallel, make_mesh

from ..runner import JAX_NN, OURS, PYTORCH, Run, Sides, torch

ONE_DEVICE = "our one device"
KERNELS = {
    f"our {name}": name
    for name in ("decode_cpu", "mosaic_gpu", "pallas_gpu", "decode", "blockwise")
}


class Inputs(NamedTuple):
    """Inputs of every implementation.

    Attributes:
        tokens: `[steps, B, T, N, H]`; their first `K` heads are keys and values, too.
        key: `[B, S, K, H]`, in each layer's cache before the first step.
        value: `[B, S, K, H]`.
        lengths: `[B]` int32, how many of them there are in each row; what follows is overwritten, or not read.
        layers: the number of caches.
    """

    tokens: Array
    key: Array
    value: Array
    lengths: np.ndarray
    layers: int


def draw(
    dtype: str, steps: int, layers: int, B: int, T: int, S: int, L: int, N: int, K: int, H: int
) -> Inputs:
    """Random inputs whose first row has `L` tokens and whose last one leaves room for the steps, at equal distances."""
    room = steps * T
    S = max(S, 2 * room)
    lengths = np.linspace(min(L, S - room), S - room, B).astype(np.int32)
    shapes = (steps, B, T, N, H), (B, S, K, H), (B, S, K, H)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    tokens, key, value = (jax.random.normal(k, x, dtype) for k, x in zip(keys, shapes, strict=True))
    return Inputs(tokens, key, value, lengths, layers)


def filled(inputs: Inputs, parallel: SequenceParallel | None = None) -> list[KVCache]:
    """A cache for each layer, with the tokens before the first step."""
    _, key, value, lengths, layers = inputs
    return [_fill(key, value, lengths, parallel) for _ in range(layers)]


@functools.partial(jax.jit, static_argnums=3)
def _fill(key: Array, value: Array, lengths: Array, parallel: SequenceParallel | None) -> KVCache:
    cache = KVCache.empty(*key.shape, dtype=key.dtype, parallel=parallel)
    return cache.append(key, value, lengths=lengths)


def rewound(caches: list[KVCache], lengths: Array) -> list[KVCache]:
    """Caches that hold as many tokens as before the first step."""
    return [dataclasses.replace(cache, lengths=lengths) for cache in caches]


def in_place(program: Callable[..., tuple[Any, Array]], state: Any, *inputs: Any) -> Run:
    """Runs of a program that takes a state to the next one, and returns its outputs `[steps, B, T, N, H]` in a row.

    The state is donated, so that no run copies the caches, and each run has that of the run before.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def compiled(state: Any, *inputs: Any) -> tuple[Any, Array]:
        state, out = program(state, *inputs)
        steps, B, T, *heads = out.shape
        return state, jnp.moveaxis(out, 0, 1).reshape(B, steps * T, *heads)

    def run() -> Array:
        nonlocal state
        state, out = compiled(state, *inputs)
        return out

    return run


def _ours(
    inputs: Inputs, implementation: str | None = None, parallel: SequenceParallel | None = None
) -> Run:
    K = inputs.key.shape[2]

    def step(caches: list[KVCache], x: Array) -> tuple[list[KVCache], Array]:
        layers = []
        for cache in caches:
            layers.append(cache.append(x[:, :, :K], x[:, :, :K]))
            x = x + layers[-1].attend(x, implementation=implementation).out
        return layers, x

    def program(caches: list[KVCache], lengths: Array, tokens: Array) -> tuple[Any, Array]:
        return lax.scan(step, rewound(caches, lengths), tokens)

    return in_place(program, filled(inputs, parallel), inputs.lengths, inputs.tokens)


def write(stored: Array, new: Array, ends: Array) -> Array:
    """`[B, S, K, H]` with the tokens `[B, T, K, H]` in each row from `ends` `[B]` on."""
    if len(ends) == 1:  # of several rows XLA makes a scatter
        return lax.dynamic_update_slice_in_dim(stored, new, ends[0], axis=1)
    return jax.vmap(functools.partial(lax.dynamic_update_slice_in_dim, axis=0))(stored, new, ends)


def _jax_nn(inputs: Inputs, place: Callable[[Array], Array] = jnp.copy) -> Run:
    S, K = inputs.key.shape[1:3]
    T = inputs.tokens.shape[2]

    def step(carry: Any, x: Array) -> tuple[Any, Array]:
        caches, ends = carry
        options: dict[str, Array] = {"key_value_seq_lengths": ends + 1}
        if T > 1:
            last = ends[:, None] + jnp.arange(T, dtype=jnp.int32)
            options = {"mask": jnp.arange(S, dtype=jnp.int32) <= last[:, None, :, None]}
        layers = []
        for pair in caches:
            layers.append([write(y, x[:, :, :K], ends) for y in pair])
            x = x + jax.nn.dot_product_attention(x, *layers[-1], **options)
        return (layers, ends + T), x

    def program(caches: Any, lengths: Array, tokens: Array) -> tuple[Any, Array]:
        (caches, _), out = lax.scan(step, (caches, lengths), tokens)
        return caches, out

    caches = [[place(inputs.key), place(inputs.value)] for _ in range(inputs.layers)]
    return in_place(program, caches, inputs.lengths, inputs.tokens)


def of_torch(x: Array) -> Any:
    """PyTorch's copy of an array `[..., T, N, H]`: the same layout in memory, in its order of axes."""
    return torch().from_dlpack(x).clone().transpose(-3, -2)


def _torch(inputs: Inputs) -> Run:
    """Over the slots up to the end of the longest row; rows of one length need no mask for single tokens."""
    B, _, K, _ = inputs.key.shape
    T, N = inputs.tokens.shape[2:4]
    tokens = of_torch(inputs.tokens)
    caches = [[of_torch(inputs.key), of_torch(inputs.value)] for _ in range(inputs.layers)]
    lengths, rows = torch().from_numpy(inputs.lengths).long(), torch().arange(B)[:, None]
    attend = functools.partial(
        torch().nn.functional.scaled_dot_product_attention, enable_gqa=N != K
    )

    def run() -> Any:
        outs = []
        for i, x in enumerate(tokens):
            slots = lengths[:, None] + i * T + torch().arange(T)
            end = int(slots.max()) + 1
            mask = None
            if B > 1 or T > 1:
                mask = torch().arange(end) <= slots[:, None, :, None]
            for pair in caches:
                for y in pair:
                    y[rows, :, slots] = x[:, :K].transpose(1, 2)
                x = x + attend(x, *(y[:, :, :end] for y in pair), attn_mask=mask)
            outs.append(x)
        return torch().cat(outs, 2)

    return torch().no_grad()(run)


def sides(dtype: str, **sizes: int) -> Sides:
    """Ours by default and by each kernel, and the peers."""
    inputs = draw(dtype, **sizes)
    return {
        OURS: lambda: _ours(inputs),
        **{
            side: functools.partial(_ours, inputs, implementation=name)
            for side, name in KERNELS.items()
        },
        JAX_NN: lambda: _jax_nn(inputs),
        PYTORCH: lambda: _torch(inputs),
    }


def sharded_sides(dtype: str, devices: int, **sizes: int) -> Sides:
    """Caches whose slots are sharded over devices, ours and those that XLA partitions; and ours on one of them."""
    inputs = draw(dtype, **sizes)
    mesh = make_mesh((devices,), ("device",), devices=jax.devices()[:devices])
    over_slots = NamedSharding(mesh, PartitionSpec(None, "device"))
    parallel = SequenceParallel("device")

    def inside(make: Callable[[], Run], context: Callable[[], Any]) -> Run:
        with context():
            run = make()

        def within() -> Any:
            with context():
                return run()

        return within

    on_mesh = functools.partial(jax.set_mesh, mesh)
    place = functools.partial(jax.device_put, device=over_slots)
    return {
        OURS: lambda: inside(lambda: _ours(inputs, parallel=parallel), on_mesh),
        ONE_DEVICE: lambda: inside(lambda: _ours(inputs), nullcontext),
        JAX_NN: lambda: inside(lambda: _jax_nn(inputs, place), on_mesh),
    }
