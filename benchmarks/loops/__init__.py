"""Programs that users run, as loops: steps over caches in a `lax.scan`.

Sides are ours by default and by each kernel, `jax.nn`, and PyTorch. Sizes are the library's letters, and `L`, the
tokens that the first row holds before the first step: up to `S`, less the room for the steps.
"""

from ..runner import Case
from . import _steps

_HEADS = (8, 4, 64), (32, 8, 128), (16, 16, 64), (32, 8, 64), (4, 2, 32)
_DTYPES = "float32", "bfloat16"


def _steps_case(
    name: str, dtype: str, heads: tuple[int, int, int], steps: int, S: int, L: int, **other: int
) -> Case:
    N, K, H = heads
    shape = {"steps": steps, "layers": 2, "B": 1, "T": 1, "S": S, "L": L, "N": N, "K": K, "H": H}
    sides = _steps.sharded_sides if "devices" in other else _steps.sides
    return Case(name, dtype, shape | other, sides, long="TSL")


_DECODE = tuple(
    _steps_case("decode steps", dtype, heads, steps, S, S // share)
    for S, share, steps, several in (
        (1024, 1, 24, _HEADS),
        (8192, 1, 8, _HEADS[:3]),
        (8192, 32, 8, _HEADS[:3]),
    )
    for heads in several
    for dtype in _DTYPES
)
_LONG = tuple(
    _steps_case("decode steps", "bfloat16", _HEADS[0], 4, 65536, L) for L in (2048, 65536)
)
_RAGGED = tuple(
    _steps_case("ragged decode steps", dtype, _HEADS[0], steps, S, S // 64, B=16)
    for S, steps in ((1024, 8), (8192, 4))
    for dtype in _DTYPES
)

CASES = (*_DECODE, *_LONG, *_RAGGED)
SHARDED = tuple(
    _steps_case("decode steps over devices", dtype, _HEADS[0], 4, 65536, L, devices=8)
    for L in (2048, 65536)
    for dtype in _DTYPES
)
