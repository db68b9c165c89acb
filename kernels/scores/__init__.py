"""Scores: functions of the product of a query and a key and of their positions, for all kernels."""

from ._abstract import AbstractScore as AbstractScore
from ._abstract import At as At
from ._alibi import ALiBi as ALiBi
from ._compose import Compose as Compose
from ._distance import Distance as Distance
from ._function import Function as Function
from ._relative_bias import RelativeBias as RelativeBias
from ._relative_bias import t5_buckets as t5_buckets
from ._soft_cap import SoftCap as SoftCap
from ._temperature import Temperature as Temperature

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
