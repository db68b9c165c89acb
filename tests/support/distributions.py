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


def statistic(drawn: np.ndarray, weights: np.ndarray) -> float:
    """Pearson's, standardised: of about unit size if `drawn` `[B, T, N, n]` follows `weights` `[B, N, T, S]`.

    Keys that are expected less than five times are counted together.
    """
    weights = weights.transpose(0, 2, 1, 3)
    number, total, freedom, spread = drawn.shape[-1], 0.0, 0.0, 0.0
    for index in np.ndindex(drawn.shape[:-1]):
        P = weights[index]
        if not P.any():
            assert (drawn[index] == -1).all()
            continue
        counts = np.bincount(drawn[index], minlength=P.size)
        assert not counts[P == 0].any(), "a key that is not seen"
        often = P * number >= 5
        groups = [(counts[a], P[a] * number) for a in np.flatnonzero(often)]
        groups.append((counts[~often].sum(), P[~often].sum() * number))
        groups = [(c, e) for c, e in groups if e > 0]
        total += sum((c - e) ** 2 / e for c, e in groups if e >= 1)
        freedom += sum(e >= 1 for _, e in groups) - 1
        spread += 2 * max(sum(e >= 1 for _, e in groups) - 1, 0)
    return (total - freedom) / np.sqrt(spread)
