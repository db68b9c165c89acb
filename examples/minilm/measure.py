"""Measurements of attention in each layer and head of an encoder, and of one head on one sentence."""

from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree
from tokenizers import Encoding

import energy_attn as ea

from .bert import Bert, pooled, tokenize

# The example: a head that attends to antecedents, and a pronoun with two possible ones.
SENTENCE = "The piano did not pass through the door because it was too wide."
OTHER = "The piano did not pass through the door because it was too narrow."
WORD, LAYER, HEAD = "it", 3, 1
TOWARDS = ("piano", "door", "[CLS]")
POINTS = 33


class Encoded(NamedTuple):
    """The states of sentences `[B, T]` in all layers, and their embeddings.

    Attributes:
        lengths: `[B]`; tokens from this index on are padding.
        states: `[B, layers + 1, T, width]`: the inputs of all layers, and the output of the last.
        embeddings: `[B, width]`, normalised.
    """

    lengths: Int[Array, " B"]
    states: Float[Array, "B layers+1 T width"]
    embeddings: Float[Array, "B width"]


def encode(model: Bert, encodings: list[Encoding]) -> Encoded:
    """Runs the model on one padded batch."""
    tokens = jnp.asarray([encoding.ids for encoding in encodings], jnp.int32)
    lengths = jnp.asarray([sum(x.attention_mask) for x in encodings], jnp.int32)
    return Encoded(lengths, *_encode(model, tokens, lengths))


@eqx.filter_jit
def _encode(model: Bert, tokens: Array, lengths: Array) -> tuple[Array, Array]:
    states = jax.vmap(model)(tokens, lengths)
    return states, jax.vmap(pooled)(states[:, -1], lengths)


def energy_report(model: Bert, encoded: Encoded) -> PyTree[Array]:
    """The report of all layers, `[layers, heads]`, each at its own input; padding is left out."""
    reports = [_layer_report(*at) for at in _layers(model, encoded)]
    return jax.tree.map(lambda *layers: jnp.concatenate(layers), *reports)


def weights_of(model: Bert, encoded: Encoded) -> Float[Array, "layers B T heads S"]:
    """The weights of all rows, which short sentences have room for."""
    return jnp.stack([_layer_weights(*at) for at in _layers(model, encoded)])


def _layers(model: Bert, encoded: Encoded) -> list[tuple[ea.nn.MultiheadAttention, Array, Array]]:
    """Attention, input and lengths of each layer. All layers have equal shapes and share one program."""
    inputs = jnp.moveaxis(encoded.states[:, :-1], 1, 0)
    return [
        (layer.attention, x, encoded.lengths) for layer, x in zip(model.layers, inputs, strict=True)
    ]


@eqx.filter_jit
def _layer_report(layer: ea.nn.MultiheadAttention, x: Array, lengths: Array) -> PyTree[Array]:
    return ea.energy_report(
        layer, x, x, x, query_seq_lengths=lengths, key_value_seq_lengths=lengths
    )


@eqx.filter_jit
def _layer_weights(layer: ea.nn.MultiheadAttention, x: Array, lengths: Array) -> Array:
    query, key, value = jax.vmap(lambda x: layer.project(x, x, x))(x)
    padding = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    return ea.FreeEnergy().at(query, key, value, **padding).weights()


def looks_at(model: Bert, encoded: Encoded) -> dict[str, np.ndarray]:
    """The mean weight of some keys in each layer and head, `[layers, heads]`.

    `first`: of a sentence's first token, [CLS]; `itself`: of the query's own; `before` and `after`: of the neighbours,
    over the queries that have them.
    """
    weights = np.asarray(weights_of(model, encoded), np.float64)
    positions = np.arange(weights.shape[-1])
    lengths = np.asarray(encoded.lengths)[:, None, None]
    query, key = positions[:, None], positions
    real = (query < lengths) & (key < lengths)  # [B, T, S]
    chosen = {
        "first": key == 0 * query,
        "itself": key == query,
        "before": key == query - 1,
        "after": key == query + 1,
    }
    return {
        name: np.einsum("lbtns,bts->ln", weights, real & where) / (real & where).sum()
        for name, where in chosen.items()
    }


def arrays_of(report: PyTree[Array]) -> dict[str, Array]:
    """The quantities of a report by name; its layers have no names of their own here."""
    return {name: x for name, x in vars(report).items() if x is not None}


def worked_example(model: Bert, directory: Path) -> dict[str, Any]:
    """One row of attention: its weights, the covariance of its values, and its rate function.

    Raises what `tokenize` raises.

    Entries, in addition to those of an energy report: `weights` `[S]`; `eigenvalues` of the covariance, largest first;
    `along` `[S]`: the distance of each value from the output along the first eigenvector; `rate`: the rate function at
    `distance` along it; `towards`: for some tokens the rate function on the line from the output to their value, at the
    fractions `share`; `other`: the weights of these tokens in the other sentence.
    """
    encodings = tokenize(directory, [SENTENCE, OTHER])  # of equal length
    tokens = encodings[0].tokens
    indices = jnp.asarray([tokens.index(token) for token in (WORD, *TOWARDS)], jnp.int32)
    # The rate at a value is a small difference of large numbers: the decimals shown need float64.
    with jax.enable_x64(True):
        layer, (one, two) = _doubled(
            (model.layers[LAYER].attention, encode(model, encodings).states[:, LAYER])
        )
        report, arrays = _row(layer, one, indices)
        _, other = _row(layer, two, indices)
    names = {"sentence": SENTENCE, "tokens": tokens, "query": WORD, "layer": LAYER, "head": HEAD}
    numbers = {name: x.item() for name, x in arrays_of(report).items()}
    towards = dict(zip(TOWARDS, arrays.pop("towards"), strict=True))
    other = dict(zip(TOWARDS, other["weights"][indices[1:]], strict=True))
    return names | numbers | arrays | {"towards": towards, "other": other}


def _doubled(tree: Any) -> Any:
    """The tree with its floating arrays in float64."""
    floats, others = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(jax.tree.map(lambda x: x.astype(jnp.float64), floats), others)


@eqx.filter_jit
def _row(
    layer: ea.nn.MultiheadAttention, x: Float[Array, "T width"], indices: Int[Array, " 1+tokens"]
) -> tuple[PyTree[Array], dict[str, Array]]:
    """The report and the arrays of the example, for the query at the first index."""
    query, key, value = (heads[:, HEAD : HEAD + 1] for heads in layer.project(x, x, x))
    query = query[indices[:1]]
    F = ea.FreeEnergy().at(query, key, value)
    report = ea.energy_report(F, per_query=True)
    weights = F.weights()[0, 0]
    out = F.attention()[0]  # [1, width]
    sizes, directions = jnp.linalg.eigh(F.covariance()[0, 0])
    along = (value[:, 0] - out) @ directions[:, -1]
    along = along * jnp.sign(along[weights.argmax()])  # the heaviest key is on the right

    # one component of the output has the rate function of scalar values
    distance = jnp.linspace(along.min(), along.max(), 2 * POINTS - 1, dtype=x.dtype)
    share = jnp.linspace(0, 1, POINTS, dtype=x.dtype)
    path = out[None] + share[None, :, None] * (value[indices[1:]] - out[None])  # [tokens, P, width]
    return report, {
        "weights": weights,
        "eigenvalues": sizes[::-1],
        "along": along,
        "distance": distance,
        "rate": _rate(distance[:, None], query, key, along[:, None]),
        "share": share,
        "towards": _rate(path.reshape(-1, path.shape[-1]), query, key, value[:, 0]).reshape(
            len(path), -1
        ),
    }


def _rate(point: Array, query: Array, key: Array, value: Array) -> Array:
    """The rate function `[P]` at points `[P, Hv]`, for one query and values `[S, Hv]`."""
    query = jnp.broadcast_to(query, (len(point), *query.shape[1:]))
    F = ea.FreeEnergy().at(query, key, value[:, None])
    return F.rate(point[:, None]).value[:, 0]
