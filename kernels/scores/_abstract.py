"""The abstract class of a score, and the check of its parameters."""

import abc
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.core
from jaxtyping import Array, Float, Int

from .._checks import check_finite_number, check_floating, check_shape, received


class At(NamedTuple):
    """Where scores are: int32 arrays that broadcast with them.

    Attributes:
        batch: the entry of the batch.
        head: the head of the query.
        query: the position of the query. Negative where it is absent.
        key: the position of the key. Negative where it is absent.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import scores
        >>> at = scores.At(*map(jnp.asarray, (0, 0, [[1], [2]], [[0, 1, 2]])))
        >>> scores.Distance(lambda d: -abs(d))(jnp.zeros((2, 3)), at).tolist()
        [[-1.0, 0.0, -1.0], [-2.0, -1.0, 0.0]]
    """

    batch: Int[Array, "..."]
    head: Int[Array, "..."]
    query: Int[Array, "..."]
    key: Int[Array, "..."]


class AbstractScore(eqx.Module):
    r"""A score: a function $g$ of the scaled product of a query and a key, and of where they are.

    $$s_a = g(\mathrm{scale}\; q \cdot k_a;\ i, a, h, \theta) + b_a + \zeta \cdot v_a$$

    The source is added outside of $g$, so that $F$ remains the generating function of the values. Masks are
    applied afterwards; $g$ and its derivatives must be finite for hidden pairs, too.

    The floating arrays of the module are its parameters $\theta$, which are differentiated, in both
    modes and to any order; `__call__` gets them in the dtype of the scores. Python numbers among its
    fields are parameters that are not learnt. All else is static, and so hashable.

    Define your own score as a subclass with a `__call__`, or as a
    [`Function`][energy_attn.kernels.scores.Function]. Kernels that cannot compute it decline; those made of
    XLA's operations compute any.

    Attributes:
        compares: whether it reads the positions `at.query` and `at.key`, which are None otherwise.

    Source: flex attention (arXiv 2412.05496), the score modification.

    Examples:
        >>> import equinox as eqx
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> class Decay(ea.scores.AbstractScore):
        ...     rate: jax.Array  # of each head
        ...     def __call__(self, score, at):
        ...         return score - self.rate[at.head] * jnp.abs(at.query - at.key)
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> energy = ea.FreeEnergy(score=Decay(jnp.ones(2)))
        >>> eqx.filter_grad(lambda energy: energy(q, k, v).sum())(energy).score.rate.shape
        (2,)
    """

    compares: ClassVar[bool] = True

    @abc.abstractmethod
    def __call__(self, score: Float[Array, "..."], at: At) -> Float[Array, "..."]:
        """The scores from the scaled products: elementwise, of the same shape and dtype."""

    def per_head(self) -> tuple[Any, ...]:
        """The arrays whose axis 0 is that of the heads; its length is checked."""
        return ()


def check_parameter(
    name: str, x: object, shape: tuple[int | str, ...], *, above_zero: bool = False
) -> Any:
    """Returns `x`: a floating array of `shape`, or, for a shape without axes, a finite number.

    Raises `TypeError` for anything else and `ValueError` for another shape or, where values are known,
    for a number that is not above zero.
    """
    if shape or hasattr(x, "shape"):
        check_shape(name, check_floating(name, x), shape)
        is_number = not isinstance(x, jax.core.Tracer) and not shape
    else:
        check_finite_number(name, x)
        is_number = True
    if above_zero and is_number and not float(x) > 0:  # pyright: ignore[reportArgumentType]  # a number
        raise ValueError(f"{name}: wanted a number above zero, got {received(x)}")
    return x
