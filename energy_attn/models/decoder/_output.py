"""The outputs of a decoder."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from energy_attn.kernels.internal import lse_dtype

from ._cache import DecoderCache


class DecoderOutput(NamedTuple):
    """The result of calling a decoder.

    Attributes:
        logits: float32, or float64 where the weights are.
        cache: the cache with these tokens in it; None if none was given.
        energies: the free energy of each layer, position and head in nats, or None. With another
            `attend`, its second result, stacked over layers.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.models import Llama, LlamaConfig
        >>> config = LlamaConfig(16, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = Llama(config, key=jax.random.key(0))
        >>> out = model(jnp.zeros((1, 5), jnp.int32), return_energies=True)
        >>> out.logits.shape, out.cache, out.energies.shape
        ((1, 5, 16), None, (2, 1, 5, 2))
    """

    logits: Float[Array, "batch time vocab"]
    cache: DecoderCache | None
    energies: PyTree[Float[Array, "layers batch time heads"]] | None


class Trace(NamedTuple):
    """The inputs and results of each layer's attention, for checks and studies."""

    query: Float[Array, "layers batch time heads width"]
    out: Float[Array, "layers batch time heads width"]
    energy: PyTree[Float[Array, "layers batch time heads"]]


def joined(traces: Sequence[Trace]) -> Trace:
    """The traces of single layers, stacked."""
    return jax.tree.map(lambda *each: jnp.stack(each), *traces)


def log_probabilities(logits: Array, tokens: Array) -> Array:
    """The log-softmax `[B, n]`, in float32 or wider, at `tokens` `[B, n]`, of logits `[B, n, V]`."""
    log_p = jax.nn.log_softmax(logits.astype(lse_dtype(logits.dtype)))
    return jnp.take_along_axis(log_p, tokens[:, :, None], axis=2)[:, :, 0]
