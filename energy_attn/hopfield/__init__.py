"""Modern Hopfield networks and Energy Transformers: energies of states and of tokens."""

from ._block import EnergyAttentionBlock as EnergyAttentionBlock
from ._retrieve import retrieve as retrieve
