"""The free energy, attention as its gradient, and what the other folders share."""
