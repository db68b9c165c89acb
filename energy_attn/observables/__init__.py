"""Cumulants, entropies, score moments and samples of the Gibbs measure of the keys."""
