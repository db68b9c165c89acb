"""Landscapes: F by its definition, I as a divergence where weights are unique, and the plot."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from tests.support.complaints import a, complains

# Three values in the plane, so that a point is their mean by one set of weights alone; and five that are hidden.
rng = np.random.default_rng(0)
QUERY, KEY, BIAS = rng.standard_normal(3), rng.standard_normal((8, 3)), rng.standard_normal(8)
VALUE = np.concatenate([[[-1.0, -0.7], [1.3, -0.4], [0.1, 1.1]], 9 * rng.standard_normal((5, 2))])
MASK = np.arange(8) < 3
DIRECTIONS = np.asarray([[1.0, 0.2], [-0.3, 0.8]])
SCALE, EXTENT, POINTS = 0.8, (2.0, 1.5), 9
SCORES = SCALE * KEY[:3] @ QUERY + BIAS[:3]
WEIGHTS = np.exp(SCORES) / np.exp(SCORES).sum()


@jax.jit
def of_arrays(query, key, value, directions, bias):
    options = {"directions": directions, "bias": bias, "mask": jnp.asarray(MASK)}
    options |= {"extent": EXTENT, "points": POINTS, "energy": ea.FreeEnergy(scale=SCALE)}
    return ea.landscape(query, key, value, **options)


@pytest.fixture(scope="module")
def found():
    return of_arrays(*map(jnp.asarray, (QUERY, KEY, VALUE, DIRECTIONS, BIAS)))


def agrees(found, atol=1e-9):
    """With log-sum-exp at every source, and with KL(p‖P) for the p whose mean of values is the point."""
    attention = WEIGHTS @ VALUE[:3]
    np.testing.assert_allclose(found.attention, attention, atol=atol)
    np.testing.assert_allclose(found.slope, DIRECTIONS @ attention, atol=atol)
    inside = 0
    for i, j in np.ndindex(POINTS, POINTS):
        source = found.source[0, i] * DIRECTIONS[0] + found.source[1, j] * DIRECTIONS[1]
        energy = np.log(np.exp(SCORES + VALUE[:3] @ np.asarray(source, np.float64)).sum())
        np.testing.assert_allclose(found.free_energy[i, j], energy, rtol=1e-12 + atol)
        z = attention + found.point[0, i] * DIRECTIONS[0] + found.point[1, j] * DIRECTIONS[1]
        p = np.linalg.solve(np.vstack([VALUE[:3].T, np.ones(3)]), [*np.asarray(z, np.float64), 1])
        assert abs(p).min() > 1e-3, "a point on the hull's border decides nothing"
        if p.min() < 0:
            assert np.isposinf(found.rate[i, j])
        else:
            inside += 1
            divergence = (p * np.log(p / WEIGHTS)).sum()
            np.testing.assert_allclose(found.rate[i, j], divergence, atol=10 * atol)
    assert 10 < inside < 0.9 * POINTS**2
    assert found.free_energy.shape == found.rate.shape == (POINTS, POINTS)
    for line, wide in ((found.source, EXTENT[0]), (found.point, EXTENT[1])):
        np.testing.assert_allclose(line, [np.linspace(-wide, wide, POINTS)] * 2, rtol=1e-6)


def test_planes(found):
    """Axes swapped, a plane beside attention, hidden values that widen the hull, a finite rate outside it."""
    agrees(found)


@pytest.mark.full
def test_directions_and_extents_by_default():
    """Directions in which nothing varies, or grids of a wrong extent: by eigenvectors of Σ."""
    value = np.random.default_rng(1).standard_normal((8, 4)) * [1.0, 5.0, 0.1, 2.0]
    arrays = map(jnp.asarray, (QUERY, KEY, value))
    found = ea.landscape(*arrays, points=2, energy=ea.FreeEnergy(scale=SCALE))
    scores = SCALE * KEY @ QUERY
    weights = np.exp(scores) / np.exp(scores).sum()
    centred = value - weights @ value
    variances, axes = np.linalg.eigh(np.einsum("s,sv,sw->vw", weights, centred, centred))
    cosines = np.abs(np.asarray(found.directions) @ axes[:, ::-1][:, :2])
    np.testing.assert_allclose(cosines, np.eye(2), atol=1e-9)
    assert (np.asarray(found.directions).max(1) == np.abs(found.directions).max(1)).all()
    sigma = np.sqrt(variances[::-1][:2])
    np.testing.assert_allclose(found.source[:, 1], 3 / sigma)
    np.testing.assert_allclose(found.point[:, 1], 3 * sigma)
    assert found.values is None


@pytest.mark.full
def test_masks_of_the_energy(found):
    """A window that each grid point, as a query of its own, has elsewhere; values shown that it hides."""
    energy = ea.FreeEnergy(scale=SCALE, local_window_size=(0, 2))  # of position 0: MASK
    arrays = [jnp.asarray(x) for x in (QUERY, KEY, VALUE)]
    options = {"directions": jnp.asarray(DIRECTIONS), "bias": jnp.asarray(BIAS), "extent": EXTENT}
    same = ea.landscape(*arrays, **options, points=POINTS, energy=energy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), same, found)


@pytest.mark.full
def test_picture(found):
    """A plot without attention, or with a rate where it is infinite."""
    pytest.importorskip("matplotlib")
    figure = ea.plot.landscape(found)
    left, right = figure.axes[:2]
    (star,) = [line for line in right.lines if line.get_label() == "attention"]
    assert star.get_xydata().tolist() == [[0.0, 0.0]]
    # the values where they are, but for those that are hidden
    (dots,) = [line for line in right.lines if line.get_label() == "values"]
    wanted = np.linalg.solve(DIRECTIONS.T, (VALUE - WEIGHTS @ VALUE[:3]).T).T
    np.testing.assert_allclose(dots.get_xydata(), wanted[:3], atol=1e-9)
    figure.canvas.draw()
    assert len(figure.axes) == 4 and left.get_title().startswith("free energy")
    # into axes of one's own
    other = type(figure)().subplots(1, 2)
    assert ea.plot.landscape(found, other) is other[0].figure


def test_no_matplotlib(found, monkeypatch, unchecked):
    """A traceback from inside, instead of an error that says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        ea.plot.landscape(found)
    with pytest.raises(TypeError, match="plane: wanted the result of energy_attn.landscape, got"):
        ea.plot.landscape(3)


VALID = {"query": a(3), "key": a(8, 3), "value": a(8, 2)}


@pytest.mark.usefixtures("unchecked", "user_settings")
@pytest.mark.parametrize(
    ("changes", "error", "got", "wanted"),
    [
        ({"query": a(2, 3)}, ValueError, "float32[2,3]", "(H)"),
        ({"key": a(8, 4)}, ValueError, "float32[8,4]", "(S, 3)"),
        ({"value": a(8, 1)}, ValueError, "float32[8,1]", "at least 2"),
        ({"directions": a(2, 3)}, ValueError, "float32[2,3]", "(2, 2)"),
        ({"mask": a(8)}, TypeError, "float32[8]", "boolean"),
        ({"points": 1}, ValueError, "1", "at least 2"),
        ({"extent": 3.0}, TypeError, "float 3.0", "pair"),
        ({"extent": (1.0, 0.0)}, ValueError, "0.0", "above 0"),
        ({"energy": 0.8}, TypeError, "float 0.8", "FreeEnergy"),
    ],
)
def test_bad_input(changes, error, got, wanted):
    """An error about an argument of `free_energy`, with shapes that the caller did not pass."""
    (name,) = changes
    call = functools.partial(ea.landscape, **{**VALID, **changes})
    complains(lambda: jax.eval_shape(call), error, name, got, wanted)
