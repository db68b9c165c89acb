"""Steps over caches in a `lax.scan`: each layer appends the tokens of a step to its cache, and attends.

A step with a tree of drafts verifies it over the caches, and keeps a path of its nodes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from energy_attn.distributed import KVCache, SequenceParallel, make_mesh
from energy_attn.prefix_tree import Accepted, PrefixTree, commit, tree_decode

from ..runner import JAX_NN, OURS, PYTORCH, Run, Sides, on_mesh, torch

ONE_DEVICE = "our one device"
PATH = np.array([0, 1, 3, 7])  # the nodes of a tree that are kept, the same in each step
KERNELS = {
    f"our {name}": name
    for name in ("decode_cpu", "mosaic_gpu", "pallas_gpu", "decode", "blockwise")
}


class Inputs(NamedTuple):
    """Inputs of every implementation."""

    tokens: Array  # [steps, B, T, N, H]; their first K heads are keys and values, too
    key: Array  # [B, S, K, H], in each layer's cache before the first step
    value: Array  # [B, S, K, H]
    lengths: (
        np.ndarray
    )  # [B] int32, how many of them there are in each row; what follows is not read
    layers: int  # the number of caches


def _draw(
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


def _filled(inputs: Inputs, parallel: SequenceParallel | None = None) -> list[KVCache]:
    """A cache for each layer, with the tokens before the first step."""
    _, key, value, lengths, layers = inputs
    return [_fill(key, value, lengths, parallel) for _ in range(layers)]


@functools.partial(jax.jit, static_argnums=3)
def _fill(key: Array, value: Array, lengths: Array, parallel: SequenceParallel | None) -> KVCache:
    cache = KVCache.empty(*key.shape, dtype=key.dtype, parallel=parallel)
    return cache.append(key, value, lengths=lengths)


def _in_place(program: Callable[..., tuple[Any, Array]], state: Any, *inputs: Any) -> Run:
    """Returns runs of a program from a state to the next one, with its outputs `[steps, B, T, N, H]` in a row.

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


def _over_caches(
    step: Callable[..., Any], inputs: Inputs, parallel: SequenceParallel | None = None
) -> Run:
    """Runs of a step from a `KVCache` of each layer; each run begins with as many tokens as the first."""

    def program(caches: list[KVCache], lengths: Array, tokens: Array) -> tuple[Any, Array]:
        rewound = [dataclasses.replace(cache, lengths=lengths) for cache in caches]
        return lax.scan(step, rewound, tokens)

    return _in_place(program, _filled(inputs, parallel), inputs.lengths, inputs.tokens)


def _over_arrays(
    step: Callable[..., Any], inputs: Inputs, place: Callable[[Array], Array] = jnp.copy
) -> Run:
    """Runs of a step from keys and values of each layer and the lengths of their rows."""

    def program(caches: Any, lengths: Array, tokens: Array) -> tuple[Any, Array]:
        (caches, _), out = lax.scan(step, (caches, lengths), tokens)
        return caches, out

    caches = [[place(inputs.key), place(inputs.value)] for _ in range(inputs.layers)]
    return _in_place(program, caches, inputs.lengths, inputs.tokens)


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

    return _over_caches(step, inputs, parallel)


def _write(stored: Array, new: Array, ends: Array) -> Array:
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
            layers.append([_write(y, x[:, :, :K], ends) for y in pair])
            x = x + jax.nn.dot_product_attention(x, *layers[-1], **options)
        return (layers, ends + T), x

    return _over_arrays(step, inputs, place)


def _of_torch(x: Array) -> Any:
    """PyTorch's copy of an array `[..., T, N, H]`: the same layout in memory, in its order of axes."""
    return torch().from_dlpack(x).clone().transpose(-3, -2)


def _torch(inputs: Inputs) -> Run:
    """Over the slots up to the end of the longest row; rows of one length need no mask for single tokens."""
    B, _, K, _ = inputs.key.shape
    T, N = inputs.tokens.shape[2:4]
    tokens = _of_torch(inputs.tokens)
    caches = [[_of_torch(inputs.key), _of_torch(inputs.value)] for _ in range(inputs.layers)]
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


def _kept(out: Array) -> Array:
    """`PATH`, as a function of the outputs: a program that verifies writes after it has read."""
    return jnp.asarray(PATH, jnp.int32) + (out[0, 0, 0, 0] == jnp.inf)


def _binary(nodes: int) -> PrefixTree:
    """The tree in which node `n` has the children `2n + 1` and `2n + 2`."""
    parent = (np.arange(nodes, dtype=np.int32) - 1) // 2
    tokens = jnp.arange(nodes, dtype=jnp.int32)
    return PrefixTree.from_parents(tokens[None], jnp.asarray(parent)[None], nodes.bit_length())


def _our_drafts(inputs: Inputs, tree: PrefixTree, implementation: str | None = None) -> Run:
    K = inputs.key.shape[2]
    count, last = jnp.full(1, len(PATH), jnp.int32), jnp.zeros(1, jnp.int32)

    def step(caches: list[KVCache], x: Array) -> tuple[list[KVCache], Array]:
        layers = []
        for cache in caches:
            new = x[:, :, :K]
            options: dict[str, Any] = {"tree": tree, "cache": cache}
            x = x + tree_decode(x, new, new, **options, implementation=implementation).out
            accepted = Accepted(_kept(x)[None], count, last)
            layers.append(commit(cache, accepted, new, new))
        return layers, x

    return _over_caches(step, inputs)


def _jax_nn_drafts(inputs: Inputs, tree: PrefixTree) -> Run:
    """The nodes are written behind the tokens of the cache, and then the path over them."""
    S, K = inputs.key.shape[1:3]

    def step(carry: Any, x: Array) -> tuple[Any, Array]:
        caches, ends = carry
        context = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32) < ends[0], (x.shape[1], S))
        mask = lax.dynamic_update_slice_in_dim(context, tree.mask[0], ends[0], axis=1)
        layers = []
        for pair in caches:
            new = x[:, :, :K]
            drafted = [_write(y, new, ends) for y in pair]
            x = x + jax.nn.dot_product_attention(x, *drafted, mask=mask[None, None])
            kept = _kept(x)
            layers.append([_write(y, new[:, kept], ends) for y in drafted])
        return (layers, ends + len(PATH)), x

    return _over_arrays(step, inputs)


def _torch_drafts(inputs: Inputs, tree: PrefixTree) -> Run:
    """The loop in PyTorch, which reads the slots up to the last node."""
    K, (nodes, N) = inputs.key.shape[2], inputs.tokens.shape[2:4]
    tokens = _of_torch(inputs.tokens)
    caches = [[_of_torch(inputs.key), _of_torch(inputs.value)] for _ in range(inputs.layers)]
    visible, path = torch().from_numpy(np.array(tree.mask[0])), torch().from_numpy(PATH)
    attend = functools.partial(
        torch().nn.functional.scaled_dot_product_attention, enable_gqa=N != K
    )

    def run() -> Any:
        outs, end = [], int(inputs.lengths[0])
        for x in tokens:
            last = end + nodes
            mask = torch().cat([torch().ones(nodes, end, dtype=torch().bool), visible], 1)
            for pair in caches:
                new = x[:, :K]
                for y in pair:
                    y[:, :, end:last] = new
                x = x + attend(x, *(y[:, :, :last] for y in pair), attn_mask=mask)
                for y in pair:
                    y[:, :, end : end + len(PATH)] = new[:, :, path]
            outs.append(x)
            end += len(PATH)
        return torch().cat(outs, 2)

    return torch().no_grad()(run)


def sides(dtype: str, **sizes: int) -> Sides:
    """Ours by default and by each kernel, and the peers."""
    return _of_each(_ours, _jax_nn, _torch, _draw(dtype, **sizes))


def drafts_sides(dtype: str, **sizes: int) -> Sides:
    """Ours by default and by each kernel, and the peers, with a binary tree of drafts in each step."""
    return _of_each(
        _our_drafts, _jax_nn_drafts, _torch_drafts, _draw(dtype, **sizes), _binary(sizes["T"])
    )


def _of_each(
    ours: Callable[..., Run], jax_nn: Callable[..., Run], of_torch: Callable[..., Run], *args: Any
) -> Sides:
    kernels = {
        side: functools.partial(ours, *args, implementation=name) for side, name in KERNELS.items()
    }
    peers = {JAX_NN: lambda: jax_nn(*args), PYTORCH: lambda: of_torch(*args)}
    return {OURS: lambda: ours(*args), **kernels, **peers}


def sharded_sides(dtype: str, devices: int, **sizes: int) -> Sides:
    """Caches whose slots are sharded over devices, ours and those that XLA partitions; and ours on one of them."""
    inputs = _draw(dtype, **sizes)
    mesh = make_mesh((devices,), ("device",), devices=jax.devices()[:devices])
    over_slots = NamedSharding(mesh, PartitionSpec(None, "device"))
    parallel = SequenceParallel("device")

    place = functools.partial(jax.device_put, device=over_slots)
    return {
        OURS: lambda: on_mesh(mesh, lambda: _ours(inputs, parallel=parallel)),
        ONE_DEVICE: lambda: _ours(inputs),
        JAX_NN: lambda: on_mesh(mesh, lambda: _jax_nn(inputs, place)),
    }
