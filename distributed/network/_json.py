"""Objects in files of JSON, whose keys are known."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from energy_attn.kernels.internal import received


def read_json(path: str | os.PathLike[str]) -> object:
    """What a file holds; raises `ValueError` if that is no JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as reason:
        raise ValueError(f"path: wanted a file of JSON, got {path}: {reason}") from reason


def json_fields(
    where: str, x: object, keys: Sequence[str], path: object, also: Sequence[str] = ()
) -> dict[str, Any]:
    """The values of all keys of a JSON object, which has no others but those in `also`.

    Raises `ValueError` that names the key after `where`, and the file.
    """
    if not isinstance(x, dict):
        place = where.rstrip(".") or "path"
        raise ValueError(
            f"{place}: wanted an object with the keys {keys}, got {received(x)}, in {path}"
        )
    for key in keys:
        if key not in x:
            raise ValueError(f"{where}{key}: wanted in {path}, got none")
    for key in x:
        if key not in (*keys, *also):
            raise ValueError(f"{where}{key}: wanted one of the keys {keys}, got {key!r} in {path}")
    return {key: x[key] for key in keys}
