"""The list of sharding methods, from which names, types and checks are derived."""

from collections.abc import Mapping
from typing import Any, Literal

from energy_attn.kernels.internal import check_choice, received

from ..cost._topology import Topology
from ._abstract import AbstractMethod
from ._gather import Gather
from ._hybrid import Hybrid
from ._reproducible import Reproducible
from ._ring import Ring
from ._tree import Tree
from ._ulysses import Ulysses

# Type checkers need a literal; a test compares it with the list below.
MethodName = Literal["tree", "ring", "ulysses", "hybrid", "gather"]
MethodOption = MethodName | Literal["auto"]

METHODS: dict[str, type[AbstractMethod]] = {
    kind.name: kind for kind in (Tree, Ring, Ulysses, Hybrid, Gather, Reproducible)
}
METHOD_OPTIONS = tuple(name for name, kind in METHODS.items() if kind.is_option)
# By the names that `method` and `merge` have for them in the cost model.
VARIANTS: Mapping[str, Mapping[str | None, AbstractMethod]] = {
    name: kind.variants() for name, kind in METHODS.items()
}


def check_method(method: object) -> AbstractMethod:
    """Returns a method as it is, or that of a name. Raises `TypeError` or `ValueError` for anything else."""
    if isinstance(method, AbstractMethod):
        return method
    if not isinstance(method, str):
        raise TypeError(
            f"method: wanted a name or one of distributed.methods, as methods.Ring(), got {received(method)}"
        )
    check_choice("method", method, METHOD_OPTIONS)
    return named_method(method)


def named_method(
    name: str, merge: Any = "auto", topology: Topology | None = None
) -> AbstractMethod:
    """The method of this name, with its defaults; a tree that folds by `merge` on `topology`."""
    kind = METHODS[name]
    return kind(merge, topology) if kind is Tree else kind()
