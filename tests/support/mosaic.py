"""Problems for the kernels of `mosaic_gpu`, and their states."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels.call._kernel import as_read
from energy_attn.kernels.internal import check_call_of, platform_here
from energy_attn.kernels.pallas.mosaic._kernel import MosaicGPU, MosaicSizes
from tests.support.compare import close
from tests.support.problems import Problem, call_of, cast
from tests.support.reference import dense

HERE = platform_here()

runs = pytest.mark.skipif(
    HERE != "cuda" and jax.__version_info__ < (0, 12),
    reason="wanted a GPU, or the interpreter, which JAX has from 0.12 on",
)


# Tiles of 64 keys, so that there are several; keys are split over programs where rows are few.
KERNEL = MosaicGPU(MosaicSizes(keys=64, stages_of_few=3, programs=4, least_steps=1))


def problem(name, B=1, T=150, S=150, N=1, K=1, H=16, V=16, **options):
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, V)
    return Problem(name, *(rng.standard_normal(shape) for shape in shapes), **options)


def ints(*rows):
    return np.asarray(rows, np.int32)


def cache(size):
    """Positions of a cache: in any order, some slots empty."""
    order = np.random.default_rng(0).permutation(size).astype(np.int32)
    return np.where(order % 7 == 3, -1, order)


PROBLEMS = {
    x.name: x
    for x in (
        problem("full", S=330, N=2),
        problem("causal_grouped", N=2, is_causal=True),
        problem("causal", T=270, S=270, N=2, K=2, is_causal=True),
        problem("value_wider", T=70, S=70, H=32, V=48, is_causal=True, scale=-0.7),
        problem("more_keys", T=70, S=200, is_causal=True),
        problem("blind_rows", T=200, S=70, local_window_size=(0, 3)),
        problem("window", T=200, S=200, local_window_size=(40, 20)),
        # whose sides, if they were not reflected for keys, would tell other tiles of rows
        problem("window_behind", T=330, S=330, local_window_size=(200, 3)),
        problem(
            "ragged",
            B=3,
            T=70,
            S=130,
            query_seq_lengths=ints(70, 3, 0),
            key_value_seq_lengths=ints(100, 0, 130),
        ),
        problem(
            "segments",
            B=2,
            T=140,
            S=140,
            is_causal=True,
            query_segment_ids=ints(np.arange(140) // 50, np.arange(140) // 139),
            key_segment_ids=ints(np.arange(140) // 50, np.arange(140) // 70),
        ),
        problem("decode", T=1, S=500, N=8, K=2),
        problem(
            "decode_cache",
            *(2, 2, 300, 6, 2),
            is_causal=True,
            query_positions=ints([200, 201], [5, -1]),
            key_positions=ints(cache(300), -1 - 0 * np.arange(300)),
        ),
        problem("decode_many_heads", T=10, S=200, N=8, K=1, key_value_seq_lengths=ints(170)),
    )
}


def state_of(given):
    """The state as a function of arrays: one program for several."""

    @jax.jit
    def run(arrays):
        call = call_of(**arrays, **given.options, platform=HERE)
        check_call_of(KERNEL, call)
        return KERNEL.forward(as_read(KERNEL, call))

    return run


def check_state(given, dtype):
    """The state beside the definition, as near as rounding weights to 16 bits allows."""
    arrays, rounded = cast(given, dtype)
    state = state_of(given)(arrays)
    out, lse = dense(rounded)
    close(state.out, out, f"{rounded}, out", tolerance=2 * float(jnp.finfo(dtype).eps))
    close(state.lse, lse, f"{rounded}, lse", tolerance=1e-5)


def dtype_of(name):
    """One of the two for each problem."""
    return (jnp.float16, jnp.bfloat16)[len(name) % 2]


def smoke(names, *some):
    """Values of a parameter, of which the newest JAX runs some."""
    return [pytest.param(x, marks=[pytest.mark.smoke] * (x in some)) for x in names]
