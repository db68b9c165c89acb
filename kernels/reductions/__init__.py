"""Reductions over blocks of scores that are not attention: covariances, expectations, samples."""
