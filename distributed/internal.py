"""What `energy_attn` uses of this room besides what users do; the only door for it."""

from .cache._arguments import check_counts as check_counts
from .cache._arguments import check_reach as check_reach
from .cache._arguments import check_stored as check_stored
from .cache._write import Home as Home
from .cache._write import home as home
from .cache._write import numbered as numbered
from .merge._packing import as_invariant as as_invariant
from .methods._sharded_attention import spread_attention as spread_attention
from .methods._sharded_reduction import Task as Task
from .methods._sharded_reduction import fold_maxima as fold_maxima
from .methods._sharded_reduction import fold_spreads as fold_spreads
from .methods._sharded_reduction import fold_states as fold_states
from .methods._sharded_reduction import spread_rows as spread_rows
from .runtime import _files, _safetensors
from .runtime._files import IDENTITY as IDENTITY
from .runtime._files import UNFINISHED as UNFINISHED
from .runtime._files import check_pulled as check_pulled
from .runtime._safetensors import Part as Part
from .runtime._safetensors import Tensor as Tensor
from .spec._arguments import Axes as Axes
from .spec._layout import sequence_order as sequence_order
from .spec._layout import with_positions as with_positions
from .spec._layout import with_positions_inside as with_positions_inside
from .spec._plan import Placement as Placement
from .spec._plan import arrive as arrive
from .spec._plan import check_mesh as check_mesh
from .spec._plan import is_explicit as is_explicit
from .spec._plan import is_inside as is_inside
from .spec._plan import placement as placement
from .spec._plan import placement_inside as placement_inside
from .spec._plan import split_along as split_along

files = _files
safetensors = _safetensors
