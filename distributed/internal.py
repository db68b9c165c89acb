"""Private names of this room that `energy_attn` may import; names of caches and files when they are first used."""

import typing as _typing

from energy_attn.kernels.internal import lazy as _lazy

from .cost._network import part_sent as part_sent
from .cost._network import seconds as seconds
from .hlo._parse import Kind as Kind
from .merge._abstract import Axes as Axes
from .merge._abstract import as_invariant as as_invariant
from .merge._strategies import STRATEGIES as STRATEGIES
from .methods._layout import place_by as place_by
from .methods._layout import sequence_order as sequence_order
from .methods._local import unbatched as unbatched
from .methods._parallel import METHOD_OPTIONS as METHOD_OPTIONS
from .methods._plan import ShardingPlan as ShardingPlan
from .methods._plan import check_mesh as check_mesh
from .methods._plan import is_explicit as is_explicit
from .methods._plan import reshard_explicit as reshard_explicit
from .methods._plan import sharding_plan as sharding_plan
from .methods._plan import split_along as split_along
from .methods._plan import whole_along as whole_along
from .methods._prepare import fit_plan as fit_plan
from .methods._prepare import plan_call as plan_call
from .methods._sharded import Reduction as Reduction
from .methods._sharded import attend_sharded as attend_sharded
from .methods._sharded import fold_maxima as fold_maxima
from .methods._sharded import fold_states as fold_states
from .methods._sharded import fold_sums as fold_sums
from .methods._sharded import sharded_reduction as sharded_reduction

if _typing.TYPE_CHECKING:
    from .cache._arguments import check_counts as check_counts
    from .cache._arguments import check_reach as check_reach
    from .cache._arguments import check_stored as check_stored
    from .cache._tokens import AbstractTokens as AbstractTokens
    from .cache._tokens import run_of as run_of
    from .cache._write import positions_from as positions_from
    from .hlo._collectives import waits as waits
    from .plan._step import CHIPS as CHIPS
    from .runtime import _files, _safetensors
    from .runtime._files import IDENTITY as IDENTITY
    from .runtime._files import UNFINISHED as UNFINISHED
    from .runtime._files import check_file as check_file
    from .runtime._safetensors import Part as Part
    from .runtime._safetensors import Tensor as Tensor

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
            "run_of": ".cache._tokens",
            "positions_from": ".cache._write",
            "waits": ".hlo._collectives",
            "CHIPS": ".plan._step",
            "IDENTITY": ".runtime._files",
            "UNFINISHED": ".runtime._files",
            "check_file": ".runtime._files",
            "Part": ".runtime._safetensors",
            "Tensor": ".runtime._safetensors",
        },
    )
