"""Settings of the whole suite: eight CPU devices, float64 on, no silent promotion of dtypes or ranks, types checked.

Annotated signatures of `energy_attn` are checked against the arrays that pass through them, by jaxtyping and
beartype: `--jaxtyping-packages` in pyproject.toml installs that before the package is imported.
"""

import gc
import os

from tests.support.flags import flags
from tests.support.report import (
    Margins,
    pytest_collection_finish,
    pytest_configure,
    pytest_runtest_makereport,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from tests.support.selection import mark_products, rotate

__all__ = [
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_runtest_makereport",
    "pytest_terminal_summary",
    "pytest_testnodedown",
]

# Before JAX starts a backend. Flags that the user has set are kept; on a machine with an accelerator the suite still
# runs on the CPU unless JAX_PLATFORMS says otherwise.
os.environ["XLA_FLAGS"] = flags(given=os.environ.get("XLA_FLAGS", ""))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import jaxtyping
import pytest
from jax._src import dispatch

_jaxtyped = jaxtyping.jaxtyped


def _jaxtyped_outside(*, typechecker: Any) -> Callable[[Any], Any]:
    """`jaxtyping.jaxtyped` of all but functions inside functions, which it decorates anew at each call."""
    checked = _jaxtyped(typechecker=typechecker)
    return lambda x: x if "<locals>" in x.__qualname__ else checked(x)


# Decorating functions inside functions was a quarter of all time. The hook of jaxtyping looks this name up.
jaxtyping.jaxtyped = _jaxtyped_outside

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The lines of source that an operation comes from are a tenth of all time, and no test reads them.
jax.config.update("jax_traceback_in_locations_limit", 0)

# Traces are many small objects: with Python's own threshold, looking for cycles takes a seventh of all time.
gc.set_threshold(100_000)

# Few examples: nearly every one compiles something. In CI the same ones each time, and none remembered.
hypothesis.settings.register_profile(
    "energy_attn",
    deadline=None,
    max_examples=20,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "energy_attn_ci",
    hypothesis.settings.get_profile("energy_attn"),
    derandomize=True,
    database=None,
)
hypothesis.settings.load_profile("energy_attn_ci" if os.environ.get("CI") else "energy_attn")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which of the cases marked `full` run, and what is printed of comparisons."""
    parser.addoption("--shard", help="2/6: of the cases marked `full`, the second of each six")
    parser.addoption("--touched", action="append", default=[], help="a folder of which more run")
    parser.addoption("--margins", action="store_true", help="print error over tolerance")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the first test."""
    if session.config.getoption("--margins"):
        session.config.pluginmanager.register(Margins())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before tests are chosen by their marks."""
    mark_products(items)
    if config.getoption("--shard"):
        kept = rotate(items, config.getoption("--shard"), config.getoption("--touched"))
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No jaxtyping: wrongly shaped arguments get as far as they do for a user, to the library's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def user_settings() -> Iterator[None]:
    """JAX as a user finds it: float32, and NumPy's promotion."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


@pytest.fixture
def raises_late():
    """JAX keeps the last program that raised, and raises again when it waits for all, at exit for one."""
    yield
    dispatch.runtime_tokens.clear()
