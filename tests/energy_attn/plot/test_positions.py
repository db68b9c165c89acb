"""Pictures by position: what stands where in them."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea

pytest.importorskip("matplotlib")


def test_weights(tmp_path):
    """A picture that is transposed, of another head, or whose labels are those of other rows."""
    shown = np.random.default_rng(0).dirichlet(np.ones(20), (3, 5)).astype(np.float32)
    figure = ea.plot.weights(shown, tmp_path / "weights.png", rows=["a", "b", "c"])
    panels = [x for x in figure.axes if x.images]
    assert [x.get_title() for x in panels] == [f"head {i}" for i in range(5)]
    for head, panel in enumerate(panels):
        np.testing.assert_array_equal(panel.images[0].get_array(), shown[:, head])
        assert [x.get_text() for x in panel.get_yticklabels()] == ["a", "b", "c"]
        assert [x.get_text() for x in panel.get_xticklabels()] == ["0", "4", "8", "12", "16"]
    assert (tmp_path / "weights.png").stat().st_size > 5000


@pytest.mark.parametrize(("count", "labels"), [(60, None), (16, None), (3000, None), (8, "word")])
def test_labels(count, labels):
    """Labels that run into each other."""
    keys = labels and [f"{labels}{i}" for i in range(count)]
    shown = np.full((count, 4, count), 1 / count, np.float32)
    figure = ea.plot.weights(shown, rows=keys, keys=keys)
    figure.draw_without_rendering()
    for panel in (x for x in figure.axes if x.images):
        for axis, start, end in ((panel.xaxis, "x0", "x1"), (panel.yaxis, "y0", "y1")):
            boxes = [x.get_window_extent() for x in axis.get_ticklabels() if x.get_text()]
            boxes = sorted(boxes, key=lambda box: getattr(box, start))
            assert len(boxes) >= 3
            for one, other in itertools.pairwise(boxes):
                assert getattr(one, end) < getattr(other, start)


def test_what_is_not_seen():
    """Keys that a mask hides in the colour of a small weight."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
    shown = ea.FreeEnergy(is_causal=True).at(q, k, v).weights()
    image = ea.plot.weights(shown).axes[0].images[0]
    colours = image.cmap(image.norm(image.get_array()))
    black = (colours == (0, 0, 0, 1)).all(-1)
    np.testing.assert_array_equal(black, ~np.tril(np.ones((5, 5), bool)))


@pytest.mark.parametrize("batched", [False, True])
def test_mask(batched):
    """Another entry of the batch; queries for keys; a mask whose arrays are not read by position."""
    lengths = jnp.asarray([3, 1] if batched else 3, jnp.int32)
    drawn = ea.plot.mask(ea.masks.Causal() | ea.masks.Prefix(lengths), 4, 6).axes[0]
    wanted = np.tril(np.ones((4, 6), bool)) | (np.arange(6) < 3)
    np.testing.assert_array_equal(drawn.images[0].get_array(), wanted)
    assert drawn.get_title() == "13 of 24 pairs"
    of_array = ea.plot.mask(wanted).axes[0]
    np.testing.assert_array_equal(of_array.images[0].get_array(), wanted)


@pytest.mark.usefixtures("unchecked")
def test_bad_input(monkeypatch):
    """A picture of something else, or a traceback out of matplotlib where it is not installed."""
    shown = jax.nn.softmax(jnp.zeros((3, 2, 4), jnp.float32))
    with pytest.raises(ValueError, match=r"weights: wanted .*\(rows, heads, keys\).*\[3,4\]"):
        ea.plot.weights(shown[:, 0])
    with pytest.raises(ValueError, match="keys: wanted 4 labels, got 3"):
        ea.plot.weights(shown, keys="abc")
    with pytest.raises(TypeError, match="query_len: wanted an integer.*got None"):
        ea.plot.mask(ea.masks.Causal())
    with pytest.raises(TypeError, match="mask: wanted a mask or booleans, got float32"):
        ea.plot.mask(shown[0])
    with pytest.raises(ValueError, match="query_len: wanted None with a mask that is an array"):
        ea.plot.mask(np.ones((3, 4), bool), 3)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plot.weights: .*pip install matplotlib"):
        ea.plot.weights(shown)
