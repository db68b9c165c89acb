"""Slices and sums into a part of an array, beside those of JAX: in both modes, and under `jax.vmap`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from energy_attn.kernels._slice import add_at, slice_at
from tests.support.arrays import array
from tests.support.compare import close

WHOLE, PART = (5, 6, 4), (2, 6, 3)
FIRST, FIRSTS = array(np.array(2), np.int32), array(np.array([0, 1, 3]), np.int32)
OTHERS = np.zeros((), np.int32), np.ones((), np.int32)


def ours(total, part, first):
    """What blocks do: a part is read, and what is made of it is added to another array there."""
    corner = first, *OTHERS
    return add_at(total, part * slice_at(total, corner, PART) ** 2, corner)


def theirs(total, part, first):
    corner = first, *OTHERS
    some = lax.dynamic_slice(total, corner, PART)
    return lax.dynamic_update_slice(total, some + part * some**2, corner)


@functools.partial(jax.jit, static_argnames=("f", "axes"))
def derivatives(f, axes, total, part, first):
    mapped = f if axes == (None, None, None) else jax.vmap(f, axes)

    def run(total, part):
        return jnp.sin(mapped(total, part, first))

    def gradient(total, part):
        return jax.grad(lambda *x: (run(*x) ** 2).sum(), (0, 1))(total, part)

    at, along = (total, part), (jnp.cos(total), jnp.sin(part))
    return jax.jvp(run, at, along), jax.jvp(gradient, at, along)


@pytest.mark.parametrize("axes", [(None, None), (0, None), (None, 1), (1, 0), (0, 0, 0)])
def test_beside_those_of_jax(axes):
    """A rule of a derivative, or of a mapped axis: an axis out of place, a cotangent that is dropped."""
    first = FIRSTS if len(axes) == 3 else FIRST
    axes = (*axes, None)[:3]
    rng = np.random.default_rng(0)
    given = []
    for shape, axis in zip((WHOLE, PART), axes, strict=False):
        shape = shape if axis is None else (*shape[:axis], len(FIRSTS), *shape[axis:])
        given.append(array(rng.standard_normal(shape)))
    found, wanted = (derivatives(f, axes, *given, first) for f in (ours, theirs))
    close(found, wanted)


def test_no_gather():
    """What XLA's partitioner aborts on: every entry is cut at the same place."""
    total, part = (jax.ShapeDtypeStruct((3, *x), jnp.float32) for x in (WHOLE, PART))
    text = jax.jit(jax.vmap(ours, (0, 0, None))).lower(total, part, FIRST).as_text()
    assert "dynamic_slice" in text
    assert "gather" not in text and "scatter" not in text
