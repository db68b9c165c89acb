"""Attention as the gradient of a free energy.

$$F(\\zeta) = \\log \\sum_a \\exp(q \\cdot k_a + \\zeta \\cdot v_a), \\qquad
  \\mathrm{attention} = \\nabla F(0)$$

Free energies of disjoint key sets add by logaddexp, so attention over keys that live on many
devices is one associative reduction.
"""

from importlib.metadata import version as _version

from . import prefix_tree as prefix_tree
from ._attention import attention as attention
from ._bayes._conjugate import conjugate as conjugate
from ._bayes._conjugate import rate as rate
from ._bayes._map import map_attention as map_attention
from ._bayes._saddle import gamma as gamma
from ._bayes._saddle import saddle_attention as saddle_attention
from ._citation import citation as citation
from ._cumulants import covariance as covariance
from ._cumulants import cumulant as cumulant
from ._cumulants import moment as moment
from ._entropy import ScoreMoments as ScoreMoments
from ._entropy import entropy as entropy
from ._entropy import score_moments as score_moments
from ._entropy import temperature_sensitivity as temperature_sensitivity
from ._free_energy import free_energy as free_energy
from ._hopfield._block import EnergyAttentionBlock as EnergyAttentionBlock
from ._hopfield._retrieve import retrieve as retrieve
from ._landscape import Landscape as Landscape
from ._landscape import landscape as landscape
from ._module import FreeEnergy as FreeEnergy
from ._multihead import MultiheadAttention as MultiheadAttention
from ._penalty import entropy_penalty as entropy_penalty
from ._penalty import lse_penalty as lse_penalty
from ._plot_landscape import plot_landscape as plot_landscape
from ._plot_report import plot_energy_report as plot_energy_report
from ._report import EnergyReport as EnergyReport
from ._report import energy_report as energy_report
from ._sample import sample_keys as sample_keys
from ._softmax import safe_softmax as safe_softmax
from ._softmax import shifted_energy as shifted_energy
from ._solution import Result as Result
from ._solution import Solution as Solution

__version__ = _version("energy_attn")
