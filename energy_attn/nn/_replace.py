"""Equinox's and Flax's attention layers in any model, replaced by ours, and back."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import equinox as eqx
import jax
from jaxtyping import PyTree

from energy_attn.kernels.internal import checks

from ..core._module import FreeEnergy, energy_of, stacked
from ..flax._nnx import holds_nnx, with_dot_products, with_energies
from ..functional._free_energy import ModuleOptions
from ._multihead import MultiheadAttention

Model = TypeVar("Model", bound=PyTree)

_NAMES = {
    eqx.nn.MultiheadAttention: "equinox.nn.MultiheadAttention",
    MultiheadAttention: "energy_attn.nn.MultiheadAttention",
}
# The fields of Equinox's layer, and of ours.
_MODULES = ("query_proj", "key_proj", "value_proj", "output_proj", "dropout")
_SIZES = ("num_heads", "query_size", "key_size", "value_size", "output_size", "qk_size", "vo_size")
_BIASES = tuple(f"use_{name}_bias" for name in ("query", "key", "value", "output"))
# Fields of an energy that do not change what a layer computes.
_FREE = ("implementation", "name")


def replace_attention(model: Model, **options: Unpack[ModuleOptions]) -> Model:
    r"""Replaces the attention layers of a model by layers with the same parameters whose heads are free energies.

    $$\mathrm{softmax}(\mathrm{scale}\; Q K^T)\, V \;\to\; \nabla F(0), \qquad
      F(\zeta) = \log \sum_a \exp(\mathrm{scale}\; q \cdot k_a + \zeta \cdot v_a)$$

    Every `equinox.nn.MultiheadAttention` in the pytree becomes a
    [`MultiheadAttention`][energy_attn.nn.MultiheadAttention] with the same projections and dropout. Outputs, gradients
    and random dropout are equal to rounding, except in fully masked rows, which are zero before the output projection.
    Layers that were stacked by `jax.vmap`, for a scan, stay stacked, and each has its own copy of the options' arrays.

    In a model of Flax's NNX every `flax.nnx.MultiHeadAttention` gets an
    [`attention_fn`][energy_attn.flax.attention_fn], and does not change otherwise.

    Args:
        model: any pytree, which does not change.
        **options: fields of the [`FreeEnergy`][energy_attn.FreeEnergy] of every layer, as
            `is_causal=True`, `implementation=` or `parallel=`; with arrays of one layer, as `sink=`.

    Returns:
        The new model. Its other leaves are those of `model`.

    Raises:
        TypeError: an attention layer is of a class derived from Equinox's or Flax's, or has a custom attention,
            which may compute something else; or an unknown option.
        ValueError: there is no such layer in `model`.

    Source: Tree Attention (arXiv 2408.04093), equations 16 to 20.

    Examples:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> theirs = eqx.nn.MultiheadAttention(4, 16, use_query_bias=True, key=jax.random.key(0))
        >>> ours = ea.replace_attention(theirs)
        >>> x = jax.random.normal(jax.random.key(1), (7, 16))
        >>> bool(jnp.allclose(ours(x, x, x), theirs(x, x, x), atol=1e-5))
        True
        >>> ours(x, x, x, return_energy=True)[1].shape
        (7, 4)
    """
    energy = energy_of(None, options)
    if holds_nnx(model):
        return with_energies(model, energy)

    def ours(layer: Any, path: str) -> MultiheadAttention:
        del path
        made = _with_fields_of(layer, MultiheadAttention, num_kv_heads=layer.num_heads)
        return eqx.tree_at(
            lambda x: x.energy,
            made,
            stacked(energy, layer.query_proj.weight.shape[:-2]),
            is_leaf=lambda x: isinstance(x, FreeEnergy),
        )

    return _replaced(model, eqx.nn.MultiheadAttention, ours)


def restore_attention(model: Model) -> Model:
    """Replaces the attention layers of a model by Equinox's or Flax's: the inverse of `replace_attention`.

    Layers keep projections and dropout, but not `implementation`.

    Args:
        model: any pytree, which does not change.

    Returns:
        The new model. Its other leaves are those of `model`.

    Raises:
        TypeError: an attention layer is of a class derived from ours.
        ValueError: there is no `MultiheadAttention` in `model`, or Equinox's cannot express one:
            grouped heads, or an energy with a scale, causality, a window, a mask or sharded keys. The
            error names the layer and the field.

    Examples:
        >>> import equinox as eqx, jax
        >>> import energy_attn as ea
        >>> theirs = eqx.nn.MultiheadAttention(4, 16, key=jax.random.key(0))
        >>> bool(eqx.tree_equal(ea.restore_attention(ea.replace_attention(theirs)), theirs))
        True
    """

    def theirs(layer: Any, path: str) -> eqx.nn.MultiheadAttention:
        if layer.num_kv_heads != layer.num_heads:
            raise ValueError(
                f"model{path}: wanted as many key heads as query heads, as Equinox has them, "
                f"got {layer.num_kv_heads} of {layer.num_heads}"
            )
        _check_plain(path, layer.energy)
        return _with_fields_of(layer, eqx.nn.MultiheadAttention)

    if holds_nnx(model):
        return with_dot_products(model, _check_plain)
    return _replaced(model, MultiheadAttention, theirs)


def _check_plain(path: str, energy: FreeEnergy) -> None:
    for field in dataclasses.fields(energy):
        result = getattr(energy, field.name)
        if field.name not in _FREE and result is not field.default:
            raise ValueError(
                f"model{path}.energy.{field.name}: wanted {field.default}, as plain "
                f"attention has no such option, got {checks.received(result)}"
            )


def _with_fields_of(layer: Any, kind: type, **sizes: int) -> Any:
    sizes |= {name: getattr(layer, name) for name in (*_SIZES, *_BIASES)}
    made = eqx.filter_eval_shape(kind, **sizes, key=jax.random.key(0))
    modules = operator.attrgetter(*_MODULES)
    return eqx.tree_at(modules, made, modules(layer))


def _replaced(model: Model, kind: type, new: Callable[[Any, str], Any]) -> Model:
    """Replaces each layer of one class; a layer in two places by the same new one."""
    made: dict[int, Any] = {}

    def replaced(path: Any, x: Any) -> Any:
        if not isinstance(x, kind):
            return x
        where = jax.tree_util.keystr(path)
        if type(x) is not kind:
            raise TypeError(
                f"model{where}: wanted {_NAMES[kind]} itself, got a class derived from it, "
                f"{type(x).__name__}"
            )
        if id(x) not in made:
            made[id(x)] = new(x, where)
        return made[id(x)]

    result = jax.tree_util.tree_map_with_path(
        replaced, model, is_leaf=lambda x: isinstance(x, kind)
    )
    if not made:
        raise ValueError(
            f"model: wanted a pytree with {_NAMES[kind]} in it, got {checks.received(model)}"
        )
    return result
