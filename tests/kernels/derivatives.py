"""State, gradients and tangent of a function of arrays, compared with the dense ones of a problem."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.arrays import array
from tests.support.compare import close
from tests.support.problems import Problem, cast, cotangents, tangents
from tests.support.reference import dense, dense_jvp, dense_vjp

ALL = "state", "gradients", "tangent"


def derivatives(attend: Callable[..., Any], arrays, cotangent, directions, *others, parts=ALL):
    """The state `attend(arrays, *others)`, its gradients in the arrays and its derivative in their directions."""
    run = functools.partial(_first, attend, others)
    state, back = jax.vjp(run, arrays)
    found = {"state": tuple(state)}
    if "gradients" in parts:
        found["gradients"] = back(jax.tree.unflatten(jax.tree.structure(state), cotangent))[0]
    if "tangent" in parts:
        found["tangent"] = tuple(jax.jvp(run, (arrays,), (directions,))[1])
    return found


def _first(attend, others, arrays):
    return attend(arrays, *others)


def check_dense(
    attend: Callable[..., Any],
    problem: Problem,
    dtype: Any = jnp.float64,
    tolerance: float = 1e-12,
    judge: Callable[[Problem], Problem] = lambda x: x,
    others: Sequence[Any] = (),
    parts: Sequence[str] = ALL,
) -> None:
    """Compares derivatives of `attend(arrays, *others)` with the dense ones of `judge(rounded problem)`."""
    arrays, rounded = cast(problem, dtype)
    given = cotangents(problem, dtype)
    along = {name: array(x, dtype) for name, x in tangents(problem).items()}
    run = jax.jit(functools.partial(derivatives, attend, parts=parts))
    found = run(arrays, given, along, *others)
    wanted, judged = {}, judge(rounded)
    if "state" in found:
        wanted["state"] = dense(judged)
    if "gradients" in found:
        wanted["gradients"] = dense_vjp(judged, *(np.asarray(x, np.float64) for x in given))
    if "tangent" in found:
        moved = {name: np.asarray(x, np.float64) for name, x in along.items()}
        wanted["tangent"] = dense_jvp(judged, moved)
    close(found, wanted, problem.name, tolerance)
