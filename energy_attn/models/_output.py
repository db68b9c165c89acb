"""What a Llama decoder returns."""

from typing import NamedTuple

from jaxtyping import Array, Float, PyTree

from ._cache import LlamaCache


class LlamaOutput(NamedTuple):
    """What a call of `Llama` returns.

    Attributes:
        logits: float32, or float64 where the weights are.
        cache: the cache with these tokens in it; None if none was given.
        energies: each layer's, position's and head's free energy in nats, or None. Whatever else
            the `attend` of the call returns beside its outputs, stacked likewise.
    """

    logits: Float[Array, "batch time vocab"]
    cache: LlamaCache | None
    energies: PyTree[Float[Array, "layers batch time heads"]] | None


class LlamaTrace(NamedTuple):
    """What each layer's attention was given and gave, for those who check or study it."""

    query: Float[Array, "layers batch time heads width"]
    out: Float[Array, "layers batch time heads width"]
    energy: PyTree[Float[Array, "layers batch time heads"]]
