"""The scripts of papers/tree_attention: as modules, and as commands in this process."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

TREE_ATTENTION = Path(__file__).resolve().parents[2] / "papers" / "tree_attention"


def module(name: str) -> ModuleType:
    """A script of the folder, which finds its neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TREE_ATTENTION)
        return importlib.import_module(name)


def refused(name: str, *arguments: object) -> None:
    """Runs a script with arguments that it is to refuse before it does anything."""
    script = module(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            script.main()
    assert left.value.code == 2
