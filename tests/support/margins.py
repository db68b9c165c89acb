"""`--margins`: the error over the tolerance of each comparison of a run, the largest last."""

from typing import Any

import pytest

from tests.support.compare import RATIOS


class Margins:
    """Gathers the comparisons of each test, from all processes, and prints them at the end."""

    def __init__(self):
        self._found: list[tuple[float, str, str]] = []

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """The test's report has them."""
        item.user_properties += [("margin", x) for x in RATIOS]
        RATIOS.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In the process that prints."""
        if report.when == "teardown":
            found = [x for name, x in report.user_properties if name == "margin"]
            self._found += [(ratio, report.nodeid, label) for ratio, label in found]  # pyright: ignore[reportGeneralTypeIssues]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """A line for each comparison."""
        for ratio, test, label in sorted(self._found):
            terminalreporter.write_line(f"{ratio:9.2g}  {test} {label}")
