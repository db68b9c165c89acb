"""The tiles that the GPU kernels choose by shapes, or are given; tests/cuda compiles them for GPUs."""

from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import KernelCall, local_attention
from energy_attn.kernels.call._kernel import lowered_for, target_device
from energy_attn.kernels.internal import GPUTiles, PallasGPU, Scales
from energy_attn.kernels.pallas.gpu._plan import KINDS, make_plan
from tests.kernels.derivatives import check_dense
from tests.support.arrays import array
from tests.support.problems import HEADS, _make, call_of, problem_call
from tests.support.traits import HERE, SMALL_TILES, Blockwise

TILES = GPUTiles("forward", rows=64, keys=32, warps=8, stages=3, programs=264)


def shapes(queries, keys, heads=8, kv_heads=1, width=128, dtype="bfloat16", batch=1):
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    return [jax.ShapeDtypeStruct((batch, *x, width), jnp.dtype(dtype)) for x in sizes]


def zeros(*sizes):
    return [array(np.zeros(x.shape), x.dtype) for x in shapes(*sizes)]


def plan_of(kind, *given, tiles=(), **options):
    found = []

    def make(*arrays):
        checked = call_of(*arrays, **options)
        found.append(make_plan(checked.operands, checked.settings, kind, tiles))

    jax.eval_shape(make, *given)
    return found[0]


def test_what_is_given():
    """Tiles that are passed and not used, or used for another kernel, or larger than the call."""
    few, many = shapes(4, 256), shapes(64, 8192)
    found = plan_of("forward", *many, tiles=(TILES,))
    assert (found.rows, found.keys, found.warps, found.stages) == (64, 32, 8, 3)
    assert found.row_times * found.row_heads == 64
    assert found.splits == 264 // 8
    assert plan_of("query", *many, tiles=(TILES,)) == plan_of("query", *many)
    found = plan_of("forward", *few, tiles=(TILES, GPUTiles("forward", 16, 16)))
    assert (found.rows, found.keys, found.splits) == (32, 32, 2)


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[pytest.mark.smoke] * (x == "key")) for x in KINDS]
)
def test_by_other_tiles(kind):
    """Sizes of tiles that change what a kernel computes: rows that are missing, keys that are counted twice."""
    problem = _make("other tiles", B=2, T=5, S=70, N=6, K=2, H=8, is_causal=True)
    tiles = GPUTiles(kind, rows=32, keys=16, warps=2, stages=3, programs=8, least_steps=1)
    options = {"is_causal": True, "implementation": PallasGPU((tiles,))}
    parts = ("state", {"query": "gradients", "key": "gradients"}.get(kind, kind))
    check_dense(lambda x: local_attention(**x, **options), problem, jnp.float32, 1e-5, parts=parts)


def test_problems_split_keys():
    """Cases of tangents whose keys are all of one program, and say nothing of the sum over several."""
    operands, settings, _ = problem_call(HEADS["heads_16_2"])
    assert make_plan(operands, settings, "tangent", SMALL_TILES).splits > 1


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_eight_bits_are_declined(dtype):
    """8 bits a number: up to 2^32 bytes Pallas counts offsets in 32 bits with a sign, wrong from 2^31 numbers on."""
    call = call_of(*zeros(4, 64))
    stored = array(np.zeros(call.operands.key.shape), dtype)
    for name in ("key", "value"):
        operands = call.operands._replace(**{name: stored})
        with pytest.raises(NotImplementedError, match=f"{name}: wanted float16 .* got {dtype}"):
            PallasGPU().check(KernelCall(operands, call.settings))


@pytest.mark.parametrize(
    ("queries", "keys", "reads"),
    [
        (1, 2048, True),
        (32, 2048, True),
        (33, 2048, False),
        (1, 2**21, True),
        (1, 2**21 + 1, False),
        (1, 2**22, False),
        (1, 2**22 + 1, True),
    ],
)
def test_eight_bits_that_are_read(queries, keys, reads):
    """Offsets that overflow: up to 2^32 bytes, which are as many numbers, they have 32 bits with a sign; keys that
    each of several tiles of rows would widen; float16 weights that underflow."""
    query, key = jax.ShapeDtypeStruct((1, queries, 32, 128), jnp.bfloat16), (1, keys, 8, 128)
    stored, scale = jax.ShapeDtypeStruct(key, jnp.int8), jax.ShapeDtypeStruct(key[:3], jnp.float32)
    call = call_of(*zeros(4, 64))
    operands = call.operands._replace(
        query=query, key=stored, value=stored, scales=Scales(scale, scale)
    )
    assert PallasGPU().reads_eight_bits(KernelCall(operands, call.settings)) == reads
    narrow = operands._replace(query=jax.ShapeDtypeStruct(query.shape, jnp.float16))
    assert not PallasGPU().reads_eight_bits(KernelCall(narrow, call.settings))


def test_rows_of_one_tile():
    """A cliff between 32 rows of a key head and 33: a fourth of the bytes on their way, on a quarter of the chip."""
    on_their_way = {}
    for rows in (4, 32, 33, 64, 65, 128):
        plan = plan_of("forward", *shapes(1, 65536, 8 * rows, 8))
        assert plan.stages >= 3
        programs = 8 * plan.splits / 132
        on_their_way[rows] = programs * (plan.stages - 1) * plan.keys * 512
    # more than 5 TB/s times 1 µs of 132 multiprocessors
    assert min(on_their_way.values()) > 64 * 1024
    assert on_their_way[33] > on_their_way[32] / 2 and on_their_way[65] > on_their_way[64] / 2


def test_short_caches():
    """As many parts to merge as steps to read, or a chip that is mostly idle."""
    splits = {}
    for keys in (1024, 8192, 65536):
        plan = plan_of("forward", *shapes(1, keys, 32, 8))
        splits[keys] = plan.splits
        steps = keys // plan.keys / plan.splits
        assert steps >= 2 * plan.stages or (steps >= 4 and 8 * plan.splits <= 132)
    assert splits[8192] < splits[65536] == 4 * 132 // 8
    assert splits[1024] == 8


class GPU(NamedTuple):
    """What is read of a device that is not there."""

    compute_capability: str
    core_count: int
    device_kind: str


class Watched(Blockwise):
    """Keeps what devices it is lowered for."""

    name, platforms, found = "watched", (HERE,), []

    def forward(self, call):
        self.found.append(target_device())
        return super().forward(call)


def test_target_of_a_program():
    """A kernel that is not told of the devices of its program, or is told of the last one's."""
    x = array(np.ones((1, 4, 2, 8)))
    device = jax.devices()[3 % jax.device_count()]
    jax.jit(lambda x: local_attention(x, x, x, implementation=Watched())).lower(
        jax.device_put(x, device)
    )
    assert Watched.found[-1].device_kind == device.device_kind
    assert target_device() is None
    Watched.found.clear()
    run = jax.jit(lambda x: local_attention(x, x, x, implementation=Watched()).out)
    jax.export.export(run)(x)
    assert Watched.found and set(Watched.found) == {None}


def test_of_the_target(unchecked):
    """Tiles for the machine that traces: too large for the GPU of the program."""
    widest = shapes(512, 8192, 8, 8)
    assert plan_of("forward", *widest).stages == 3
    with lowered_for(GPU("8.0", 108, "NVIDIA A100-SXM4-80GB")):
        assert plan_of("forward", *widest).stages == 2
        assert plan_of("forward", *shapes(1, 65536, 32, 8)).splits == 3 * 108 // 8
    with lowered_for(GPU("8.9", 128, "NVIDIA GeForce RTX 4090")):
        found = plan_of("forward", *widest)
        assert found.rows * found.width * 2 + 2 * found.keys * found.width * 4 <= 99 * 1024
        with pytest.raises(NotImplementedError, match="that fit into 99 KiB"):
            plan_of("forward", *widest, tiles=(GPUTiles("forward", 128, 128),))


def test_tiles_that_do_not_fit():
    """A mistake that shows when a kernel is compiled, or never."""
    large = GPUTiles("key", rows=256, keys=128, stages=4)
    with pytest.raises(NotImplementedError, match=r"tiles: .* of 'key' .* 227 KiB .* take 584"):
        local_attention(*zeros(64, 128), implementation=PallasGPU((large,)))
