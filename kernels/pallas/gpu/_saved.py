"""Plans of the GPU kernels in files: what was measured on a device, for all calls of a process."""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._checks import received
from ..._json import json_fields, read_json
from ._sizes import GPUPlan, GPUTiles

ENVIRONMENT = "ENERGY_ATTN_GPU_PLAN"
_FIELDS = tuple(field.name for field in dataclasses.fields(GPUTiles))


def save_gpu_plan(
    path: str | os.PathLike[str], plan: GPUPlan, *, measured: Mapping[str, Any] | None = None
) -> None:
    """Writes a plan to a JSON file.

    Args:
        path: of the file.
        plan: what to write.
        measured: what it was chosen by; kept in the file and not read.

    Raises:
        TypeError: `plan` is no `GPUPlan`.
        OSError: the file cannot be written.

    Source: none: see [`load_gpu_plan`][energy_attn.kernels.load_gpu_plan].

    Examples:
        >>> import tempfile
        >>> from energy_attn.kernels import GPUPlan, GPUTiles, load_gpu_plan, save_gpu_plan
        >>> plan = GPUPlan((GPUTiles("forward", rows=128, keys=64, width=64),))
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
        ...     save_gpu_plan(file.name, plan)
        ...     load_gpu_plan(file.name) == plan
        True
    """
    if not isinstance(plan, GPUPlan):
        raise TypeError(f"plan: wanted a GPUPlan, got {received(plan)}")
    kept: dict[str, Any] = dataclasses.asdict(plan)
    if measured is not None:
        kept["measured"] = dict(measured)
    Path(path).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def load_gpu_plan(path: str | os.PathLike[str]) -> GPUPlan:
    """A plan from a JSON file, such as `python -m energy_attn bench --suite tune` writes.

    Pass it to `PallasGPU(plan)`, or name the file in the environment variable `ENERGY_ATTN_GPU_PLAN`: then
    `pallas_gpu` has its tiles in all programs that are lowered from then on.

    Args:
        path: of the file.

    Returns:
        A [`GPUPlan`][energy_attn.kernels.GPUPlan].

    Raises:
        ValueError: the file holds no plan, with the key that is wrong.
        OSError: the file cannot be read.

    Source: none: the keys are the fields of `GPUPlan` and `GPUTiles`.

    Examples:
        >>> import tempfile
        >>> from energy_attn.kernels import GPUPlan, load_gpu_plan, save_gpu_plan
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
        ...     save_gpu_plan(file.name, GPUPlan())
        ...     load_gpu_plan(file.name)
        GPUPlan(tiles=())
    """
    fields = json_fields("", read_json(path), ("tiles",), path, also=("measured",))
    if not isinstance(fields["tiles"], list):
        raise ValueError(f"tiles: wanted a list, got {received(fields['tiles'])}, in {path}")
    found = []
    for i, x in enumerate(fields["tiles"]):
        given = json_fields(f"tiles[{i}].", x, _FIELDS, path)
        try:
            found.append(GPUTiles(**given))
        except (TypeError, ValueError) as reason:
            raise ValueError(f"tiles[{i}].{reason}, in {path}") from reason
    return GPUPlan(tuple(found))


def plan_from_environment() -> GPUPlan | None:
    """The plan in the file that the environment names, if it names one."""
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return None
    try:
        return _read(path, os.stat(path).st_mtime_ns)
    except (ValueError, OSError) as reason:
        raise ValueError(f"{ENVIRONMENT}: {reason}") from reason


@functools.lru_cache(8)
def _read(path: str, changed: int) -> GPUPlan:
    del changed  # a file that is written anew is read again
    return load_gpu_plan(path)
