"""No TPU and no metadata server are looked for, no logs are kept, and several processes may load libtpu."""

import os

import jax
import pytest

from tests.support.tpu import ALONE

os.environ.update(ALONE)


@pytest.fixture(autouse=True)
def compiled_each_time():
    """Without a chip, libtpu writes programs into JAX's cache that it cannot read again."""
    cached = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", cached)
