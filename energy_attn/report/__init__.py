"""Reports on the energies of a model, landscapes, and their plots."""
