"""HOW: `(out, lse)` of the keys on one device, and the algebra that folds such states."""

from ._attention import local_attention as local_attention
from ._foreign import as_state as as_state
from ._registry import implementations as implementations
from ._state import AttentionState as AttentionState
from ._state import CovarianceState as CovarianceState
from ._state import empty_state as empty_state
from ._state import merge as merge
from ._state import merge_all as merge_all
