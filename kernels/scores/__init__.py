"""Scores: functions of the product of a query and a key and of their positions, for all kernels."""

from ._abstract import AbstractScore as AbstractScore
from ._abstract import At as At
from ._distance import ALiBi as ALiBi
from ._distance import Distance as Distance
from ._distance import RelativeBias as RelativeBias
from ._distance import t5_buckets as t5_buckets
from ._function import Compose as Compose
from ._function import Function as Function
from ._scale import SoftCap as SoftCap
from ._scale import Temperature as Temperature

__all__ = [
    "ALiBi",
    "AbstractScore",
    "At",
    "Compose",
    "Distance",
    "Function",
    "RelativeBias",
    "SoftCap",
    "Temperature",
    "t5_buckets",
]
