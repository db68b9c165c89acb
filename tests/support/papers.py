"""The scripts of papers/tree_attention as commands in this process, and their committed figures of memory."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREE_ATTENTION = ROOT / "papers" / "tree_attention"


def refused(script: ModuleType, *arguments: object) -> None:
    """Runs a script with arguments that it is to refuse before it does anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            script.main()
    assert left.value.code == 2


def held(sharded):
    """The rows of the file with queries on all devices or sharded, by case and then by method."""
    kept = json.loads((ROOT / "docs" / "benchmarks" / "memory.json").read_text(encoding="utf-8"))
    cases: dict = {}
    for row in kept["rows"]:
        if row["sharded"] == sharded:
            case = row["device"], row["devices"], row["keys"], row["heads"]
            cases.setdefault(case, {})[row["method"]] = row
    return cases
