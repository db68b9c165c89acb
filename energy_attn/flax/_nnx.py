"""Models of NNX: traces them as functions of arrays, and replaces their attention."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..core._module import FreeEnergy, stacked, with_name
from ._attention_fn import AttentionFn


def holds_nnx(tree: PyTree) -> bool:
    # only in programs that import it
    nnx: Any = sys.modules.get("flax.nnx")

    def is_module(x: object) -> bool:
        return nnx is not None and isinstance(x, nnx.Module)

    return nnx is not None and any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def run_pure(
    run: Callable[..., tuple[Any, Any]], function: Callable[..., Any], args: PyTree, kwargs: PyTree
) -> tuple[Any, Any]:
    """Computes `run(function, *args, **kwargs)` for a function or arguments with modules of NNX.

    `run` traces and calls a function of arrays, in which the modules are copies, with energies named by their paths.
    Changes that the function makes to the copies are made to the modules afterwards.
    """
    from flax import nnx

    call = function, args, kwargs
    graph, state = nnx.split(call)
    (out, changed), recorded = run(eqx.Partial(_pure, graph), state)
    nnx.update(call, changed)
    return out, recorded


def is_pure(function: object) -> bool:
    return isinstance(function, eqx.Partial) and function.func is _pure


def _pure(graph: PyTree, state: PyTree) -> tuple[Any, Any]:
    from flax import nnx

    call = nnx.merge(graph, state, copy=True)
    function, args, kwargs = call
    for x in jax.tree.leaves(call, is_leaf=lambda x: isinstance(x, nnx.Module)):
        for path, parent in modules(x):
            for name, attend in vars(parent).items():
                if isinstance(attend, AttentionFn) and attend.energy.name is None:
                    where = f"{path}.{name}.energy".lstrip(".")
                    setattr(parent, name, AttentionFn(with_name(attend.energy, where)))
    out = function(*args, **kwargs)
    before = {
        path: x.get_value() if isinstance(x, nnx.Variable) else x
        for path, x in nnx.to_flat_state(state)
    }
    after = nnx.to_flat_state(nnx.state(call, nnx.Variable))  # with those that are new
    changed = [(path, x) for path, x in after if x.get_value() is not before.get(path)]
    return out, nnx.from_flat_state(changed)


def modules(model: PyTree) -> Iterator[tuple[str, Any]]:
    from flax import nnx

    for path, x in nnx.iter_graph(model):
        if isinstance(x, nnx.Module):
            steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
            yield "".join(steps).lstrip("."), x


def with_energies(model: PyTree, energy: FreeEnergy) -> Any:
    """A copy of a model of NNX, with the same arrays, whose attention layers have this energy.

    Raises `TypeError` for a layer of a subclass of Flax's, or with a custom attention; `ValueError` if there is no
    layer.
    """
    from flax import nnx

    def attend(path: str, layer: PyTree) -> Any:
        if layer.attention_fn is not nnx.dot_product_attention:
            raise TypeError(
                f"model.{path}.attention_fn: wanted flax.nnx.dot_product_attention, which ours replaces, "
                f"got {layer.attention_fn!r}"
            )
        ours = AttentionFn(stacked(energy, layer.query.kernel.shape[:-3]))
        return nnx.data(ours) if jax.tree.leaves(eqx.filter(ours, eqx.is_array)) else ours

    return _with(model, attend)


def with_dot_products(model: PyTree, check: Callable[[str, FreeEnergy], None]) -> Any:
    """A copy of a model of NNX with Flax's attention in place of ours; raises as `with_energies`.

    `check` raises for an energy that Flax's attention does not express.
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
        layer.attention_fn = attend(path, layer)
    return copy
