"""Loops that verify a tree of drafts over caches in a `lax.scan`, and keep a path in each step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from energy_attn.distributed import KVCache
from energy_attn.prefix_tree import Accepted, PrefixTree, commit, tree_decode

from ..runner import JAX_NN, OURS, PYTORCH, Run, Sides, torch
from ._steps import KERNELS, Inputs, draw, filled, in_place, of_torch, rewound, write

PATH = np.array([0, 1, 3, 7])  # the nodes that are kept, the same in each step


def _kept(out: Array) -> Array:
    """`PATH`, as a function of the outputs: a program that verifies writes after it has read."""
    return jnp.asarray(PATH, jnp.int32) + (out[0, 0, 0, 0] == jnp.inf)


def _binary(nodes: int) -> PrefixTree:
    """The tree in which node `n` has the children `2n + 1` and `2n + 2`."""
    parent = (np.arange(nodes, dtype=np.int32) - 1) // 2
    tokens = jnp.arange(nodes, dtype=jnp.int32)
    return PrefixTree.from_parents(tokens[None], jnp.asarray(parent)[None], nodes.bit_length())


def _ours(inputs: Inputs, tree: PrefixTree, implementation: str | None = None) -> Run:
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

    def program(caches: list[KVCache], lengths: Array, tokens: Array) -> tuple[Any, Array]:
        return lax.scan(step, rewound(caches, lengths), tokens)

    return in_place(program, filled(inputs), inputs.lengths, inputs.tokens)


def _jax_nn(inputs: Inputs, tree: PrefixTree) -> Run:
    """The nodes are written behind the tokens of the cache, and then the path over them."""
    S, K = inputs.key.shape[1:3]

    def step(carry: Any, x: Array) -> tuple[Any, Array]:
        caches, ends = carry
        context = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32) < ends[0], (x.shape[1], S))
        mask = lax.dynamic_update_slice_in_dim(context, tree.mask[0], ends[0], axis=1)
        layers = []
        for pair in caches:
            new = x[:, :, :K]
            drafted = [write(y, new, ends) for y in pair]
            x = x + jax.nn.dot_product_attention(x, *drafted, mask=mask[None, None])
            kept = _kept(x)
            layers.append([write(y, new[:, kept], ends) for y in drafted])
        return (layers, ends + len(PATH)), x

    def program(caches: Any, lengths: Array, tokens: Array) -> tuple[Any, Array]:
        (caches, _), out = lax.scan(step, (caches, lengths), tokens)
        return caches, out

    caches = [[jnp.copy(inputs.key), jnp.copy(inputs.value)] for _ in range(inputs.layers)]
    return in_place(program, caches, inputs.lengths, inputs.tokens)


def _torch(inputs: Inputs, tree: PrefixTree) -> Run:
    """The loop in PyTorch, which reads the slots up to the last node."""
    K, (nodes, N) = inputs.key.shape[2], inputs.tokens.shape[2:4]
    tokens = of_torch(inputs.tokens)
    caches = [[of_torch(inputs.key), of_torch(inputs.value)] for _ in range(inputs.layers)]
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
    inputs, tree = draw(dtype, **sizes), _binary(sizes["T"])
    return {
        OURS: lambda: _ours(inputs, tree),
        **{
            side: functools.partial(_ours, inputs, tree, implementation=name)
            for side, name in KERNELS.items()
        },
        JAX_NN: lambda: _jax_nn(inputs, tree),
        PYTORCH: lambda: _torch(inputs, tree),
    }
