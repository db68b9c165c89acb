"""Flax's attention layers in a model of NNX, whose attention is replaced by ours, and back."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..core._module import FreeEnergy, stacked
from ._attention_fn import AttentionFn
from ._nnx import modules


def with_energies(model: PyTree, energy: FreeEnergy) -> Any:
    """A copy of a model of NNX whose attention layers have this energy; the arrays are the same.

    Raises `TypeError` for a layer of a class derived from Flax's, or with an attention of the user's;
    `ValueError` if there is no layer.
    """
    from flax import nnx

    def attend(path: str, layer: PyTree) -> Any:
        if layer.attention_fn is not nnx.dot_product_attention:
            raise TypeError(
                f"model.{path}.attention_fn: wanted flax.nnx.dot_product_attention, which ours replaces, "
                f"got {layer.attention_fn!r}"
            )
        made = AttentionFn(stacked(energy, layer.query.kernel.shape[:-3]))
        return nnx.data(made) if jax.tree.leaves(eqx.filter(made, eqx.is_array)) else made

    return _with(model, attend)


def with_dot_products(model: PyTree, check: Callable[[str, FreeEnergy], None]) -> Any:
    """A copy of a model of NNX with Flax's attention in the place of ours.

    `check` raises for an energy that Flax's attention does not express. Raises as `with_energies`.
    """
    from flax import nnx

    def attend(path: str, layer: PyTree) -> Any:
        if not isinstance(layer.attention_fn, AttentionFn):
            raise TypeError(
                f"model.{path}.attention_fn: wanted one of energy_attn.flax, got {layer.attention_fn!r}"
            )
        check(f".{path}.attention_fn", layer.attention_fn.energy)
        return nnx.dot_product_attention

    return _with(model, attend)


def _with(model: PyTree, attend: Callable[[str, Any], Any]) -> Any:
    from flax import nnx

    copy = nnx.clone(model)
    layers = [x for x in modules(copy) if isinstance(x[1], nnx.MultiHeadAttention)]
    if not layers:
        raise ValueError("model: wanted one with flax.nnx.MultiHeadAttention in it, got none")
    for path, layer in layers:
        if type(layer) is not nnx.MultiHeadAttention:
            raise TypeError(
                f"model.{path}: wanted flax.nnx.MultiHeadAttention itself, got a class derived from it, "
                f"{type(layer).__name__}"
            )
    for path, layer in layers:
        layer.attention_fn = attend(path, layer)
    return copy
