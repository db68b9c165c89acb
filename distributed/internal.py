"""Private names of this room that `energy_attn` may import; names of caches and files when they are first used."""

import typing as _typing

from energy_attn.kernels.internal import lazy as _lazy

from .cost import _network as _network
from .merge._abstract import as_invariant as as_invariant
from .merge._strategies import STRATEGIES as STRATEGIES
from .methods._choice import METHOD_OPTIONS as METHOD_OPTIONS
from .methods._layout import place_by as place_by
from .methods._parallel import ShardingPlan as ShardingPlan
from .methods._parallel import check_mesh as check_mesh
from .methods._parallel import is_explicit as is_explicit
from .methods._parallel import mesh_axes_of as mesh_axes_of
from .methods._parallel import other_explicit_axes as other_explicit_axes
from .methods._parallel import reshard_explicit as reshard_explicit
from .methods._parallel import sequence_order as sequence_order
from .methods._parallel import sharding_plan as sharding_plan
from .methods._parallel import split_along as split_along
from .methods._parallel import whole_along as whole_along
from .methods._prepare import fit_plan as fit_plan
from .methods._prepare import plan_call as plan_call
from .methods._sharded import Reduction as Reduction
from .methods._sharded import attend_sharded as attend_sharded
from .methods._sharded import warn_of_cache as warn_of_cache

network = _network

if _typing.TYPE_CHECKING:
    from .cache._arguments import check_counts as check_counts
    from .cache._arguments import check_reach as check_reach
    from .cache._arguments import check_stored as check_stored
    from .cache._tokens import AbstractTokens as AbstractTokens
    from .cache._write import positions_from as positions_from
    from .hlo._collectives import waits as waits
    from .plan._step import CHIPS as CHIPS
    from .plan._step import Chip as Chip
    from .runtime import _files, _safetensors

    files = _files
    safetensors = _safetensors
else:
    __getattr__, __dir__ = _lazy(
        __name__,
        modules={"files": ".runtime._files", "safetensors": ".runtime._safetensors"},
        names={
            "check_counts": ".cache._arguments",
            "check_reach": ".cache._arguments",
            "check_stored": ".cache._arguments",
            "AbstractTokens": ".cache._tokens",
            "positions_from": ".cache._write",
            "waits": ".hlo._collectives",
            "CHIPS": ".plan._step",
            "Chip": ".plan._step",
        },
    )
