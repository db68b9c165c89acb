"""The schedule of a compiled program: what lies between the start of a transfer and its end."""

import re

_KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu", "__cublas")


def waits(text: str, kind: str = "collective-permute") -> list[str]:
    """The collectives of a kind of a scheduled program beside which no attention is computed.

    Attention is a kernel, a matrix product, or whatever has one inside.
    """
    computations = _computations(text)
    found = []
    for lines in computations.values():
        busy = [i for i, line in enumerate(lines) if _has_products(line, computations)]
        for start, line in enumerate(lines):
            begun = re.search(rf"(%\S+) = .* {kind}(-start)?\(", line)
            if not begun:
                continue
            if not begun[2]:  # one that nothing can be beside
                found.append(begun[1])
                continue
            ends = rf"{kind}-done\([^%]*{re.escape(begun[1])}\)"
            end = next(i for i, later in enumerate(lines) if re.search(ends, later))
            if not any(start < i < end for i in busy):
                found.append(begun[1])
    return found


def _computations(text: str) -> dict[str, list[str]]:
    """The instructions of each computation, in their order; the program itself is `"ENTRY"`."""
    found = {}
    for part in text.split("\n\n"):
        head, *lines = part.strip().split("\n")
        name = re.match(r"(ENTRY|%\S+) .*\{$", head)
        if name:
            found[name[1]] = lines
    return found


def _has_products(line: str, computations: dict[str, list[str]]) -> bool:
    if re.search(r" (dot|convolution)\(", line) or any(name in line for name in _KERNELS):
        return True
    called = re.findall(
        r"(?:calls|body|to_apply|true_computation|false_computation)=(%[\w.\-]+)", line
    )
    for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
        called += re.findall(r"%[\w.\-]+", branches)
    return any(_has_products(x, computations) for name in called for x in computations[name])
