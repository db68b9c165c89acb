"""Taylor mode, which keeps no rule for derivatives but JAX's own."""

from collections.abc import Sequence

import jax
from jaxtyping import PyTree

from ..call._kernel import Candidate


def check_taylor(names: Sequence[Candidate], arrays: PyTree) -> None:
    """Raises `NotImplementedError` under `jax.experimental.jet`, but for the reference implementation.

    Sees the tracers of a call that is not inside `jax.jit`. `jet` looks through rules of kernels,
    down to loops, of which it knows none.
    """
    # by name, so that jet is not imported
    traced = any(type(x).__module__ == "jax.experimental.jet" for x in jax.tree.leaves(arrays))
    if traced and tuple(names) != ("reference",):
        raise NotImplementedError(
            "implementation: wanted 'reference' on one device, or nested jax.jvp, which all "
            "implementations have; got another under jax.experimental.jet"
        )
