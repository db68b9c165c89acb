"""Models of NNX, whose modules are changed in place, in functions that JAX traces."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..core._module import with_name
from ._attention_fn import AttentionFn

Path = tuple[Any, ...]


def holds_nnx(tree: PyTree) -> bool:
    """Whether a module of NNX is in a tree: only in programs that import it."""
    nnx: Any = sys.modules.get("flax.nnx")

    def is_module(x: object) -> bool:
        return nnx is not None and isinstance(x, nnx.Module)

    return nnx is not None and any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def run_pure(
    run: Callable[..., tuple[Any, Any]], function: Callable[..., Any], args: PyTree, kwargs: PyTree
) -> tuple[Any, Any]:
    """`run(function, *args, **kwargs)` with modules of NNX in any of them.

    `run` traces and calls a function of arrays. Inside it the modules are new ones, whose energies are named by their
    paths, as those of other models are; what the function changes in them is changed in the given ones afterwards.
    """
    from flax import nnx

    given = function, args, kwargs
    graph, state = nnx.split(given)
    (out, changed), seen = run(eqx.Partial(_pure, graph), state)
    nnx.update(given, changed)
    return out, seen


def is_pure(function: object) -> bool:
    """Whether `run_pure` made a function."""
    return isinstance(function, eqx.Partial) and function.func is _pure


def _pure(graph: PyTree, state: PyTree) -> tuple[Any, Any]:
    from flax import nnx

    given = nnx.merge(graph, state, copy=True)
    function, args, kwargs = given
    for x in jax.tree.leaves(given, is_leaf=lambda x: isinstance(x, nnx.Module)):
        _name_energies(x)
    out = function(*args, **kwargs)
    before = {path: _value(x) for path, x in nnx.to_flat_state(state)}
    after = nnx.to_flat_state(nnx.state(given, nnx.Variable))  # with those that are new
    changed = [(path, x) for path, x in after if x.get_value() is not before.get(path)]
    return out, nnx.from_flat_state(changed)


def _value(x: PyTree) -> Any:
    from flax import nnx

    return x.get_value() if isinstance(x, nnx.Variable) else x


def _name_energies(model: PyTree) -> None:
    """Names each energy of a module by its path."""
    for path, parent, attend in attention_fns(model):
        if attend.energy.name is None:
            energy = with_name(attend.energy, f"{path}.energy")
            setattr(parent, path.rpartition(".")[2], AttentionFn(energy))


def attention_fns(model: PyTree) -> Iterator[tuple[str, Any, AttentionFn]]:
    """The path, the module and the value of each of our `attention_fn`s in a model."""
    for path, parent in modules(model):
        for name, x in vars(parent).items():
            if isinstance(x, AttentionFn):
                yield f"{path}.{name}".lstrip("."), parent, x


def modules(model: PyTree) -> Iterator[tuple[str, Any]]:
    """The path and the value of each module in a model, in order."""
    from flax import nnx

    for path, x in nnx.iter_graph(model):
        if isinstance(x, nnx.Module):
            yield _written(path), x


def _written(path: Path) -> str:
    """A path as Python writes it."""
    return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in path).lstrip(".")
