"""What compiled losses over a vocabulary hold and multiply: blocks, and three products for a gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from tests.support.programs import word_blocks

TOKENS, WORDS, WIDTH = 512, 8192, 256


def shapes(dtype):
    arrays = ((TOKENS, WIDTH), dtype), ((WORDS, WIDTH), dtype), ((TOKENS,), jnp.int32)
    return [jax.ShapeDtypeStruct(shape, kind) for shape, kind in arrays]


def divergence(hidden, weight, labels):
    del labels
    p, q = ea.Categorical(hidden, weight), ea.Categorical(hidden * 2, weight)
    return p.kl_divergence(q).mean()


@pytest.mark.parametrize(("loss", "models"), [(ea.softmax_cross_entropy, 1), (divergence, 2)])
def test_products(loss, models):
    """A second pass over the words, or a backward pass for each statistic."""
    for f, products in (loss, 1), (jax.value_and_grad(loss, (0, 1)), 4):
        text = jax.jit(f).lower(*shapes(jnp.float32)).as_text()
        assert text.count("stablehlo.dot_general") == products * models


def test_products_of_16_bits():
    """Cotangents that are multiplied in float32, or sums that are rounded to 16 bits before they are added up."""
    step = jax.value_and_grad(ea.softmax_cross_entropy, (0, 1))
    text = jax.jit(step).lower(*shapes(jnp.bfloat16)).as_text()
    lines = [x for x in text.splitlines() if "stablehlo.dot_general" in x]
    assert len(lines) == 4
    for line in lines:
        factors, result = line.rpartition(" : ")[2].split(" -> ")
        assert factors.count("xbf16>") == 2 and result.endswith("xf32>"), line


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory(dtype, monkeypatch):
    """An array of logits, or a copy of the output matrix: a cast of all of it, or one for each block."""
    word_blocks(monkeypatch, 1 << 16)
    step = jax.value_and_grad(ea.softmax_cross_entropy, (0, 1))
    program = jax.jit(step).lower(*shapes(dtype)).compile()
    assert not re.search(rf"\[{TOKENS},{WORDS}\]|\[{WORDS},{TOKENS}\]", program.as_text())
    if dtype == "bfloat16":
        assert f"f32[{WORDS},{WIDTH}]" not in program.as_text()
    size = np.dtype(jnp.dtype(dtype)).itemsize
    matrix, states, block = size * WORDS * WIDTH, 4 * TOKENS * WIDTH, 4 * TOKENS * 128
    # 16-bit gradients are written as integers, in a buffer of their own
    buffer = matrix if dtype == "bfloat16" else 0
    found = program.memory_analysis().temp_size_in_bytes
    assert found < buffer + 2 * states + 4 * block + 4 * 4 * 128 * WIDTH + (1 << 16)


@pytest.mark.parametrize(("words", "width"), [(32_001, 64), (151_936, 64), (32_000, 8192)])
def test_memory_is_linear(words, width):
    """Memory of a value that grows with the vocabulary."""
    tokens = 2048 * 64 // width
    shapes = ((tokens, width), jnp.float32), ((words, width), jnp.float32), ((tokens,), jnp.int32)
    arrays = [jax.ShapeDtypeStruct(*x) for x in shapes]
    program = jax.jit(ea.softmax_cross_entropy).lower(*arrays).compile()
    assert program.memory_analysis().temp_size_in_bytes < 12 << 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_donated_arrays(dtype, monkeypatch):
    """A step that holds the output matrix twice where its buffer is given to the new one."""
    word_blocks(monkeypatch, 1 << 16)

    def step(hidden, weight, labels):
        slopes = jax.grad(ea.softmax_cross_entropy, (0, 1))(hidden, weight, labels)
        return tuple(x - y for x, y in zip((hidden, weight), slopes, strict=True))

    program = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes(dtype)).compile()
    size = np.dtype(jnp.dtype(dtype)).itemsize * WIDTH * (WORDS + TOKENS)
    assert program.memory_analysis().alias_size_in_bytes == size
