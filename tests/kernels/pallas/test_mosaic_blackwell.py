"""The Blackwell kernel of `mosaic_gpu` in JAX's interpreter, which has tensor memory and its barriers from 0.12 on.

A product of the tensor cores is a task of its own there: it raises where another access to tensor memory or shared
memory is not ordered with it by barriers. What only threads of one group do together is not seen by it, as a group is
one thread there: those orders, and layouts in registers, are only compiled (tests/cuda).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels.call import _target
from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.call._kernel import check_call_of
from energy_attn.kernels.call._operands import Operands, Settings
from energy_attn.kernels.call._state import AttentionState
from energy_attn.kernels.masks._structure import sided
from energy_attn.kernels.pallas.mosaic._kernel import MosaicGPU
from energy_attn.kernels.pallas.mosaic._plan import TileSizes, chunk, tensor_memory_plan
from tests.support.arrays import array
from tests.support.mosaic import (
    HERE,
    PROBLEMS,
    check_state,
    dtype_of,
    problem,
    runs,
    smoke,
    state_of,
)
from tests.support.naive import assert_all_close
from tests.support.problems import cast, cotangents
from tests.support.selection import few

# Tiles of 64 keys, so that slots are filled again; keys are split over programs where rows are few.
KERNEL = MosaicGPU(
    blackwell_sizes=TileSizes(keys=64, stages=2, stages_of_few=3, programs=4, least_steps=1),
    assumed=(10, 0),
)
# Rows of two groups, and keys that none of them sees among those that they do.
BOTH_GROUPS = problem("both_groups", T=150, S=270, H=32, is_causal=True)
ALL = PROBLEMS | {"both_groups": BOTH_GROUPS}


KEPT = ("causal", "causal_grouped", "window", "segments", "decode_cache")


@runs
@pytest.mark.parametrize(
    "name",
    [*smoke(KEPT, "causal_grouped", "decode_cache"), *few([x for x in ALL if x not in KEPT])],
)
def test_forward(name):
    """A tile read before its product is done, or overwritten before it is read; rows of one group in another's sums."""
    check_state(ALL[name], dtype_of(name), KERNEL)


@runs
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("name", smoke(["both_groups", "decode_cache"], "decode_cache"))
def test_what_is_absent_is_not_read(name):
    """0 · NaN: values that no query sees, which one group zeros for both; tensor memory that nobody has written."""
    given, run = ALL[name], state_of(ALL[name], KERNEL)
    arrays, _ = cast(given, jnp.bfloat16)
    hidden = np.arange(270)[None] >= 150 if given.key_positions is None else given.key_positions < 0
    filled = arrays | {
        name: array(np.where(hidden[:, :, None, None], np.nan, arrays[name]), jnp.bfloat16)
        for name in ("key", "value")
    }
    for mine, theirs in zip(run(filled), run(arrays), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@runs
def test_nan_is_not_hidden():
    """A NaN taken for an empty row, or lost in a maximum."""
    run = state_of(PROBLEMS["causal"], KERNEL)
    arrays, _ = cast(PROBLEMS["causal"], jnp.bfloat16)
    for name in ("key", "value"):
        broken = np.array(arrays[name])
        broken[0, 257] = np.nan
        out, lse = map(np.asarray, run(arrays | {name: array(broken)}))
        seen = np.arange(270) >= 257
        assert np.isnan(out[0, seen]).all()
        assert np.isnan(lse[0, seen]).all() == (name == "key")
        assert not np.isnan(out[0, :256]).any()  # whose tiles of keys are others


@runs
def test_derivatives():
    """Kernels of Hopper's instructions, in a program for a GPU that has not got them."""
    given = PROBLEMS["more_keys"]
    arrays, _ = cast(given, jnp.bfloat16)
    call = check_call(**arrays, **given.options)
    cotangent = AttentionState(*cotangents(given, jnp.bfloat16))

    def run(operands, cotangent, platform):
        state = KERNEL.forward(operands, call.settings, HERE)
        found = KERNEL.backward(operands, call.settings, state, cotangent, platform)
        return state._asdict() | {name: getattr(found, name) for name in arrays}

    state = state_of(given, KERNEL)(arrays)
    assert KERNEL.tangent(call.operands, call.settings, state, call.operands, HERE) is None
    back = functools.partial(KERNEL.backward, call.operands, call.settings, state)
    assert "pallas" not in str(jax.make_jaxpr(lambda x: back(x, "cuda"))(cotangent))
    found = jax.jit(functools.partial(run, platform=HERE))(call.operands, cotangent)
    assert_all_close(found, given, jnp.bfloat16, "both", label="mosaic_gpu")


def kernel_for(capability, *widths, kernel=None):
    """The modules whose kernels a forward pass has on a GPU of a compute capability."""
    width, value_width = widths or (64, 64)
    rows, values = (jnp.ones((1, 300, 2, x), jnp.bfloat16) for x in (width, value_width))
    call = check_call(rows, rows, values)
    kernel = kernel or MosaicGPU()
    device = _target.AssumedGPU(capability) if capability else None
    with _target.lowered_for(device):
        check_call_of(kernel, call.operands, call.settings)
        program = jax.make_jaxpr(lambda x: kernel.forward(x, call.settings, "cuda"))(call.operands)
    return {x for x in ("tcgen05", "wgmma") if x in str(program)}


def test_capabilities():
    """Hopper's instructions on Blackwell, or the other way round; a GPU that has neither."""
    assert kernel_for("9.0") == {"wgmma"}
    assert kernel_for("10.0") == kernel_for("10.3") == {"tcgen05"}
    assert kernel_for(None) == {"wgmma"}
    assert kernel_for(None, kernel=KERNEL) == {"tcgen05"}
    assert kernel_for("9.0", kernel=KERNEL) == {"wgmma"}
    for capability in ("8.0", "11.0", "12.0"):
        with pytest.raises(NotImplementedError, match=f"wanted a GPU .* got {capability}"):
            kernel_for(capability)
    with pytest.raises(NotImplementedError, match=r"query: wanted widths whose tiles fit"):
        kernel_for("10.0", 512, 256)


def test_tiles_fit_the_chip():
    """More shared or tensor memory than a program may take, or a pipeline of one stage."""
    for width, rows in ((16, 1), (64, 300), (96, 4096), (128, 64), (192, 300), (256, 4096)):
        value_width = min(width, 256)
        shapes = (1, rows, 8, width), (1, 8192, 8, width), (1, 8192, 8, value_width)
        query, key, value = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes)
        plan = tensor_memory_plan(
            Operands(query, key, value, None, None, None, None), Settings(1.0, sided())
        )
        held = plan.row_times * (2 * width + 4 * chunk(value_width))
        held += plan.stages * plan.keys * 2 * (width + value_width)
        assert plan.stages >= 2 and held <= 225 * 1024, (width, rows)
        assert plan.consumers * (plan.keys * 3 // 2 + value_width) <= 512, (width, rows)
        assert plan.consumers == (1 if rows <= 128 or width > 128 else 2)
        assert plan.row_tiles == math.ceil(rows / (128 * plan.consumers))
