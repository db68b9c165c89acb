"""The record of the measurements: one JSON file, complete after every measurement."""

import contextlib
import json
import math
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

NAME = "first_light.json"
# Time limits in seconds of a measurement, and of the compilation of several; then the process is killed.
MEASURING, COMPILING = 90.0, 240.0

Result = dict[str, Any]  # of one measurement, as stored in JSON


class Late(Exception):
    """The time is spent."""


class Lost(Exception):
    """The device takes no further work from this process."""


class Record:
    """Results by step and label.

    Attributes:
        steps: `{step: {label: result}}`. A result has figures, or the reason why there are none: `declined`
            by the kernel, or an `error`. An error is `final` if the process ended with it.
        deadline: the time, as `time.time()` has it, after which nothing is begun.
        patience: how many times longer than on a GPU anything may take.
    """

    def __init__(
        self, folder: Path, copy: Path | None, deadline: float, patience: float = 1
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.copy = folder / NAME, copy
        self.deadline, self.patience = deadline, patience
        self.steps: dict[str, dict[str, Result]] = {}
        if self.path.exists():
            self.steps = json.loads(self.path.read_text())["steps"]

    @property
    def _now(self) -> Path:
        return self.path.with_suffix(".now")

    def known(self, step: str, label: str) -> bool:
        """Whether a measurement need not be made: a later call repeats errors, but no final ones."""
        result = self.steps.get(step, {}).get(label, {"error": "not begun"})
        return "error" not in result or result.get("final", False)

    def put(self, step: str, label: str, result: Result) -> None:
        """Writes a result to disk."""
        self.steps.setdefault(step, {})[label] = {k: _plain(x) for k, x in result.items()}
        text = json.dumps({"steps": self.steps}, indent=1, default=str) + "\n"
        for path in (self.path, *([self.copy / NAME] if self.copy else ())):
            new = path.with_suffix(".new")
            new.write_text(text)
            new.replace(path)
        shown = " ".join(
            f"{k}={float(f'{x:.4g}') if isinstance(x, float) else x}"
            for k, x in result.items()
            if k != "where"
        )
        left = self.deadline - time.time()
        line = " ".join(f"{step}: {label}: {shown}".split())
        print(f"[{left:6.0f} s left] {line[:300]}", flush=True)

    def begin(self, step: str, labels: Sequence[str], seconds: float) -> None:
        """Records the labels that begin, and their time limit, in case the process ends or hangs.

        Raises `Late` if the time is spent.
        """
        now = time.time()
        if now > self.deadline:
            raise Late
        until = min(now + self.patience * seconds, max(self.deadline, now) + 20 * self.patience)
        new = self._now.with_suffix(".begun")
        new.write_text(json.dumps({"step": step, "labels": list(labels), "until": until}))
        new.replace(self._now)

    def end(self) -> None:
        """Records that nothing is under way."""
        self._now.unlink(missing_ok=True)

    def under_way(self) -> tuple[str, list[str], float] | None:
        """The running step, its labels and its deadline; None if nothing runs."""
        try:
            begun = json.loads(self._now.read_text())
        except FileNotFoundError:
            return None
        return begun["step"], begun["labels"], begun["until"]

    @contextlib.contextmanager
    def guarded(self, step: str, label: str) -> Iterator[None]:
        """Records an exception that is raised within as a result.

        Raises `Late` if the time is spent, and `Lost` if the device does not work any more.
        """
        self.begin(step, [label], MEASURING)
        try:
            yield
        except (Late, Lost):
            raise
        except Exception as reason:
            lost = not _alive()
            self.put(step, label, failure(reason) | ({"final": True} if lost else {}))
            if lost:
                raise Lost from reason
        self.end()


def failure(reason: BaseException) -> Result:
    """The result of a measurement that raises."""
    message = "".join(traceback.format_exception_only(reason)).strip()
    trace = "".join(traceback.format_exception(reason))
    return {"error": message[:1500], "where": trace[-700:].replace(os.getcwd(), ".")}


def _alive() -> bool:
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception:  # whatever a broken context raises
        return False
    return True


def _plain(x: object) -> object:
    """A number that JSON does not have as text."""
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
