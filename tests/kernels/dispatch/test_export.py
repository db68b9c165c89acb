"""Serialised programs: for another platform, for later versions of JAX, for symbolic sizes."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn import free_energy, masks
from energy_attn.kernels import local_attention
from tests.support.compare import close
from tests.support.traits import BlockSizes, Blockwise

# Annotations say that sizes are ints, and symbols are not.
pytestmark = pytest.mark.usefixtures("unchecked")


def made(seed, *shape, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def exported(run, *arguments, platform="cpu"):
    """A program after serialisation and back."""
    return jax.export.export(jax.jit(run), platforms=(platform,))(*arguments)


def calls(program):
    """The custom calls of a program."""
    return set(re.findall(r"custom_call @([\w$.]+)", program.mlir_module())) - {"shape_assertion"}


def abstract(shape, dtype=np.float64):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
def test_for_cuda(dtype):
    """Calls of cuDNN or Triton in a program, which JAX then refuses to serialise. If they are named, JAX decides."""
    x = abstract((1, 256, 4, 64), dtype)

    def run(*arrays):
        state, back = jax.vjp(lambda *x: local_attention(*x, is_causal=True), *arrays)
        return state, back(state)

    assert calls(exported(run, x, x, x, platform="cuda")) == set()

    def named(*arrays):
        return local_attention(*arrays, implementation="pallas_gpu")

    export = jax.export.export(jax.jit(named), platforms=("cuda",))
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        export(x, x, x)


@pytest.mark.smoke
def test_for_tpus():
    """A fall-back to XLA although JAX guarantees that the kernel runs later."""
    x = abstract((1, 256, 4, 64), jnp.bfloat16)
    program = exported(lambda *x: local_attention(*x), x, x, x, platform="tpu")
    assert calls(program) == {"tpu_custom_call"}


@pytest.mark.parametrize(
    ("symbols", "options", "sizes"),
    [
        pytest.param("b", {}, [(2, 12), (3, 12)], marks=pytest.mark.full, id="batch"),
        # over several blocks in each direction, and within one
        pytest.param(
            "b, s", {"is_causal": True, "local_window_size": (50, 0)}, [(3, 150)], id="window"
        ),
        pytest.param(
            "b, s",
            {"mask": masks.Causal() & masks.Function(lambda q, k: (q - k) % 3 != 1)},
            [(2, 12), (3, 150)],
            id="function",
            marks=pytest.mark.full,
        ),
    ],
)
def test_symbolic_sizes(symbols, options, sizes):
    """A number of blocks that is computed from a symbol; rows that pad the last block and count."""
    kernel = Blockwise(BlockSizes(rows=64, keys=64, keys_of_few_rows=64))
    batch, rows, heads, kv_heads, width = 2, 12, 4, 2, 8
    names = dict(zip(symbols.split(", "), jax.export.symbolic_shape(symbols), strict=True))
    b, s = names.get("b", batch), names.get("s", rows)

    def run(*arrays):
        return tuple(local_attention(*arrays, **options, implementation=kernel))

    def wanted(*arrays):
        return tuple(local_attention(*arrays, **options, implementation="reference"))

    @jax.jit
    def both(arrays, cotangent):
        found = []
        for f in (program.call, wanted):
            state, back = jax.vjp(f, *arrays)
            found.append((*state, *back(cotangent)))
        return found

    program = exported(run, *(abstract((b, s, n, width)) for n in (heads, kv_heads, kv_heads)))
    for b, s in sizes:
        arrays = [made(i, b, s, n, width) for i, n in enumerate((heads, kv_heads, kv_heads))]
        close(*both(arrays, (made(7, b, s, heads, width), made(8, b, s, heads))), tolerance=1e-9)


def test_decoding_with_a_cache_of_any_length():
    """One query with symbolic numbers of slots and rows, and with lengths, bias, mask, positions and segments."""
    b, s = jax.export.symbolic_shape("b, s")
    heads, kv_heads, width = 4, 2, 8

    def arguments(b, s, make):
        return {
            "query": make((b, 1, heads, width)),
            "key": make((b, s, kv_heads, width)),
            "value": make((b, s, kv_heads, width)),
            "bias": make((1, heads, 1, s)),
            "mask": make((b, 1, 1, s), bool),
            "key_value_seq_lengths": make((b,), np.int32),
            "query_positions": make((b, 1), np.int32),
            "key_positions": make((b, s), np.int32),
            "query_segment_ids": make((b, 1), np.int32),
            "key_segment_ids": make((b, s), np.int32),
        }

    def concrete(shape, dtype=np.float64):
        if dtype == np.float64:
            return made(len(shape), *shape)
        return np.ones(shape, dtype)

    def run(arguments, source, implementation=None):
        return free_energy(source=source, **arguments, implementation=implementation)

    source = (1, heads, width)
    program = exported(run, arguments(b, s, abstract), abstract((b, *source)))
    for rows, slots in ((1, 3), (3, 2000)):
        given = arguments(rows, slots, concrete), made(9, rows, *source)
        given[0]["key_value_seq_lengths"] = np.arange(rows, dtype=np.int32) + slots - rows
        both = jax.jit(lambda *x: (program.call(*x), run(*x, implementation="reference")))
        close(*both(*given), tolerance=1e-9)


def test_mapped_over_a_symbolic_axis():
    """Kernels that are chosen by the sizes of one row, and then get a symbolic batch."""
    (b,) = jax.export.symbolic_shape("b")
    x = abstract((b, 16, 2, 64), jnp.float32)
    run = jax.vmap(lambda *x: local_attention(*x).out)
    program = exported(run, x, x, x)
    arrays = [made(i, 3, 16, 2, 64, dtype=np.float32) for i in range(3)]
    close(*jax.jit(lambda *x: (program.call(*x), run(*x)))(*arrays), tolerance=1e-5)
    for platform in ("cuda", "tpu"):
        assert calls(exported(run, x, x, x, platform=platform)) == set()
