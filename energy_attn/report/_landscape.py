"""The free energy and the rate function over planes through attention."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from energy_attn.kernels.internal import checks, lse_dtype

from ..core._gibbs import Gibbs
from ..core._module import FreeEnergy
from ..observables._at_source import covariance_at

_EXTENT = 3.0  # the default half width of the grids, in standard deviations


class Landscape(eqx.Module):
    """The result of `landscape`."""

    directions: Float[Array, "2 Hv"]
    attention: Float[Array, " Hv"]
    slope: Float[Array, "2"]
    source: Float[Array, "2 points"]
    free_energy: Float[Array, "points points"]
    point: Float[Array, "2 points"]
    rate: Float[Array, "points points"]
    values: Float[Array, "S 2"] | None


def landscape(
    query: Float[Array, " H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S Hv"],
    *,
    directions: Float[Array, "2 Hv"] | None = None,
    bias: Float[Array, " S"] | None = None,
    mask: Bool[Array, " S"] | None = None,
    extent: tuple[float, float] | None = None,
    points: int = 41,
    energy: FreeEnergy | None = None,
) -> Landscape:
    r"""The free energy and the rate function of one attention row along two directions.

    $$F(a u_1 + b u_2), \qquad I(\nabla F(0) + a u_1 + b u_2)$$

    $F$ is convex, and its slope at the origin is attention. $I$ is convex, zero at attention and
    nowhere else, and infinite outside the hull of the values. Each is the other's Legendre
    transform, up to $F(0)$. Each grid is one batch of queries.

    Args:
        query: `[H]`, of one row.
        key: `[S, H]`.
        value: `[S, Hv]`.
        directions: `[2, Hv]`, in the unit of the values. None takes the two unit vectors along
            which the values vary most under the attention weights.
        bias: `[S]`, added to the scaled scores.
        mask: `[S]`, boolean; False hides a key.
        extent: half the width of the grids of sources and of points, in multiples of the
            directions. None is 3 / σ and 3 σ, where σ is the standard deviation of the values along
            a direction, under the attention weights.
        points: the number of grid points along each direction.
        energy: the [`FreeEnergy`][energy_attn.FreeEnergy] of the row, whose query is at position 0; None is
            `FreeEnergy()`.

    Returns:
        A module of arrays in float32 (float64), which [`plot.landscape`][energy_attn.plot.landscape] draws.

        - `directions`: $u_1, u_2$, `[2, Hv]`.
        - `attention`: $\nabla F(0)$, `[Hv]`, the origin of the plane of points.
        - `slope`: $\nabla F(0) \cdot u_i$, the gradient of $F$ in the plane of sources at its origin.
        - `source`, `point`: the grid coordinates along each direction, `[2, points]`.
        - `free_energy`: $F$ in nats, `[points, points]`; the first axis is along $u_1$.
        - `rate`: $I$ in nats; plus infinity outside the hull of the values, NaN where the solver did not converge.
        - `values`: the coordinates of the values in the plane of points, `[S, 2]`, NaN for hidden keys; None
          unless the plane is the whole space.

    Raises:
        TypeError: an argument is not an array or has the wrong dtype.
        ValueError: shapes that do not match, values out of range; values of width 1 without
            directions.

    Source: Tree Attention (arXiv 2408.04093), equation 15, for $F$; Cramér's theorem for $I$.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 2))
        >>> plane = ea.landscape(q[0], k, v, points=5)
        >>> lowest = jnp.unravel_index(plane.rate.argmin(), plane.rate.shape)
        >>> [int(i) for i in lowest]  # attention, in the middle
        [2, 2]
    """
    _check_row(query, key, value, directions, bias, mask)
    points = checks.check_integer("points", points, least=2)
    energy = FreeEnergy() if energy is None else energy
    if not isinstance(energy, FreeEnergy):
        raise TypeError(f"energy: wanted a FreeEnergy, got {checks.received(energy)}")
    dtype = lse_dtype(query.dtype)
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))

    def measure(queries: Array, value: Array = value, bias: Array | None = bias) -> Gibbs:
        return energy.at(
            queries[:, None],
            key[:, None],
            value[:, None],
            bias=None if bias is None else bias[None, None, None],
            mask=None if mask is None else mask[None, None, None],
            query_positions=jnp.zeros(len(queries), jnp.int32),
        )

    calls, parts = measure(query[None])._prepared()
    at_zero = covariance_at(calls, None, parts)
    covariance, attention = at_zero.covariance[0, 0], at_zero.out[0, 0]
    if directions is None:
        directions = _principal(covariance)
    directions = jnp.asarray(directions, attention.dtype)
    sources, coordinates = _extents(extent, directions, covariance)
    fractions = jnp.linspace(-1.0, 1.0, points, dtype=attention.dtype)[None]
    sources, coordinates = sources[:, None] * fractions, coordinates[:, None] * fractions
    # each grid point is a separate query
    F = measure(jnp.broadcast_to(query, (points**2, *query.shape)))
    energies = F(_plane(sources, directions))
    z = attention[None, None] + _plane(coordinates, directions)
    rates = F.rate(z, throw=False)
    is_valid = rates.converged | jnp.isposinf(rates.value)
    return Landscape(
        directions,
        attention,
        (directions * attention[None]).sum(-1),
        sources,
        energies.reshape(points, points),
        coordinates,
        jnp.where(is_valid, rates.value, jnp.nan).reshape(points, points),
        None if value.shape[1] != 2 else _coordinates(measure, query, value, attention, directions),
    )


def _check_row(
    query: Array,
    key: Array,
    value: Array,
    directions: Array | None,
    bias: Array | None,
    mask: Array | None,
) -> None:
    checks.check_shape("query", checks.check_floating("query", query), ("H",))
    checks.check_shape("key", checks.check_floating("key", key), ("S", query.shape[0]))
    checks.check_shape("value", checks.check_floating("value", value), (key.shape[0], "Hv"))
    if directions is not None:
        checks.check_shape(
            "directions", checks.check_floating("directions", directions), (2, value.shape[1])
        )
    elif value.shape[1] < 2:
        raise ValueError(f"value: wanted a width of at least 2, got {checks.received(value)}")
    if bias is not None:
        checks.check_shape("bias", checks.check_floating("bias", bias), (key.shape[0],))
    if mask is not None:
        checks.check_shape("mask", checks.check_boolean("mask", mask), (key.shape[0],))


def _principal(covariance: Array) -> Array:
    _, axes = jnp.linalg.eigh(covariance)
    two = axes[:, :-3:-1].T
    # an eigenvector has two signs: the one whose largest component is positive
    largest = jnp.take_along_axis(two, jnp.abs(two).argmax(1)[:, None], 1)
    return two * jnp.where(largest < 0, -1.0, 1.0)


def _extents(extent: object, directions: Array, covariance: Array) -> tuple[Array, Array]:
    if extent is not None:
        if not (isinstance(extent, (tuple, list)) and len(extent) == 2):
            raise TypeError(
                f"extent: wanted a pair (sources, points), got {checks.received(extent)}"
            )
        source, point = (
            checks.check_positive("extent", checks.check_finite_number("extent", x)) for x in extent
        )
        return jnp.full(2, source, directions.dtype), jnp.full(2, point, directions.dtype)
    # u·ζ varies by 1/σ, and the coordinate along u of a value by σ / |u|²
    sigma = jnp.sqrt(jnp.einsum("iv,vw,iw->i", directions, covariance, directions))
    sigma = jnp.where(sigma > 0, sigma, 1.0)
    squares = (directions**2).sum(-1)
    return _EXTENT / sigma, _EXTENT * sigma / jnp.where(squares > 0, squares, 1.0)


def _plane(coordinates: Array, directions: Array) -> Array:
    first, second = jnp.meshgrid(*coordinates, indexing="ij")
    grid = jnp.stack([first.ravel(), second.ravel()], -1)
    return (grid @ directions)[:, None]


def _coordinates(
    measure: Callable[..., Gibbs], query: Array, value: Array, attention: Array, directions: Array
) -> Array:
    def mean(value: Array) -> Array:  # of the keys that are not hidden, all with the same score
        return measure(0 * query[None], value, None).attention().sum()

    is_visible = jax.grad(mean)(value)[:, :1] > 0
    coordinates = jnp.linalg.solve(directions.T, (value - attention[None]).T).T
    return jnp.where(is_visible, coordinates, jnp.nan)
