"""Masks: which key positions a query position sees, for all kernels."""

from ._abstract import AbstractMask as AbstractMask
from ._abstract import And as And
from ._abstract import Not as Not
from ._abstract import Or as Or
from ._function import Function as Function
from ._interval import Interval as Interval
from ._lengths import Lengths as Lengths
from ._lengths import Prefix as Prefix
from ._segments import Segments as Segments
from ._table import BlockTable as BlockTable
from ._table import tabulate as tabulate
from ._window import All as All
from ._window import Causal as Causal
from ._window import Window as Window

__all__ = [
    "AbstractMask",
    "All",
    "And",
    "BlockTable",
    "Causal",
    "Function",
    "Interval",
    "Lengths",
    "Not",
    "Or",
    "Prefix",
    "Segments",
    "Window",
    "tabulate",
]
