"""Masks: which key positions a query position sees, for all kernels."""

from ._abstract import AbstractMask as AbstractMask
from ._abstract import And as And
from ._abstract import Function as Function
from ._abstract import Interval as Interval
from ._abstract import Not as Not
from ._abstract import Or as Or
from ._ready import All as All
from ._ready import Causal as Causal
from ._ready import Lengths as Lengths
from ._ready import Prefix as Prefix
from ._ready import TracedWindow as TracedWindow
from ._ready import Window as Window
from ._segments import Segments as Segments
from ._segments import Spans as Spans
from ._visibility import tabulate as tabulate

__all__ = [
    "AbstractMask",
    "All",
    "And",
    "Causal",
    "Function",
    "Interval",
    "Lengths",
    "Not",
    "Or",
    "Prefix",
    "Segments",
    "Spans",
    "TracedWindow",
    "Window",
    "tabulate",
]
