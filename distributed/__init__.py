"""WHERE: meshes, collectives and caches; states folded across devices."""

from ._collectives import Collective as Collective
from ._collectives import collectives as collectives
from ._merge import logsumexp_across as logsumexp_across
from ._merge import merge_across as merge_across
from ._mesh import make_mesh as make_mesh
from ._parallel import SequenceParallel as SequenceParallel
from ._tree import tree_attention as tree_attention
