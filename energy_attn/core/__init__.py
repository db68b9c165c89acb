"""The free energy as an Equinox module, and the measure that it is of given keys."""
