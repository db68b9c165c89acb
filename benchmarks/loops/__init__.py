"""Programs that users run, as loops: steps over caches in a `lax.scan`.

Sides are ours by default and by each kernel, `jax.nn`, and PyTorch. Sizes are the library's letters, and `L`, the
tokens that the first row holds before the first step: up to `S`, less the room for the steps. A step has `T` tokens:
one, a chunk of a prompt, or the nodes of a tree of drafts.
"""

from ..runner import Case
from . import _steps, _training

_HEADS = (8, 4, 64), (32, 8, 128), (16, 16, 64), (32, 8, 64), (4, 2, 32)
_DTYPES = "float32", "bfloat16"
_DRAFTS, _SHARDED = "trees of drafts", "decode steps over devices"
_SIDES = {_DRAFTS: _steps.drafts_sides, _SHARDED: _steps.sharded_sides}


def _steps_case(
    name: str, dtype: str, heads: tuple[int, int, int], steps: int, S: int, L: int, **other: int
) -> Case:
    N, K, H = heads
    shape = {"steps": steps, "layers": 2, "B": 1, "T": 1, "S": S, "L": L, "N": N, "K": K, "H": H}
    return Case(name, dtype, shape | other, _SIDES.get(name, _steps.sides), long="TSL")


_DECODE = tuple(
    _steps_case("decode steps", dtype, heads, steps, S, S // share)
    for S, share, steps, several in (
        (1024, 1, 16, _HEADS),
        (8192, 1, 4, _HEADS[:3]),
        (8192, 32, 4, _HEADS[:3]),
    )
    for heads in several
    for dtype in _DTYPES
)
_LONG = tuple(
    _steps_case("decode steps", "bfloat16", _HEADS[0], 2, 65536, L) for L in (2048, 65536)
)
_RAGGED = tuple(
    _steps_case("ragged decode steps", dtype, _HEADS[0], steps, S, S // 64, B=16)
    for S, steps in ((1024, 8), (8192, 2))
    for dtype in _DTYPES
)

_PREFILL = tuple(
    _steps_case("chunked prefill", dtype, _HEADS[0], 2, 8192, L, T=256)
    for L in (0, 8192)
    for dtype in _DTYPES
)
_TREES = tuple(
    _steps_case(_DRAFTS, dtype, _HEADS[0], 4, 8192, L, T=16)
    for L in (256, 8192)
    for dtype in _DTYPES
)
_TRAINING = Case(
    "training step",
    "float32",
    {"layers": 4, "B": 2, "T": 512, "N": 8, "width": 256},
    _training.sides,
)

CASES = (*_DECODE, *_LONG, *_RAGGED, *_PREFILL, *_TREES, _TRAINING)
SHARDED = tuple(
    _steps_case(_SHARDED, dtype, _HEADS[0], 4, 65536, L, devices=8)
    for L in (2048, 65536)
    for dtype in _DTYPES
)
SECOND_ORDER = tuple(
    Case(
        name,
        "float32",
        {"layers": 1, "B": max(1, 512 // T), "T": T, "N": 4, "width": 256},
        _training.second_order_sides,
        {"forward": forward},
    )
    for name, forward in (("forward over reverse", True), ("reverse over reverse", False))
    for T in (128, 512, 2048)
)
