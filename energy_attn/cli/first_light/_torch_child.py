"""A script: times PyTorch's attention for each line of its input, and prints a line of JSON for it.

It imports nothing of the package, so that a process has JAX's memory or PyTorch's, and not both.
"""

import importlib
import json
import statistics
import sys
from typing import Any


def main() -> None:
    """Reads, measures and prints."""
    torch: Any = importlib.import_module("torch")
    attention: Any = importlib.import_module("torch.nn.attention")
    for line in sys.stdin:
        label, backend, *sizes = json.loads(line)
        try:
            found = _measure(torch, attention, backend, *sizes)
        except Exception as reason:  # whatever a backend does not take
            found = {"error": repr(reason)[:500]}
        print(json.dumps([label, found]), flush=True)


def _measure(
    torch: Any,
    attention: Any,
    backend: str,
    batch: int,
    length: int,
    heads: int,
    width: int,
    causal: bool,
    which: str,
) -> dict[str, Any]:
    both = which == "both"
    shape = (batch, length, heads, width)
    arrays = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    *leaves, cotangent = (x.transpose(1, 2) for x in arrays)
    leaves = [x.requires_grad_(both) for x in leaves]

    def run() -> None:
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        if both:
            torch.autograd.grad(out, leaves, cotangent)

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    groups = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            run()
        stop.record()
        torch.cuda.synchronize()
        groups.append(start.elapsed_time(stop) / 5e3)
    return {"seconds": statistics.median(groups), "torch": str(torch.__version__)}


if __name__ == "__main__":
    main()
