"""What is asked of a Gibbs measure by functions: the paper's Γ, and attention as its saddle point.

The conjugate of the free energy, the rate function and the maximum a posteriori are methods of
[`Gibbs`][energy_attn.Gibbs].
"""

from ._saddle import gamma as gamma
from ._saddle import saddle_attention as saddle_attention
