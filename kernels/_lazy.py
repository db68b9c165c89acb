"""Names that a module imports when they are first used: programs that do not use them start sooner.

Such a module imports these names where type checkers and the documentation look, under `typing.TYPE_CHECKING`, and
lists them again for `lazy`. `tests/repository/test_lazy.py` compares the two.
"""

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy(
    module: str, *, modules: Mapping[str, str] | None = None, names: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` (PEP 562) of a module that imports names when they are first used.

    `module`: its `__name__`. `modules`: for a name that is a module, that module: `{"models": ".models"}`.
    `names`: for any other, the module that defines it: `{"KVCache": ".cache._cache"}`; in a package none is the
    name of one of its folders, to which any import from it would bind it.
    """
    own, modules, names = sys.modules[module], modules or {}, names or {}

    def get(name: str) -> object:
        if name in modules:
            found: object = importlib.import_module(modules[name], own.__package__)
        elif name in names:
            found = getattr(importlib.import_module(names[name], own.__package__), name)
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        setattr(own, name, found)
        return found

    def list_names() -> list[str]:
        return sorted({*vars(own), *modules, *names})

    return get, list_names
