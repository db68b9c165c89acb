"""The free energy, attention as its gradient, and what the other folders share."""

from ._softmax import shifted_energy as shifted_energy
