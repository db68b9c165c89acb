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

    `module`: its `__name__`. `modules`: maps a name to the module that it stands for: `{"models": ".models"}`.
    `names`: maps any other name to the module that defines it: `{"KVCache": ".cache._cache"}`. No name may be that of
    a folder of the package, as importing the folder would bind it.
    """
    own, modules, names = sys.modules[module], modules or {}, names or {}

    def get(name: str) -> object:
        if name in modules:
            result: object = importlib.import_module(modules[name], own.__package__)
        elif name in names:
            result = getattr(importlib.import_module(names[name], own.__package__), name)
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        setattr(own, name, result)
        return result

    def list_names() -> list[str]:
        return sorted({*vars(own), *modules, *names})

    return get, list_names
