"""The tangents of kernels, the state's derivative in a direction, against the dense derivative.

Each may err by a small multiple of what JAX's derivative of naive attention in the same dtype errs. The rule that calls
these kernels, and all others, is tested in `test_local_attention.py`.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import AttentionState, local_attention
from energy_attn.kernels.internal import PallasGPU
from energy_attn.kernels.internal import cotangents as directions_of
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.naive import ARGUMENTS, check_tangent
from tests.support.problems import BLOCKS, HEADS, PROBLEMS, _make, cast, problem_call, tangents
from tests.support.reference import dense, dense_jvp
from tests.support.selection import few_rows
from tests.support.traits import SMALL, SMALL_LAYOUT, PallasTPU, kernel_of

# Lengths, a window and documents at once; queries and keys that no other sees.
PREDICATES = replace(BLOCKS["blocks_predicates"], name="predicates_without_source", source=None)
RAGGED = replace(PROBLEMS["ragged"], name="ragged_without_source", source=None)
# Its tiles fit on a GPU, but not beside those of its directions.
WIDEST = _make("widest", B=1, T=2, S=3, N=1, H=512)
KERNELS = {
    "gpu": SMALL["pallas_gpu"],
    "tpu": SMALL["pallas_tpu"],
    "tpu, keys last": PallasTPU(SMALL_LAYOUT._replace(lanes=8, sublanes=8)),
    "tpu, keys split": PallasTPU(SMALL_LAYOUT._replace(rows=512)),
    "blockwise": SMALL["blockwise"],
    **{name: kernel_of(name) for name in ("decode", "cudnn", "flash", "fa4", "splash")},
}
CASES = [
    *(
        pytest.param(kernel, problem, ARGUMENTS, marks=pytest.mark.smoke)
        for kernel, problem in (("gpu", PREDICATES), ("tpu", PREDICATES), ("decode", RAGGED))
    ),
    ("blockwise", PREDICATES, ARGUMENTS),
    ("gpu", HEADS["heads_16_2"], ("query", "key")),  # keys split over programs
    ("tpu, keys split", HEADS["heads_8_8"], ("query", "value")),
    ("tpu, keys last", BLOCKS["blocks_causal"], ("key",)),
    ("gpu", BLOCKS["blocks_rule"], ARGUMENTS),
    ("tpu", BLOCKS["blocks_rule"], ARGUMENTS),
    ("gpu", PROBLEMS["value_narrower"], ("key", "value")),
    ("tpu", PROBLEMS["value_narrower"], ("query",)),  # the last block of keys is not full
    ("gpu", PROBLEMS["positions"], ("value",)),
    ("gpu", BLOCKS["blocks_causal"], ("query", "value")),
    ("tpu", PROBLEMS["positions"], ("value",)),
    ("gpu", BLOCKS["blocks_segments"], ("key",)),
    ("tpu", BLOCKS["blocks_window"], ("key", "value")),
    ("gpu", RAGGED, ("query",)),
    ("tpu, keys last", RAGGED, ARGUMENTS),
    ("tpu", HEADS["heads_8_1"], ("query", "key")),
    ("blockwise", PROBLEMS["positions"], ("key", "value")),
    ("blockwise", RAGGED, ("query",)),
    ("blockwise", PROBLEMS["mask"], ARGUMENTS),
    ("decode", PROBLEMS["positions"], ("key", "value")),
    ("decode", PROBLEMS["mask"], ARGUMENTS),
    ("decode", PROBLEMS["value_narrower"], ("query",)),
]
# `test_vendors` runs our own for GPUs in 16 bits
NARROW = [
    *((kernel, "bfloat16") for kernel in ("blockwise", "decode", "gpu", "tpu")),
    *((kernel, "float16") for kernel in ("gpu", "blockwise", "decode")),
]
BORROWED = [("cudnn", "bfloat16"), ("splash", "bfloat16"), ("flash", "float16")]
BORROWED += [("fa4", "bfloat16")]


@pytest.mark.parametrize(("kernel", "problem", "moving"), few_rows(CASES, 7), ids=str)
def test_tangent(kernel, problem, moving):
    """A product too many or too few, a tile skipped or not masked, a head's group, the odd block of a split, or
    what absent slots hold: 0 · NaN.
    """
    check_tangent(KERNELS[kernel], problem, moving, jnp.float32, kernel)


@pytest.mark.parametrize(("kernel", "dtype"), few_rows(NARROW))
def test_narrow(kernel, dtype):
    """Sums in, or energies rounded to, a narrow dtype."""
    problem = RAGGED if kernel == "decode" else PREDICATES
    check_tangent(KERNELS[kernel], problem, ARGUMENTS, jnp.dtype(dtype), kernel)


@pytest.mark.parametrize("kernel", ["gpu", "tpu"])
def test_products(kernel):
    """A product with a direction that is zero."""
    call = problem_call(PROBLEMS["plain"], platform="cpu")
    state = state_of(PROBLEMS["plain"])

    def products(*moving):
        directions = directions_of(
            *(x if n in moving else None for n, x in zip(ARGUMENTS, call.operands.qkv, strict=True))
        )
        run = functools.partial(KERNELS[kernel].tangent, call, state)
        return str(jax.make_jaxpr(run)(directions)).count("dot_general")

    loops = products(*ARGUMENTS) // 5  # over tiles with a mask and over others
    wanted = {("key",): 3, ("value",): 2, ("query", "key"): 4}
    assert {moving: products(*moving) / loops for moving in wanted} == wanted


@pytest.mark.parametrize("problem", ["causal", "ragged_keys"])
@pytest.mark.parametrize(("kernel", "dtype"), few_rows(BORROWED))
def test_vendors(kernel, dtype, problem):
    """A vendor's kernel, which has no tangent, without ours; or lengths that the vendor's takes and ours does not."""
    check_tangent(KERNELS[kernel], PROBLEMS[problem], ARGUMENTS, jnp.dtype(dtype), kernel)


def test_declined():
    """An error, or another kernel's answer, where ours declines a call that a vendor's takes, or its directions."""
    masked = problem_call(PROBLEMS["mask"], platform="tpu")
    state = state_of(PROBLEMS["mask"])
    assert KERNELS["splash"].tangent(masked, state, masked.operands) is None
    wide = problem_call(WIDEST, platform="cuda")
    PallasGPU().check(wide)
    assert PallasGPU().tangent(wide, state, wide.operands) is None
    run = functools.partial(local_attention, implementation="pallas_gpu")
    direction = {n: x.astype(np.float32) for n, x in tangents(WIDEST).items()}
    arrays, rounded = cast(WIDEST, jnp.float32)
    found = jax.jit(lambda x, d: jax.jvp(lambda x: run(**x), (x,), (d,))[1])(arrays, direction)
    close(found, dense_jvp(rounded, direction), "the widest", tolerance=1e-5)


def state_of(problem):
    return AttentionState(*(array(x, jnp.float32) for x in dense(problem)))
