"""Attention as the gradient of a free energy.

$$F(\\zeta) = \\log \\sum_a \\exp(q \\cdot k_a + \\zeta \\cdot v_a), \\qquad
  \\mathrm{attention} = \\nabla F(0)$$

Free energies of disjoint key sets add by logaddexp, so attention over keys that live on many
devices is one associative reduction.
"""

import importlib.metadata

from ._attention import attention as attention
from ._citation import citation as citation
from ._free_energy import free_energy as free_energy
from ._module import FreeEnergy as FreeEnergy
from ._module import MultiheadAttention as MultiheadAttention
from ._softmax import safe_softmax as safe_softmax
from ._softmax import shifted_energy as shifted_energy

__version__ = importlib.metadata.version("energy_attn")
