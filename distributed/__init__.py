"""WHERE: meshes, collectives and caches; attention states folded across devices."""

from . import cost as cost
from .cache._cache import KVCache as KVCache
from .hlo._collectives import Collective as Collective
from .hlo._collectives import collectives as collectives
from .methods._gather import gather_attention as gather_attention
from .methods._hybrid import hybrid_attention as hybrid_attention
from .methods._merge import logsumexp_across as logsumexp_across
from .methods._merge import merge_across as merge_across
from .methods._ring import ring_attention as ring_attention
from .methods._tree import tree_attention as tree_attention
from .methods._ulysses import ulysses_attention as ulysses_attention
from .runtime._global_arrays import fetch as fetch
from .runtime._global_arrays import place as place
from .runtime._global_arrays import place_like as place_like
from .runtime._initialize import initialize as initialize
from .runtime._mesh import make_mesh as make_mesh
from .spec._layout import shard_sequence as shard_sequence
from .spec._layout import unshard_sequence as unshard_sequence
from .spec._parallel import SequenceParallel as SequenceParallel
