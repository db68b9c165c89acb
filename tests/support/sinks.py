"""A sink written out: a problem with one more key, of zeros, whose value is zero and whose bias is the sink."""

import numpy as np

from tests.support.problems import Problem
from tests.support.reference import _positions, visible

SINK = np.array([0.7, -1.3, 2.1, 0.2, -0.4, 1.6, 0.9, -2.0])


def sink_of(problem: Problem, batched: bool = False) -> np.ndarray:
    """`[N]`, or `[B, N]`: another score for each head and row."""
    batch, _, heads, _ = problem.query.shape
    sink = np.resize(SINK, heads)
    return sink - np.arange(batch)[:, None] if batched else sink


def with_key(problem: Problem, sink: np.ndarray, name: str = "sink") -> Problem:
    """Which key is seen is then said by a mask; the last key is the sink's, seen by the queries that are there."""
    batch, query_len, heads, _ = problem.query.shape
    present = _positions(problem.query_positions, problem.query_seq_lengths, batch, query_len) >= 0
    columns = batch, heads, query_len, 1
    seen = np.broadcast_to(present[:, None, :, None], columns)
    bias = 0.0 if problem.bias is None else problem.bias
    bias = np.broadcast_to(bias, (*columns[:-1], problem.key.shape[1]))
    own = np.broadcast_to(np.atleast_2d(sink)[:, :, None, None], columns)

    def longer(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros_like(x, shape=(batch, 1, *x.shape[2:]))], 1)

    return Problem(
        f"{problem.name} {name}",
        problem.query,
        longer(problem.key),
        longer(problem.value),
        problem.source,
        np.concatenate([bias, own], -1),
        np.concatenate([visible(problem), seen], -1),
        problem.scale,
    )


def gradient_of(problem: Problem, sink: np.ndarray, gradients: dict) -> dict[str, np.ndarray]:
    """The gradients of the problem's arrays and of the sink, from those of the problem with a key more."""
    found = {}
    for name, array in problem.arrays.items():
        x = gradients[name]
        if name in ("key", "value"):
            x = x[:, :-1]
        if name == "bias":
            x = x[..., :-1]
            axes = tuple(i for i, n in enumerate(array.shape) if n == 1)
            x = x.sum(axes, keepdims=True)
        found[name] = x
    own = gradients["bias"][..., -1].sum(-1)  # [B, N]
    return found | {"sink": own if np.ndim(sink) == 2 else own.sum(0)}
