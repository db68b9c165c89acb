"""The free energy as an Equinox module, and its Gibbs measure over given keys."""
