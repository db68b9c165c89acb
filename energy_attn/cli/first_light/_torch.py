"""The step `torch`: PyTorch's attention by cuDNN and by FlashAttention, in a process of its own."""

import json
import subprocess
import sys
import time
from pathlib import Path

from ._bench import Bench
from ._speed import squares

_CHILD = Path(__file__).with_name("_torch_child.py")
_BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}


def torch(bench: Bench) -> None:
    """The shapes of `prefill`. PyTorch measures in seconds what it takes Python to start another library."""
    asked = {}
    for square in squares(bench):
        for name, backend in _BACKENDS.items():
            for which in ("forward", "both"):
                label = f"{square.label} {which} torch {name}"
                if not bench.record.known("torch", label):
                    about = {"kernel": f"torch {name}", "pass": which, **square._asdict()}
                    question = [label, backend, *square, which]
                    asked[label] = about, square.flop(which == "both"), question
    if not asked:
        return
    bench.record.end()  # its own limit is that of the whole
    left = max(bench.record.deadline - time.time(), 20)
    questions = "\n".join(json.dumps(question) for _, _, question in asked.values())
    done = subprocess.run(
        [sys.executable, str(_CHILD)], input=questions, text=True, capture_output=True, timeout=left
    )
    for line in done.stdout.splitlines():
        label, found = json.loads(line)
        about, flop, _ = asked.pop(label)
        if "seconds" in found:
            found["tflop_per_s"] = flop / found["seconds"] / 1e12
        bench.record.put("torch", label, {**about, **found})
    for label, (about, *_) in asked.items():
        said = (done.stderr.strip().splitlines() or ["ended early"])[-1][:800]
        bench.record.put("torch", label, {**about, "error": said})
