"""The scripts of papers/tree_attention: as modules, and as commands in this process."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import equinox as eqx
import pytest

ROOT = Path(__file__).resolve().parents[2]
TREE_ATTENTION = ROOT / "papers" / "tree_attention"


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


def held(sharded):
    """The rows of the file with queries on all devices or sharded, by case and then by method."""
    kept = json.loads((ROOT / "docs" / "benchmarks" / "memory.json").read_text(encoding="utf-8"))
    cases: dict = {}
    for row in kept["rows"]:
        if row["sharded"] == sharded:
            case = row["device"], row["devices"], row["keys"], row["heads"]
            cases.setdefault(case, {})[row["method"]] = row
    return cases


def fits(case):
    """A compiled program fits; and what attention sends is what the model says."""
    assert all(program["holds"] <= case["memory"] for program in case["programs"].values())
    for name in ("tree", "ring, keys"):
        program = case["programs"][name]
        said, sent = program["attention_sends"], program["sends"]
        if case["weights"] == "whole on every device":
            # XLA:GPU may send several arrays at once
            assert {kind: x["bytes"] for kind, x in said.items()} == {
                kind: x["bytes"] for kind, x in sent.items()
            }, (case, name)
        for kind, x in said.items():
            assert sent[kind]["bytes"] >= x["bytes"], (case, name)


def compiled_ahead(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles Llama 3.2 1B for a target: it holds and sends what the model of costs says, no more."""
    aot, paper = module("_tables_aot"), module("_tables_paper")
    (case,) = (x for x in aot.CASES if x.target == target and x.model == "Llama 3.2 1B")
    # what raises when a program runs wants a device that is here
    monkeypatch.setattr(eqx, "branched_error_if", lambda x, *said: x)
    found = aot.compile_case(case, aot.TARGETS[target])
    fits(found)
    weights = paper.bytes_of(paper.abstract(paper.LLAMAS[case.model]))
    slots, devices = found["slots"], aot.TARGETS[target].topology.devices
    least = weights + 16 * 2 * slots // devices * 8 * 64 * 2
    assert least < found["programs"]["tree"]["holds"] < 1.05 * least
