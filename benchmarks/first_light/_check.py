"""The step `check`: runs the tests of kernels on the attached GPU, and records the result of each test."""

import os
from typing import Any

import pytest

from tests.support.compare import RATIOS
from tests.support.flags import LEVEL

from ._bench import Bench, Result, failure

# The most important come first, in case time runs out.
FILES = (
    "tests/kernels/vendor/test_vendors.py::test_on_a_gpu",
    "tests/kernels/dispatch/test_local_attention.py::TestEveryImplementation",
    "tests/kernels/pallas/test_mosaic_gpu.py",
    "tests/kernels/pallas/test_tile_program.py",
    "tests/kernels/pallas/test_canonical.py",
)
TRIAL = (FILES[0], f"{FILES[1]}::test_many_blocks")


def run_tests(bench: Bench, files: tuple[str, ...] = FILES) -> None:
    """Runs the tests that have no result yet; in a trial a few of them, as `make test` has them.

    Raises `RuntimeError` if pytest cannot run them.
    """
    # without the suite's options: its check of annotations wants that the library is not imported yet
    options = ["-q", "--tb=no", "-o", "addopts=", "-W", "ignore:Module already imported"]
    if bench.trial:
        files, options = TRIAL, [*options, "-m", "not full"]
    else:  # the suite compiles cheaply unless it is told otherwise
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {LEVEL}=3"
    status = pytest.main([*options, *files], plugins=[Recorder(bench)])
    ran = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED
    if status not in ran:
        raise RuntimeError(f"pytest ended with {status!r}")


class Recorder:
    """A plugin of pytest that keeps each result on disk."""

    def __init__(self, bench: Bench):
        self.bench = bench

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Removes tests that have a result, and puts the tests of `make test` first."""
        items[:] = [item for item in items if not self.bench.known("check", item.nodeid)]
        items.sort(key=lambda item: item.get_closest_marker("full") is not None)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Records that a test begins."""
        self.bench.begin("check", item.nodeid)

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """Records whether the kernel was right, wrong, declined or raised."""
        if call.excinfo is None and call.when != "call":
            return
        callspec = getattr(item, "callspec", None)
        kernel = callspec and callspec.params.get("implementation")
        # a test without this parameter is in a file with the kernel's name
        about: Result = {"kernel": kernel or item.path.stem.removeprefix("test_")}
        if RATIOS:
            about["of_tolerance"] = max(ratio for ratio, _ in RATIOS)
            RATIOS.clear()
        reason = None if call.excinfo is None else call.excinfo.value
        if reason is None:
            result = {"good": True}
        elif isinstance(reason, pytest.skip.Exception):
            result = {"declined": str(reason)}
        elif isinstance(reason, AssertionError):
            result = {"good": False, "said": str(reason)[:500]}
        else:
            return self.bench.failed("check", item.nodeid, about | failure(reason))
        self.bench.put("check", item.nodeid, about | result)
