"""Attention as the gradient of a free energy.

$$F(\\zeta) = \\log \\sum_a \\exp(q \\cdot k_a + \\zeta \\cdot v_a), \\qquad
  \\mathrm{attention} = \\nabla F(0)$$

Free energies of disjoint key sets add by logaddexp, so attention over keys that live on many
devices is one associative reduction.
"""

from . import _interrupt as _interrupt  # first: the others take seconds to import

# isort: split
import typing as _typing
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from energy_attn.kernels.internal import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from energy_attn.kernels.internal import lazy as _lazy

from . import bayes as bayes
from . import flax as flax
from . import masks as masks
from . import nn as nn
from . import scores as scores
from . import solvers as solvers
from .core._gibbs import Gibbs as Gibbs
from .core._module import FreeEnergy as FreeEnergy
from .functional._attention import attention as attention
from .functional._citation import citation as citation
from .functional._free_energy import free_energy as free_energy
from .functional._reproducible import reproducible as reproducible
from .functional._softmax import entropy_penalty as entropy_penalty
from .functional._softmax import lse_penalty as lse_penalty
from .functional._softmax import safe_softmax as safe_softmax
from .functional._solution import Result as Result
from .functional._solution import Solution as Solution
from .nn._replace import replace_attention as replace_attention
from .nn._replace import restore_attention as restore_attention
from .record._record import record as record
from .record._weigh import attribute as attribute
from .record._weigh import weigh as weigh
from .sparse._tsallis import Tsallis as Tsallis
from .vocabulary._categorical import Categorical as Categorical
from .vocabulary._loss import softmax_cross_entropy as softmax_cross_entropy
from .vocabulary._parallel import VocabularyParallel as VocabularyParallel
from .vocabulary._summed import sum_over_tokens as sum_over_tokens

try:
    __version__ = _version("energy_attn")
except _PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

if _typing.TYPE_CHECKING:
    from . import hopfield as hopfield
    from . import models as models
    from . import plot as plot
    from . import prefix_tree as prefix_tree
    from .report._landscape import landscape as landscape
    from .report._report import energy_report as energy_report
else:
    __getattr__, __dir__ = _lazy(
        __name__,
        modules={
            "hopfield": ".hopfield",
            "models": ".models",
            "plot": ".plot",
            "prefix_tree": ".prefix_tree",
        },
        names={
            "landscape": ".report._landscape",
            "energy_report": ".report._report",
        },
    )
