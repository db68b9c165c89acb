"""The sharding methods by name."""

from typing import Any

from energy_attn.kernels.internal import check_choice, received

from .. import cost
from ._abstract import AbstractMethod
from ._gather import Gather
from ._hybrid import Hybrid
from ._ring import Ring
from ._tree import Tree
from ._ulysses import Ulysses

METHODS: dict[str, type[AbstractMethod]] = {
    kind.name: kind for kind in (Tree, Ring, Ulysses, Hybrid, Gather)
}


def check_method(method: object) -> AbstractMethod:
    """Returns a method as it is, or that of a name. Raises `TypeError` or `ValueError` for anything else."""
    if isinstance(method, AbstractMethod):
        return method
    if not isinstance(method, str):
        raise TypeError(
            f"method: wanted a name or one of distributed.methods, as methods.Ring(), got {received(method)}"
        )
    check_choice("method", method, tuple(METHODS))
    return named_method(method)


def named_method(
    name: str, merge: Any = "auto", topology: cost.Topology | None = None
) -> AbstractMethod:
    """The method of this name, with its defaults; a tree that folds by `merge` on `topology`."""
    kind = METHODS[name]
    return kind(merge, topology) if kind is Tree else kind()
