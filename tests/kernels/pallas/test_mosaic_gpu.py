"""The Hopper kernels in JAX's interpreter of copies, barriers and groups of warps, which JAX has from 0.12 on.

The interpreter runs the groups of warps of a program as threads, and the copy engine beside them; and it raises where
two accesses to shared memory are not ordered by barriers. Products of tiles in registers are the one thing it does not
run, and plain ones there: those are only compiled (tests/cuda).
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import AttentionState, Operands, Settings
from energy_attn.kernels.call._kernel import as_read, lowered_for
from energy_attn.kernels.internal import AssumedGPU, check_call_of, window_structure
from energy_attn.kernels.pallas.mosaic._kernel import (
    MosaicGPU,
    key_plan,
    make_plan,
    query_plan,
    tangent_plan,
)
from tests.support.arrays import array
from tests.support.compare import same
from tests.support.mosaic import (
    HERE,
    KERNEL,
    PROBLEMS,
    check_state,
    dtype_of,
    runs,
    smoke,
    state_of,
)
from tests.support.naive import ARGUMENTS, assert_all_close, check_tangent, select
from tests.support.problems import call_of, cast, cotangents
from tests.support.selection import few, few_rows


def state_and_gradients(given, dtype, which="both"):
    """A function of arrays: one program for several."""
    cotangent = AttentionState(*select(which, *cotangents(given, dtype)))

    @jax.jit
    def run(arrays):
        call = call_of(**arrays, **given.options)
        state = KERNEL.forward(as_read(KERNEL, call._replace(platform=HERE)))
        found = KERNEL.backward(as_read(KERNEL, call._replace(platform=HERE)), state, cotangent)
        return state._asdict() | {name: getattr(found, name) for name in arrays}

    return run


GRADIENTS = ("causal_grouped", "window", "segments")
FORWARD = [x for x in PROBLEMS if x not in (*GRADIENTS, "decode_cache")]


@runs
@pytest.mark.parametrize(
    "name",
    [
        *smoke(FORWARD, "value_wider", "ragged", "decode"),
        *few([x for x in PROBLEMS if x not in FORWARD]),  # whose states are below
    ],
)
def test_forward(name):
    """A barrier waited for too often; a slot overwritten while it is read; a tile left out, or masked wrongly."""
    check_state(PROBLEMS[name], dtype_of(name))


@runs
@pytest.mark.parametrize(
    "name", [*smoke(GRADIENTS, "causal_grouped"), *few([x for x in PROBLEMS if x not in GRADIENTS])]
)
def test_gradients(name):
    """Rows or heads left out or summed twice; sides of a window not reflected; a slot read before it is filled."""
    given, dtype = PROBLEMS[name], dtype_of(name)
    found = state_and_gradients(given, dtype)(cast(given, dtype)[0])
    assert_all_close(found, given, dtype, "both", label="mosaic_gpu")


@runs
@pytest.mark.parametrize("which", few(["out", "lse"], "lse"))
def test_gradients_of_one_result(which):
    """A cotangent of lse that is added to delta, lost, or divided by the rows of a packed head."""
    given = PROBLEMS["decode_many_heads"]
    found = state_and_gradients(given, jnp.bfloat16, which)(cast(given, jnp.bfloat16)[0])
    assert_all_close(found, given, jnp.bfloat16, which, label="mosaic_gpu")


TANGENTS = [
    ("decode_cache", ARGUMENTS),
    ("segments", ARGUMENTS),
    ("blind_rows", ARGUMENTS),
    ("window", ("value",)),
    ("value_wider", ("key",)),
    ("ragged", ("query", "value")),
    *(
        (name, ARGUMENTS)
        for name in PROBLEMS
        if name not in ("segments", "decode_cache", "blind_rows")
    ),
]


@runs
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(
    ("name", "moving"),
    [pytest.param(*TANGENTS[0], marks=pytest.mark.smoke), *few_rows(TANGENTS[1:], 5)],
    ids=str,
)
def test_tangent(name, moving):
    """A product too many or too few; a slot read before it is filled; what all parts of a split subtract; 0 · NaN."""
    check_tangent(KERNEL, PROBLEMS[name], moving, dtype_of(name), "mosaic_gpu", HERE)


def filled(given, arrays, bad):
    """Keys and values of slots that no query sees are `bad`."""
    hidden = np.arange(200)[None] >= 70 if given.key_positions is None else given.key_positions < 0
    return arrays | {
        name: array(np.where(hidden[:, :, None, None], bad, arrays[name]), arrays[name].dtype)
        for name in ("key", "value")
    }


@runs
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(
    "name", [pytest.param("decode_cache", marks=pytest.mark.smoke), *few(["more_keys"])]
)
def test_gradients_do_not_read_what_is_absent(name):
    """0 · NaN in gradients: keys that no query sees."""
    given, dtype = PROBLEMS[name], dtype_of(name)
    run, (arrays, _) = state_and_gradients(given, dtype), cast(given, dtype)
    wanted = run(arrays)
    same(run(filled(given, arrays, np.nan)), wanted)
    assert_all_close(wanted, given, dtype, "both", label="mosaic_gpu")


@runs
@pytest.mark.filterwarnings(
    "ignore:invalid value encountered"
)  # NumPy says so of products with inf
@pytest.mark.parametrize("name", smoke(["decode_cache", "more_keys"], "more_keys"))
def test_what_is_absent_is_not_read(name):
    """0 · NaN: values in slots that no query sees, of which shared memory holds whole tiles."""
    given, run = PROBLEMS[name], state_of(PROBLEMS[name])
    arrays, _ = cast(given, jnp.bfloat16)
    wanted = run(arrays)
    for bad in (np.nan, np.inf):
        found = run(filled(given, arrays, bad))
        for mine, theirs in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@runs
@pytest.mark.smoke
def test_nan_is_not_hidden():
    """A NaN taken for an empty row, or lost in a maximum."""
    run = state_of(PROBLEMS["causal"])
    arrays, _ = cast(PROBLEMS["causal"], jnp.bfloat16)
    for name in ("key", "value"):
        broken = np.array(arrays[name])
        broken[0, 200] = np.nan
        out, lse = map(np.asarray, run(arrays | {name: array(broken)}))
        seen = np.arange(270) >= 200
        assert np.isnan(out[0, seen]).all()
        assert np.isnan(lse[0, seen]).all() == (name == "key")
        assert not np.isnan(out[0, :128]).any()  # whose tiles of keys are others


def test_declined():
    """A call that the kernel would compute wrongly, or fail to compile where another kernel takes it."""

    def reason(dtype=jnp.bfloat16, width=64, value_width=64, **options):
        rows, values = (1, 8, 2, width), (1, 8, 2, value_width)
        arrays = (array(np.ones(shape), dtype) for shape in (rows, rows, values))
        call = call_of(*arrays, **options)
        with pytest.raises(NotImplementedError) as found:
            check_call_of(MosaicGPU(), call)
        return str(found.value)

    assert "query: wanted float16 or bfloat16, got float32" in reason(jnp.float32)
    assert "query: wanted float16 or bfloat16" in reason(source=jnp.ones((1, 8, 2, 64)))
    assert "query: wanted a width that 16 divides" in reason(width=72)
    assert "value: wanted a width that 16 divides" in reason(value_width=288)
    assert "mask: wanted None, got an array" in reason(mask=jnp.ones((1, 1, 8, 8), bool))


@pytest.mark.parametrize("capability", ["8.0", "10.0", "10.3", "12.0"])
def test_other_capabilities(capability):
    """Hopper's instructions in a program for a GPU that has not got them."""
    x = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
    call = call_of(x, x, x)
    with lowered_for(AssumedGPU("9.0")):
        check_call_of(MosaicGPU(), call)
    said = (
        f"mosaic_gpu: wanted a GPU of compute capability from 9.0 to below 10.0, got {capability}"
    )
    with (
        lowered_for(AssumedGPU(capability)),
        pytest.raises(NotImplementedError, match=re.escape(said)),
    ):
        check_call_of(MosaicGPU(), call)


def test_widest_tangents():
    """A call that fails to compile, where its tiles and those of all its directions do not fit on the chip."""
    x = jnp.ones((1, 200, 2, 256), jnp.bfloat16)
    call = call_of(x, x, x)
    state = AttentionState(x, jnp.ones(x.shape[:3]))

    assert KERNEL.tangent(call._replace(platform=HERE), state, call.operands) is None
    narrower = call.operands._replace(value=x[..., :128])
    found = tangent_plan(narrower, call.settings, ("query",))
    assert found.consumers == 1


def test_keys_fit_the_chip():
    """Tiles that need more shared memory than a program may take, or a pipeline of one stage."""
    for width in (16, 64, 128, 192, 256):
        for rows in (1, 64, 4096):
            x, y = (
                jax.ShapeDtypeStruct((1, length, 8, width), jnp.bfloat16) for length in (rows, 8192)
            )
            operands = Operands(x, y, y)
            plan = make_plan(operands, Settings(1.0, window_structure()))
            held = plan.consumers * 64 * (2 * width + 4 * 64)
            held += plan.stages * plan.keys * 4 * width
            assert plan.stages >= 2 and held <= 225 * 1024, (width, rows)
            if width > 128:
                continue  # the sums of a gradient do not fit into the registers
            plan = tangent_plan(operands, Settings(1.0, window_structure()), ARGUMENTS)
            held = plan.row_times * (4 * width + 4 * 64) + plan.stages * plan.keys * 8 * width
            assert plan.stages >= 2 and held <= 225 * 1024, (width, rows)
            plan = query_plan(operands, Settings(1.0, window_structure()))
            held = plan.row_times * (4 * width + 4 * 64) + plan.stages * plan.keys * 4 * width
            assert plan.stages >= 2 and held <= 225 * 1024, (width, rows)
            plan = key_plan(operands, Settings(1.0, window_structure()))
            held = plan.keys * 4 * width + plan.stages * plan.row_times * (4 * width + 8)
            assert plan.stages >= 2 and held <= 225 * 1024, (width, rows)
