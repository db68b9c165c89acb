"""WHERE: meshes, collectives and caches; attention states folded across devices."""

import typing as _typing

from energy_attn.kernels.internal import lazy as _lazy

from . import cost as cost
from . import methods as methods
from .merge._across import logsumexp_across as logsumexp_across
from .merge._across import merge_across as merge_across
from .methods._layout import shard_sequence as shard_sequence
from .methods._layout import unshard_sequence as unshard_sequence
from .methods._local import sharded_attention as sharded_attention
from .methods._parallel import SequenceParallel as SequenceParallel
from .runtime._mesh import fetch as fetch
from .runtime._mesh import make_mesh as make_mesh
from .runtime._mesh import place as place

if _typing.TYPE_CHECKING:
    from . import plan as plan
    from .cache._cache import KVCache as KVCache
    from .cache._fork import ForkedCache as ForkedCache
    from .hlo._collectives import collectives as collectives
    from .runtime._initialize import initialize as initialize
else:
    __getattr__, __dir__ = _lazy(
        __name__,
        modules={"plan": ".plan"},
        names={
            "KVCache": ".cache._cache",
            "ForkedCache": ".cache._fork",
            "collectives": ".hlo._collectives",
            "initialize": ".runtime._initialize",
        },
    )
