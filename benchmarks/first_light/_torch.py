"""The step `torch`: PyTorch's attention by cuDNN and by FlashAttention, in a process of its own.

Run as a script, this module times PyTorch for each line of its input, and prints a line of JSON for it. It imports
nothing else of the folder then, so that a process has JAX's memory or PyTorch's, and not both.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._bench import Bench

_BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}


def torch(bench: Bench) -> None:
    """Times PyTorch's attention on the shapes of `prefill`, in another process."""
    from ._speed import squares

    questions = {}
    for square in squares(bench):
        for name, backend in _BACKENDS.items():
            for kind in ("forward", "both"):
                label = f"{square.label} {kind} torch {name}"
                if not bench.record.known("torch", label):
                    about = {"kernel": f"torch {name}", "pass": kind, **square._asdict()}
                    question = json.dumps([label, backend, *square, kind])
                    questions[label] = about, square.flop(kind == "both"), question
    if not questions:
        return
    bench.record.end()  # its own limit is that of the whole
    done = subprocess.run(
        [sys.executable, __file__],
        input="\n".join(question for *_, question in questions.values()),
        text=True,
        capture_output=True,
        timeout=max(bench.deadline - time.time(), 20),
    )
    for line in done.stdout.splitlines():
        label, result = json.loads(line)
        about, flop, _ = questions.pop(label)
        if "seconds" in result:
            result["tflop_per_s"] = flop / result["seconds"] / 1e12
        bench.record.put("torch", label, {**about, **result})
    for label, (about, *_) in questions.items():
        error = (done.stderr.strip().splitlines() or ["ended early"])[-1][:800]
        bench.record.put("torch", label, {**about, "error": error})


def _measure(
    backend: str, batch: int, length: int, heads: int, width: int, causal: bool, kind: str
) -> dict[str, Any]:
    torch: Any = importlib.import_module("torch")
    attention: Any = importlib.import_module("torch.nn.attention")
    shape, backward = (batch, length, heads, width), kind == "both"
    arrays = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    *leaves, cotangent = (x.transpose(1, 2) for x in arrays)
    leaves = [x.requires_grad_(backward) for x in leaves]

    def run(times: int) -> None:
        for _ in range(times):
            with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
                out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
            if backward:
                torch.autograd.grad(out, leaves, cotangent)

    run(3)
    torch.cuda.synchronize()
    groups = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(5)
        stop.record()
        torch.cuda.synchronize()
        groups.append(start.elapsed_time(stop) / 5e3)
    return {"seconds": statistics.median(groups), "torch": str(torch.__version__)}


if __name__ == "__main__":
    for line in sys.stdin:
        label, *question = json.loads(line)
        try:
            result = _measure(*question)
        except Exception as reason:  # a backend may decline
            result = {"error": repr(reason)[:500]}
        print(json.dumps([label, result]), flush=True)
