"""The free energy as an Equinox module, and the Gibbs measure of the keys that it defines."""
