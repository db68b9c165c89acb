"""Prefix trees: drafted continuations verified in one pass, for speculative decoding."""

from ._tree import PrefixTree as PrefixTree
from ._tree import unpack as unpack
