"""Frequencies of samples beside their distribution."""

import numpy as np


def distribution(logits, temperature=1.0, top_k=None, top_p=None):
    """The probabilities that one row of logits is drawn with, in float64."""
    logits = np.asarray(logits, np.float64)
    scaled = (logits - logits.max()) / temperature
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    order = [token for token in order[:top_k] if scaled[token] > -np.inf]
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights /= weights.sum()
    if top_p is not None and top_p < 1:
        reached = np.flatnonzero(np.cumsum(weights) >= top_p)
        kept = reached[0] + 1 if len(reached) else len(order)
        order, weights = order[:kept], weights[:kept] / weights[:kept].sum()
    P = np.zeros(len(scaled))
    P[order] = weights
    return P
