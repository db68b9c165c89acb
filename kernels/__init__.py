"""HOW: `(out, lse)` of the keys on one device, and the algebra that merges such states."""

from .call._foreign import as_state as as_state
from .call._kernel import AbstractJAXKernel as AbstractJAXKernel
from .call._kernel import AbstractKernel as AbstractKernel
from .call._operands import KernelCall as KernelCall
from .call._operands import Operands as Operands
from .call._operands import Settings as Settings
from .call._state import AttentionState as AttentionState
from .call._state import CovarianceState as CovarianceState
from .call._state import empty_state as empty_state
from .call._state import merge as merge
from .call._state import merge_all as merge_all
from .dispatch._registry import implementations as implementations
from .dispatch._registry import local_attention as local_attention
