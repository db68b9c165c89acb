"""Cumulants, entropies, score moments and samples of the Gibbs distribution of the keys."""
