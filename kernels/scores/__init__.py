"""Scores: functions of the product of a query and a key and of their positions, for all kernels."""

from ._abstract import AbstractScore as AbstractScore
from ._abstract import Compose as Compose
from ._abstract import Function as Function
from ._abstract import ScoreIndices as ScoreIndices
from ._ready import ALiBi as ALiBi
from ._ready import Distance as Distance
from ._ready import RelativeBias as RelativeBias
from ._ready import SoftCap as SoftCap
from ._ready import Temperature as Temperature

__all__ = [
    "ALiBi",
    "AbstractScore",
    "Compose",
    "Distance",
    "Function",
    "RelativeBias",
    "ScoreIndices",
    "SoftCap",
    "Temperature",
]
