"""Report at the end of a run: CPU seconds of folders and tests, and the margins of comparisons (`--margins`)."""

import json
import os
from collections import Counter
from typing import Any

import pytest

from tests.support.compare import RATIOS

# Where the gate wants a run's seconds by folder.
FILE = "GATE_SECONDS"
SLOWEST = 8
SECONDS, CASES, TESTS = (pytest.StashKey[Counter]() for _ in range(3))
_spent = 0.0


def _seconds() -> float:
    return sum(os.times()[:4])


def _since() -> float:
    """Seconds since the last call."""
    global _spent
    before, _spent = _spent, _seconds()
    return _spent - before


def pytest_collection_finish(session: pytest.Session) -> None:
    """Counts the seconds of collecting, which each worker does."""
    took = _since()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["collected"] = took
    else:
        session.config.stash[SECONDS] = Counter({"(collection)": took})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Adds the seconds of a test's phase to its report."""
    report = yield
    report.seconds = _since()
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds the seconds that a worker of pytest-xdist took to collect."""
    took = getattr(node, "workeroutput", {}).get("collected", 0.0)
    node.config.stash.setdefault(SECONDS, Counter())["(collection)"] += took


class Count:
    """Adds up reports, in the process that prints."""

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: Any) -> None:
        folder = report.nodeid.split("::")[0].rpartition("/")[0]
        stash, took = self.config.stash, getattr(report, "seconds", 0.0)
        stash.setdefault(SECONDS, Counter())[folder] += took
        stash.setdefault(TESTS, Counter())[report.nodeid] += took
        stash.setdefault(CASES, Counter())[folder] += report.when == "setup"


def pytest_configure(config: pytest.Config) -> None:
    """Registers `Count` in the one process that prints."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Count(config))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints CPU seconds and cases by folder, and the slowest tests."""
    seconds, cases = (config.stash.get(key, Counter()) for key in (SECONDS, CASES))
    if not cases:
        return
    write = terminalreporter.write_line
    for folder, took in sorted(seconds.items()):
        write(f"{took:8.1f} s  {cases[folder]:5}  {folder}")
    write(f"{seconds.total():8.1f} s  {cases.total():5}  CPU seconds and cases in all; slowest:")
    for name, took in config.stash[TESTS].most_common(SLOWEST):
        write(f"{took:8.1f} s         {name}")
    if FILE in os.environ:
        rows = {folder: [took, cases[folder]] for folder, took in seconds.items()}
        with open(os.environ[FILE], "a", encoding="utf-8") as file:
            file.write(json.dumps(rows) + "\n")


class Margins:
    """Gathers the comparisons of each test, from all processes, and prints them at the end."""

    def __init__(self):
        self._found: list[tuple[float, str, str]] = []

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Adds the test's comparisons to its report."""
        item.user_properties += [("margin", x) for x in RATIOS]
        RATIOS.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gathers comparisons in the process that prints."""
        if report.when == "teardown":
            found = [x for name, x in report.user_properties if name == "margin"]
            self._found += [(ratio, report.nodeid, label) for ratio, label in found]  # pyright: ignore[reportGeneralTypeIssues]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints a line for each comparison."""
        for ratio, test, label in sorted(self._found):
            terminalreporter.write_line(f"{ratio:9.2g}  {test} {label}")
