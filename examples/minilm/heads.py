"""Heads of a sentence encoder: their energies with and without the first token, and what each is good for."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from tokenizers import Encoding

import energy_attn as ea

from .bert import Bert, pooled
from .measure import encode


def by_head(
    model: Bert, encodings: list[Encoding]
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Figures of each head `[B, layers, N]`, outputs `[B, layers, N, T, H]` and the tokens that are present.

    `cost_of_first` is $F - F'$, where $F'$ is the energy of all keys but [CLS]. `zero` and `mean`: one minus the cosine
    of the embedding with the one that the model computes where the head's output is zero, or its mean over all tokens.
    """
    encoded = encode(model, encodings)
    inputs = jnp.asarray([x.ids for x in encodings], jnp.int32), encoded.lengths
    layers = [
        _layer(layer.attention, encoded.states[:, i], encoded.lengths)
        for i, layer in enumerate(model.layers)
    ]
    rows = {
        name: np.stack([np.moveaxis(np.asarray(x[name], np.float64), 2, 1) for x in layers], 1)
        for name in layers[0]
    }
    count = np.asarray(encoded.lengths)[:, None]
    real, out = np.arange(inputs[0].shape[1]) < count, rows.pop("out")
    results = {
        name: np.where(real[:, None, None], x, 0).sum(-1) / count[..., None]
        for name, x in rows.items()
    }
    mean = out[np.nonzero(real)[0], ..., np.nonzero(real)[1], :].mean(0)
    for name, instead in (("zero", 0 * mean), ("mean", mean)):
        costs = _costs(model, inputs, jnp.asarray(instead, jnp.float32))
        results[name] = np.moveaxis(np.asarray(costs, np.float64), -1, 0)
    return results, out, real


@eqx.filter_jit
def _layer(layer: ea.nn.MultiheadAttention, x: Array, lengths: Array) -> dict[str, Array]:
    query, key, value = jax.vmap(lambda x: layer.project(x, x, x))(x)
    at = functools.partial(ea.FreeEnergy().at, query, key, value)
    padding = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    F = at(**padding)
    G = at(**padding, mask=(jnp.arange(x.shape[1]) > 0)[None, None, None])
    size = jnp.log(lengths[:, None, None].astype(x.dtype))
    without = jnp.log(lengths[:, None, None] - 1.0)
    return {
        "relative_entropy": F.entropy() / size,
        "relative_entropy_of_others": G.entropy() / without,
        "energy": F(),
        "gap": F() - F.score_max(),
        "heat_capacity": F.score_moments().variance,
        "first": -jnp.expm1(G() - F()),
        "cost_of_first": F() - G(),
        "out": F.attention(),
    }


@eqx.filter_jit
def _costs(model: Bert, inputs: tuple[Array, Array], instead: Array) -> Float[Array, "L N B"]:
    embed = jax.vmap(lambda model, *x: pooled(model(*x)[-1], x[1]), in_axes=(None, 0, 0))
    whole = embed(model, *inputs)

    def cost(kept: Array) -> Array:
        return 1 - (whole * embed(ablated(model, kept, instead), *inputs)).sum(-1)

    return jax.lax.map(cost, all_but_one(*instead.shape[:2])).reshape(*instead.shape[:2], -1)


def all_but_one(layers: int, heads: int) -> Bool[Array, "L*N L N"]:
    """Masks of kept heads that leave out each head in turn."""
    return ~jnp.eye(layers * heads, dtype=bool).reshape(-1, layers, heads)


def ablated(model: Bert, kept: Bool[Array, "L N"], instead: Float[Array, "L N H"]) -> Bert:
    """The model in which heads that are not `kept` have the output `instead`, by its output projections."""

    def projection(layer: eqx.nn.Linear, stays: Array, other: Array) -> eqx.nn.Linear:
        stays = jnp.repeat(stays, other.shape[-1])
        added = layer.weight @ jnp.where(stays, 0.0, other.ravel())
        weights = jnp.where(stays, layer.weight, 0.0), layer.bias + added
        return eqx.tree_at(lambda x: (x.weight, x.bias), layer, weights)

    def where(model: Bert) -> list[eqx.nn.Linear]:
        return [x.attention.output_proj for x in model.layers]

    return eqx.tree_at(where, model, list(map(projection, where(model), kept, instead)))
