"""Taylor mode, which keeps no rule for derivatives but JAX's own."""

import jax
from jaxtyping import PyTree


def check_taylor(arrays: PyTree) -> None:
    """Raises `NotImplementedError` under `jax.experimental.jet`, which only JAX's own derivatives pass.

    Sees the tracers of a call that is not inside `jax.jit`. `jet` looks through rules of kernels,
    down to loops, of which it knows none.
    """
    # by name, so that jet is not imported
    if any(type(x).__module__ == "jax.experimental.jet" for x in jax.tree.leaves(arrays)):
        raise NotImplementedError(
            "implementation: wanted 'reference' on one device, or nested jax.jvp, which all "
            "implementations have; got another under jax.experimental.jet"
        )
