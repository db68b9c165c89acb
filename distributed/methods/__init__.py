"""Sharding methods, for `method=`: how devices that share a sequence attend to all of it.

Examples:
    >>> from energy_attn.distributed import SequenceParallel, methods
    >>> SequenceParallel("device", methods.Ring(rotate="keys")).method.name
    'ring'
"""

from ._abstract import AbstractMethod as AbstractMethod
from ._gather import Gather as Gather
from ._ring import Ring as Ring
from ._tree import Tree as Tree
from ._ulysses import Hybrid as Hybrid
from ._ulysses import Ulysses as Ulysses
