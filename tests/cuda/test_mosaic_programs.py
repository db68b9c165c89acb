"""What our Hopper kernels become on an H200, compiled ahead of time, without GPU or driver.

Needs jax-cuda12-plugin and nvidia-cuda-nvcc-cu12 (`make test-cuda`). Programs are read, never run; that their copies,
barriers and masks compute what they should, the interpreter shows (tests/kernels/pallas/test_mosaic_gpu.py).
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from energy_attn.kernels import local_attention
from tests.support.cuda import nodes, toolkit
from tests.support.selection import few, few_rows

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("user_settings")]
WIDTH = 128
# Since JAX 0.12 a process compiles a kernel once, so what tests read has lengths of its own: a derivative's program
# has the kernel of the forward pass too.
PREFILL, TRAINED = 16384, 8192
SHORT, SHORT_TRAINED = 1064, 1000
KEYS = 64 * 1024


class Kernel(NamedTuple):
    """A kernel for one H200: its program's text and scratch memory; and its code and registers."""

    text: str
    memory: int
    code: str
    registers: int
    spilled: int

    def count(self, instruction):
        return len(re.findall(instruction, self.code))


def gradients(run):
    """A call's gradients."""

    def call(*arrays):
        state, back = jax.vjp(run, *arrays)
        return back(state)

    return call


def along(*names):
    """A call's derivative in directions of the arrays of these names."""

    def derivative(run):
        def call(query, key, value):
            arrays = {"query": query, "key": key, "value": value}
            moving = {name: arrays[name] for name in names}
            return jax.jvp(lambda moving: run(**arrays | moving), (moving,), (moving,))[1]

        return call

    return derivative


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A function that compiles a call of shapes: its one kernel, or of a derivative all, by the number of products."""
    toolkit()
    for name, value in (("TO", str(tmp_path)), ("PTX", "1"), ("PTXAS", "1")):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{name}", value)

    def compile(*shapes, dtype=jnp.bfloat16, derivative=None, **options):
        sharding = SingleDeviceSharding(nodes(1, 1).devices.item())
        arrays = [jax.ShapeDtypeStruct(x, dtype, sharding=sharding) for x in shapes]

        run = functools.partial(local_attention, implementation="mosaic_gpu", **options)
        program = jax.jit(derivative(run) if derivative else run).lower(*arrays).compile()
        found = []
        for code in tmp_path.glob("*.ptx"):
            report = code.with_suffix(".ptxas").read_text()
            kernel = Kernel(
                program.as_text(),
                program.memory_analysis().temp_size_in_bytes,
                code.read_text(),
                int(re.search(r"Used (\d+) registers", report)[1]),
                int(re.search(r"(\d+) bytes spill stores", report)[1]),
            )
            found.append(kernel)
        return sorted(found, key=lambda x: x.count("wgmma.mma_async")) if derivative else found[0]

    return compile


@pytest.mark.toolkits
@pytest.mark.parametrize("dtype", few(["bfloat16", "float16"], "bfloat16"))
def test_prefill(dtype, compiled):
    """Copies of arrays; sums that do not fit in the registers; products or copies by other instructions."""
    rows, keys = (1, PREFILL, 32, WIDTH), (1, PREFILL, 8, WIDTH)
    kernel = compiled(rows, keys, keys, dtype=jnp.dtype(dtype), is_causal=True)
    assert "mosaic_gpu_v2" in kernel.text
    assert kernel.memory <= 1.01 * 4 * PREFILL * 32  # the energies in the kernel's order
    # 168 registers for three groups of warps, of which the one that copies leaves some to the others
    assert kernel.registers == 168 and kernel.spilled == 0
    assert kernel.count("setmaxnreg.dec") == kernel.count("setmaxnreg.inc") == 1
    # 128 queries by 128 keys: eight products for scores and for sums, in the loops with a mask and without
    assert kernel.count("wgmma.mma_async") == 2 * (8 + 8)
    assert kernel.count("wgmma.mma_async.sync.aligned.m64n128k16") == 2 * (8 + 8)
    assert kernel.count(r"cp\.async\.bulk\.tensor") >= 3
    # a tile of 64 × 128 scores has 64 in each thread
    assert kernel.count(r"ex2\.approx\.ftz") == 2 * (64 + 2) and kernel.count("ex2") == 2 * (64 + 2)


@pytest.mark.parametrize(
    ("width", "value_width"), few_rows([(96, 80), (64, 64), (192, 128), (256, 256)]), ids=str
)
def test_widths(width, value_width, compiled):
    """Tiles that spill, or that need more shared memory than there is, which fails here too."""
    rows, keys, values = ((1, SHORT, 4, x) for x in (width, width, value_width))
    kernel = compiled(rows, keys, values, local_window_size=(100, 10))
    assert kernel.spilled == 0 and kernel.count("wgmma.mma_async") > 0


def test_decode(compiled):
    """Keys copied; rows of a group that are read apart, each with its keys; parts that are merged by many kernels."""
    keys = (1, KEYS, 8, WIDTH)
    kernel = compiled((1, 1, 32, WIDTH), keys, keys)
    assert kernel.memory < 0.02 * 2 * 2 * KEYS * 8 * WIDTH
    assert kernel.spilled == 0 and kernel.count("wgmma.mma_async") == 8 + 4


# A step of 64 rows by 64 keys: scores and each of their changes by eight products, each sum over keys by four.
PRODUCTS = {
    ("query",): 8 + 8 + 4,
    ("key", "value"): 8 + 8 + 4 + 4,
    ("query", "key", "value"): 8 + 16 + 4 + 4,
}
EVERY = tuple(PRODUCTS)[-1]

MASKS = {
    "causal": {"is_causal": True},
    "full": {},
    "window": {"local_window_size": (500, 10)},
    "lengths": {"is_causal": True, "key_value_seq_lengths": jnp.array([7000], jnp.int32)},
}


@pytest.mark.toolkits
@pytest.mark.parametrize("mask", few(list(MASKS), "causal"))
def test_gradients(mask, compiled):
    """A kernel for each of queries and keys; sums that do not fit in the registers, which slow every product."""
    rows, keys = (1, TRAINED, 32, WIDTH), (1, TRAINED, 8, WIDTH)
    *_, of_queries, of_keys = compiled(rows, keys, keys, derivative=gradients, **MASKS[mask])
    loops = 1 if mask == "full" else 2
    # a step of 64 rows by 64 keys: scores and the weights' cotangents by eight products each, a sum by four
    assert of_queries.count("wgmma.mma_async") == loops * (8 + 8 + 4)
    assert of_keys.count("wgmma.mma_async") == loops * (8 + 8 + 4 + 4)
    assert of_queries.registers <= 168 and of_keys.registers <= 255
    # numbers of rows and keys for a mask; tiles that did not fit would be hundreds of bytes
    assert of_queries.spilled <= 32 and of_keys.spilled <= 32
    assert "atom" not in of_queries.code + of_keys.code
    assert of_keys.count(r"ex2\.approx\.ftz") == of_keys.count("ex2") == loops * 32


@pytest.mark.parametrize(
    ("width", "value_width"), few_rows([(96, 80), (64, 64), (64, 128)]), ids=str
)
def test_gradients_of_widths(width, value_width, compiled):
    """Tiles that spill, or that need more shared memory than there is, which fails here too."""
    rows, keys, values = ((1, SHORT_TRAINED, 4, x) for x in (width, width, value_width))
    kernels = compiled(rows, keys, values, derivative=gradients, local_window_size=(100, 10))
    # without that of the forward pass, if tangents had it compiled
    assert len(kernels) >= 2 and max(x.spilled for x in kernels) <= 68


@pytest.mark.parametrize("tokens", few([3, 301], 3))
def test_any_number_of_tokens(tokens, compiled):
    """Copies that take whole groups of 8 tokens alone."""
    rows, keys = (1, tokens, 4, 64), (1, tokens + 998, 2, 64)
    assert len(compiled(rows, keys, keys, derivative=gradients, is_causal=True)) == 3
    assert len(compiled(rows, keys, keys, derivative=along(*EVERY), is_causal=True)) > 3


def test_gradients_of_wide_heads(compiled):
    """Sums that are kept in memory: the backward of the widest heads is XLA's."""
    shape = 1, SHORT_TRAINED, 4, 256
    assert len(compiled(shape, shape, shape, derivative=gradients, is_causal=True)) == 1


@pytest.mark.toolkits
@pytest.mark.parametrize(
    ("mask", "moving", "dtype"),
    few_rows(
        [
            *((mask, EVERY, "bfloat16") for mask in MASKS),
            *(("causal", moving, "float16") for moving in PRODUCTS),
        ]
    ),
    ids=str,
)
def test_tangents(mask, moving, dtype, compiled):
    """A product with what does not move; sums that do not fit in the registers of two groups that compute."""
    rows, keys = (1, TRAINED, 32, WIDTH), (1, TRAINED, 8, WIDTH)
    options = MASKS[mask] | {"dtype": jnp.dtype(dtype)}
    kernel = compiled(rows, keys, keys, derivative=along(*moving), **options)[-1]
    loops = 1 if mask == "full" else 2
    assert kernel.count("wgmma.mma_async") == loops * PRODUCTS[moving]
    # CUDA 13 ignores what moves registers to the groups that compute
    assert kernel.registers <= 168 and kernel.spilled <= (104 if toolkit().name == "cu13" else 0)
    assert kernel.count(r"ex2\.approx\.ftz") == kernel.count("ex2") == loops * 32
    assert "atom" not in kernel.code


@pytest.mark.parametrize(
    ("width", "value_width"), few_rows([(96, 80), (64, 64), (64, 128), (192, 128)]), ids=str
)
def test_tangents_of_widths(width, value_width, compiled):
    """Tiles that spill, or that need more shared memory than there is, which fails here too."""
    rows, keys, values = ((1, SHORT_TRAINED, 4, x) for x in (width, width, value_width))
    options = {"local_window_size": (100, 10), "derivative": along(*EVERY)}
    assert max(x.spilled for x in compiled(rows, keys, values, **options)) == 0


def test_tangents_of_wide_heads(compiled):
    """Tiles of all directions that do not fit on the chip: the tangent of the widest heads is XLA's."""
    shape = 1, 1200, 4, 256
    assert len(compiled(shape, shape, shape, derivative=along(*EVERY), is_causal=True)) == 1


@pytest.mark.parametrize(("outer", "kernels"), [("reverse", 3), ("forward", 2)])
def test_derivatives_of_a_tangent(outer, kernels):
    """A tangent that cannot be differentiated, or whose kernels are lost."""
    sharding = SingleDeviceSharding(nodes(1, 1).devices.item())
    arrays = [jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16, sharding=sharding)] * 3

    def energy(*arrays):
        return local_attention(*arrays, is_causal=True, implementation="mosaic_gpu").lse.sum()

    def pushed(*arrays):
        return jax.jvp(energy, arrays, arrays)[1]

    both = {"reverse": jax.grad(pushed, (0, 1, 2)), "forward": lambda *x: jax.jvp(pushed, x, x)[1]}
    program = jax.jit(both[outer]).lower(*arrays).compile()
    assert program.as_text().count('custom_call_target="mosaic_gpu_v2"') == kernels
