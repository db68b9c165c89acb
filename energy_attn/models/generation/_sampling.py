"""Sampling: its options and their checks, and the choice of the next token."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from energy_attn.kernels.internal import check_options, checks, lse_dtype

from ...prefix_tree import PrefixTree
from ...prefix_tree._accept import check_sampling, process_logits
from ...prefix_tree._tree import gather_slots


class SamplingOptions(TypedDict, total=False):
    """How [`generate`][energy_attn.models.generate] chooses tokens.

    In this order, as in transformers: `logit_bias`, `repetition_penalty` and `presence_penalty` change
    the logits; at temperature 0 the likeliest token is chosen, else the logits are divided by
    `temperature`, restricted by `top_k`, `top_p` and `min_p`, and a token is drawn.
    """

    temperature: float | Float[Array, ""]
    """The number 0, which is the default, chooses the likeliest token; an array is above 0."""

    top_k: int | None
    """Draw from this number of likeliest tokens; None: from all."""

    top_p: float | Float[Array, ""] | None
    """Draw from the likeliest tokens whose probabilities add up to this; None: from all."""

    min_p: float | Float[Array, ""] | None
    """Draw from tokens that are this times as likely as the likeliest, after `temperature`; None: from all."""

    repetition_penalty: float | Float[Array, ""] | None
    """Divides the logits above 0 of tokens of the prompt and of the text so far, and multiplies those
    below; None, and 1: nothing."""

    presence_penalty: float | Float[Array, ""] | None
    """Subtracted from the logits of tokens that were generated already; None, and 0: nothing."""

    logit_bias: Mapping[int, float] | Float[Array | np.ndarray, " vocab"] | None
    """Added to the logits: numbers by token, or `[vocab]`; minus infinity excludes a token."""

    key: PRNGKeyArray | None
    """The key of the draws; required unless `temperature` is 0."""


class Sampling(eqx.Module):
    """Checked sampling options: greedy if `key` is None; fields that are None are skipped."""

    key: Any = None
    temperature: Any = None
    top_p: Any = None
    min_p: Any = None
    top_k: int | None = eqx.field(static=True, default=None)
    repetition_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    is_scored: bool = eqx.field(static=True, default=False)


def sampling_of(vocab: int, options: SamplingOptions, is_scored: bool) -> Sampling:
    """Checks the options; raises `TypeError` or `ValueError`, and warns of those without effect."""
    check_options(options, SamplingOptions)
    temperature, key = options.get("temperature", 0.0), options.get("key")
    is_number = isinstance(temperature, (int, float, np.number)) and not isinstance(
        temperature, bool
    )
    if is_number and not temperature >= 0:
        raise ValueError(
            f"temperature: wanted 0, for the likeliest token, or a number above 0, got {temperature}"
        )
    greedy = is_number and temperature == 0
    top_k, top_p, min_p = (options.get(name) for name in ("top_k", "top_p", "min_p"))
    temperature, top_k, top_p = check_sampling(1.0 if greedy else temperature, top_k, top_p)
    min_p = None if min_p is None else checks.check_positive("min_p", min_p, 1)
    if key is not None:
        checks.check_key("key", key)
    repetition, presence = options.get("repetition_penalty"), options.get("presence_penalty")
    if repetition is not None:
        repetition = checks.check_positive("repetition_penalty", repetition)
    if isinstance(presence, (jax.Array, np.ndarray)):
        checks.check_shape(
            "presence_penalty", checks.check_floating("presence_penalty", presence), ()
        )
    elif presence is not None:
        presence = checks.check_finite_number("presence_penalty", presence)
    shared: Any = {
        "repetition_penalty": None if _is_number(repetition, 1) else repetition,
        "presence_penalty": None if _is_number(presence, 0) else presence,
        "logit_bias": _bias(vocab, options.get("logit_bias")),
        "is_scored": is_scored,
    }
    if greedy:
        drawn = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        if unused := [name for name, x in drawn.items() if x is not None]:
            said = f"{unused[0]}: wanted a temperature above 0 beside it, got 0; nothing is drawn"
            warnings.warn(said, stacklevel=3)
        return Sampling(**shared)
    if key is None:
        shown = temperature if isinstance(temperature, float) else checks.received(temperature)
        raise ValueError(f"key: wanted a jax.random.key at temperature {shown}, got None")
    most = None if top_k is None else min(top_k, vocab)
    temperature = jnp.asarray(temperature, jnp.float32)
    return Sampling(key, temperature, top_p, min_p, most, **shared)


def _is_number(x: object, number: float) -> bool:
    return isinstance(x, float) and x == number


def _bias(vocab: int, bias: Any) -> Array | None:
    name = "logit_bias"
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        checks.check_shape(
            name, checks.check_floating(name, checks.check_array(name, bias)), (vocab,)
        )
        if checks.is_concrete(bias):
            wrong = np.asarray(bias, np.float64)
            wrong = wrong[np.isnan(wrong) | (wrong == np.inf)]
            if wrong.size:
                raise ValueError(f"{name}: wanted numbers below infinity, got {wrong[0]}")
        return jnp.asarray(bias)
    array = np.zeros(vocab, np.float32)
    for token, number in bias.items():
        if checks.check_integer(f"{name}: a token", token, 0) >= vocab:
            raise ValueError(f"{name}: wanted tokens from 0 to {vocab - 1}, got {token}")
        excluded = isinstance(number, (float, np.floating)) and number == -np.inf
        array[token] = (
            number if excluded else checks.check_finite_number(f"{name}[{token}]", number)
        )
    return jnp.asarray(array)


class SeenTokens(NamedTuple):
    """Masks `[B, V]` of the tokens in each text; None where no penalty reads them."""

    text: Array | None  # tokens of the prompt, and generated ones
    generated: Array | None  # generated tokens


def seen_in(sampling: Sampling, tokens: Array, exists: Array, vocab: int) -> SeenTokens:
    nothing = jnp.zeros((len(tokens), vocab), bool)
    text = None if sampling.repetition_penalty is None else _marked(nothing, tokens, exists)
    return SeenTokens(text, None if sampling.presence_penalty is None else nothing)


def with_new(seen: SeenTokens, new: Array, exists: Array) -> SeenTokens:
    return SeenTokens(*(None if x is None else _marked(x, new, exists) for x in seen))


def _marked(seen: Array, tokens: Array, exists: Array) -> Array:
    rows = jnp.arange(len(seen), dtype=jnp.int32)[:, None]
    where = jnp.where(exists, tokens, seen.shape[1])
    return seen.at[rows, where].set(True, mode="drop")


def choose(
    sampling: Sampling,
    rows: Callable[..., Any],
    logits: Array,
    seen: SeenTokens,
    numbers: Array | None,
    first: Array,
    tree: PrefixTree | None,
) -> Array:
    """The next token `[B, L]` of each node of a tree whose root is at position `first` `[B]`; no tree: of the root.

    Nodes of one depth share their noise, and penalties count a node's ancestors, so that the text does not depend on
    the tree.
    """
    logits = _penalized(sampling, logits, seen, tree)
    if sampling.key is None:
        return lax.argmax(logits, 2, jnp.int32)

    def process(logits: Array) -> Array:
        temperature, top_k = sampling.temperature, sampling.top_k
        return process_logits(logits, temperature, top_k, sampling.top_p, sampling.min_p)

    def draw(number: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(sampling.key, number), position)
        return jax.random.gumbel(key, processed.shape[2:], processed.dtype)

    processed = rows(process, logits)
    if numbers is None:
        numbers = jnp.arange(len(logits), dtype=jnp.int32)
    levels = 1 if tree is None else tree.unpacker.shape[2]
    positions = first[:, None] + jnp.arange(levels, dtype=jnp.int32)[None]
    numbers = jnp.broadcast_to(numbers[:, None], positions.shape)
    noise = rows(jax.vmap(jax.vmap(draw)), numbers, positions)
    noise = noise if tree is None else gather_slots(noise, tree.depth)
    return lax.argmax(processed + noise, 2, jnp.int32)


def _penalized(
    sampling: Sampling, logits: Array, seen: SeenTokens, tree: PrefixTree | None
) -> Array:
    """Logits with the bias and the penalties, in float32 or wider; the same array without any."""
    dtype = lse_dtype(logits.dtype)
    if sampling.logit_bias is not None:
        logits = logits.astype(dtype) + sampling.logit_bias.astype(dtype)[None, None]
    if seen.text is not None:
        logits, penalty = logits.astype(dtype), jnp.asarray(sampling.repetition_penalty, dtype)
        repeated = jnp.where(logits < 0, logits * penalty, logits / penalty)
        logits = jnp.where(_along(seen.text, tree), repeated, logits)
    if seen.generated is not None:
        logits, penalty = logits.astype(dtype), jnp.asarray(sampling.presence_penalty, dtype)
        logits = jnp.where(_along(seen.generated, tree), logits - penalty, logits)
    return logits


def _along(seen: Array, tree: PrefixTree | None) -> Array:
    """Masks `[B, L, V]` of the tokens that each node sees: the text, its ancestors and itself."""
    if tree is None:
        return seen[:, None]
    batch, slots = tree.tokens.shape
    nodes = jnp.repeat(seen, slots, axis=0)
    tokens = jnp.broadcast_to(tree.tokens[:, None], tree.mask.shape).reshape(-1, slots)
    return _marked(nodes, tokens, tree.mask.reshape(-1, slots)).reshape(batch, slots, -1)
