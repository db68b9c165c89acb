"""Reductions over blocks of scores other than attention: covariances, expectations, samples."""
