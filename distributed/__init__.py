"""WHERE: meshes, collectives and caches; states folded across devices."""

from . import cost as cost
from ._cache import KVCache as KVCache
from ._collectives import Collective as Collective
from ._collectives import collectives as collectives
from ._initialize import initialize as initialize
from ._layout import shard_sequence as shard_sequence
from ._layout import unshard_sequence as unshard_sequence
from ._merge import logsumexp_across as logsumexp_across
from ._merge import merge_across as merge_across
from ._mesh import make_mesh as make_mesh
from ._parallel import SequenceParallel as SequenceParallel
from ._place import fetch as fetch
from ._place import place as place
from ._ring import ring_attention as ring_attention
from ._tree import tree_attention as tree_attention
from ._ulysses import ulysses_attention as ulysses_attention
