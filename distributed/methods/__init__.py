"""Sharding methods that have options, for `method=`; those without are named, as `method="ulysses"`.

Examples:
    >>> from energy_attn.distributed import SequenceParallel, methods
    >>> SequenceParallel("device", methods.Ring(rotate="keys")).method.name
    'ring'
"""

from ._ring import Ring as Ring
from ._tree import Tree as Tree
