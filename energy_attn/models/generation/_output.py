"""What a Llama decoder returns."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ._cache import LlamaCache


class LlamaOutput(NamedTuple):
    """What a call of `Llama` returns.

    Attributes:
        logits: float32, or float64 where the weights are.
        cache: the cache with these tokens in it; None if none was given.
        energies: each layer's, position's and head's free energy in nats, or None. Whatever else
            the `attend` of the call returns beside its outputs, stacked likewise.

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
    cache: LlamaCache | None
    energies: PyTree[Float[Array, "layers batch time heads"]] | None


class LlamaTrace(NamedTuple):
    """What each layer's attention was given and gave, for those who check or study it."""

    query: Float[Array, "layers batch time heads width"]
    out: Float[Array, "layers batch time heads width"]
    energy: PyTree[Float[Array, "layers batch time heads"]]


def joined(traces: Sequence[LlamaTrace]) -> LlamaTrace:
    """The traces of single layers, stacked. Raises nothing."""
    return jax.tree.map(lambda *each: jnp.stack(each), *traces)
