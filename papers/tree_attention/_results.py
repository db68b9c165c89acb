"""Files of results: runs of one machine, each with the measurements of one configuration."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import write
from benchmarks.runner import machine

Result = dict[str, Any]


def add(path: Path, name: str, rows: Sequence[Result], key: Sequence[str], **about: Any) -> Result:
    """Writes rows to the list `name` of a file, in place of those that agree with one in all fields of `key`."""
    stored = json.loads(path.read_text()) if path.is_file() else {"machine": machine(), name: []}
    if stored["machine"] != machine():
        raise ValueError(f"{path}: holds results of another machine or version; name another file")
    new = [[row[field] for field in key] for row in rows]
    kept = [row for row in stored[name] if [row[field] for field in key] not in new]
    result = stored | about | {name: [*kept, *rows]}
    write(path, result)
    return result
