"""Vendors' attention in programs for an H200, compiled ahead of time, without GPU or driver.

Needs jax-cuda12-plugin and nvidia-cuda-nvcc-cu12 (`make test-cuda`); what is asked of FlashAttention, flash-attn-jax
and so an older JAX (`make test-flash`), or fa4-jax and so Python 3.12 (`make test-fa4`). Programs are read, never run.
"""

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from energy_attn.kernels import AttentionState, local_attention
from tests.support.cuda import nodes
from tests.support.selection import few

BATCH, ROWS, WIDTH = 2, 8192, 128
heads = pytest.mark.parametrize("heads", few([(16, 16), (32, 8)], (32, 8)), ids=str)
pytestmark = pytest.mark.usefixtures("user_settings")


@pytest.fixture
def multiprocessors(monkeypatch):
    """FlashAttention with the number of multiprocessors of an H200, for which it asks the driver."""
    for part in ("flash_fwd", "flash_bwd"):
        module = importlib.import_module(f"flash_attn_jax.{part}")
        monkeypatch.setattr(module, "get_sm_count", lambda: 132)


def operands(heads, sharding, batch=BATCH):
    query, key = (
        jax.ShapeDtypeStruct((batch, ROWS, n, WIDTH), jnp.bfloat16, sharding=sharding)
        for n in heads
    )
    return query, key, key


def one():
    return SingleDeviceSharding(nodes(1, 1).devices.item())


def attend(*arrays, implementation, **options):
    return local_attention(*arrays, implementation=implementation, is_causal=True, **options)


def with_gradients(*arrays, lse, implementation):
    state, back = jax.vjp(functools.partial(attend, implementation=implementation), *arrays)
    if lse:
        return state, back(state)

    def loss(*arrays):
        out = attend(*arrays, implementation=implementation).out
        return (out.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(*arrays)


def calls(text, prefix):
    """The vendor's functions that a program calls, in order."""
    return re.findall(rf"custom_call @{re.escape(prefix)}(\w+)\(", text)


def copies(text):
    """Sizes, in elements, of all arrays of 16 bits that a program copies or transposes."""
    found = re.findall(r"= (?:bf|f)16\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    return [functools.reduce(lambda a, b: a * int(b), shape.split(","), 1) for shape in found]


@pytest.mark.cuda
@heads
@pytest.mark.parametrize("window", [None, (1000, 0)])
def test_cudnn_forward(heads, window):
    """Statistics in 16 bits, or a copy of an operand in another layout."""
    run = functools.partial(attend, implementation="cudnn", local_window_size=window)
    lowered = jax.jit(run).lower(*operands(heads, one()))
    text = lowered.as_text()
    assert calls(text, "__cudnn$fmha") == ["Softmax"]
    assert re.search(rf"tensor<{BATCH}x{heads[0]}x{ROWS}xf32>, tensor<0xui8>\)", text)
    length = re.search(r"sliding_window_length\\22: (\d+)", text)[1]
    assert length == ("0" if window is None else "1001")  # includes the query's own key
    program = lowered.compile()
    assert copies(program.as_text()) == []
    energies = BATCH * heads[0] * ROWS * 4
    assert program.memory_analysis().temp_size_in_bytes <= 1.01 * energies


@pytest.mark.toolkits
@pytest.mark.cuda
@heads
@pytest.mark.parametrize("lse", [False, True])
def test_cudnn_backward(heads, lse):
    """A second backward where none is needed, none where one is, or copies."""
    run = functools.partial(with_gradients, lse=lse, implementation="cudnn")
    lowered = jax.jit(run).lower(*operands(heads, one()))
    backwards = ["SoftmaxBackward"] * (1 + lse)
    assert calls(lowered.as_text(), "__cudnn$fmha") == ["Softmax", *backwards]
    program = lowered.compile()
    assert copies(program.as_text()) == []


@pytest.mark.toolkits
@pytest.mark.cuda
def test_cudnn_lengths():
    """Lengths that cuDNN's calls are not given."""

    def run(lengths, *arrays):
        def loss(*arrays):
            options = {"implementation": "cudnn", "key_value_seq_lengths": lengths}
            return (attend(*arrays, **options).out.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(*arrays)

    lengths = jax.ShapeDtypeStruct((BATCH,), jnp.int32, sharding=one())
    lowered = jax.jit(run).lower(lengths, *operands((32, 8), one()))
    text = lowered.as_text()
    assert calls(text, "__cudnn$fmha") == ["Softmax", "SoftmaxBackward"]
    given = re.findall(r"custom_call @__cudnn.*", text)
    assert all("PADDING_CAUSAL" in x and x.count(f"tensor<{BATCH}xi32>") == 2 for x in given)
    lowered.compile()


@pytest.mark.cuda
def test_cudnn_tangent():
    """A tangent by XLA's operations beside cuDNN's forward, or copies between the two."""

    def run(*arrays):
        return jax.jvp(functools.partial(attend, implementation="cudnn"), arrays[:3], arrays[3:])

    lowered = jax.jit(run).lower(*operands((32, 8), one()) * 2)
    assert calls(lowered.as_text(), "__cudnn$fmha") == ["Softmax"]
    program = lowered.compile()
    assert "attention_tangent" in program.as_text() and copies(program.as_text()) == []


def in_shard_map(implementation):
    """A program for a node whose devices share the rows, with gradients of both results."""
    mesh, spec = nodes(1, 8), P("device")
    run = jax.shard_map(
        functools.partial(with_gradients, lse=True, implementation=implementation),
        mesh=mesh,
        in_specs=spec,
        out_specs=(AttentionState(spec, spec), spec),
        axis_names={"node", "device"},
    )
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(*operands((16, 16), NamedSharding(mesh, spec), batch=16))


@pytest.mark.cuda
def test_cudnn_in_shard_map():
    """XLA that partitions again what each device runs by itself; or results of another type than JAX wants."""
    with jax.set_mesh(nodes(1, 8)):
        text = in_shard_map("cudnn").compile().as_text()
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax') == 3
    assert "CustomSPMDPartitioning" not in text


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("capability", "width", "wanted"),
    [
        ((9, 0), 256, {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}),
        ((10, 0), 128, {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}),
        ((10, 0), 256, {"__gpu$xla.gpu.triton"}),
        ((8, 9), 192, {"__gpu$xla.gpu.triton"}),
        ((7, 5), 64, set()),  # a T4: neither cuDNN nor Triton knows it
    ],
)
def test_by_capability(capability, width, wanted):
    """A kernel by the shapes alone, which XLA then fails to compile for this GPU; or by the GPU of the process."""
    sharding = SingleDeviceSharding(nodes(1, 1, capability).devices.item())
    x = jax.ShapeDtypeStruct((2, 256, 2, width), jnp.bfloat16, sharding=sharding)
    run = functools.partial(with_gradients, lse=False, implementation=None)
    text = jax.jit(run).lower(x, x, x).as_text()
    assert set(re.findall(r"custom_call @([\w$.]+)", text)) == wanted


@pytest.mark.cuda
def test_named_for_another_gpu():
    """cuDNN that is asked for by name, and fails inside XLA on a GPU that it does not know."""
    sharding = SingleDeviceSharding(nodes(1, 1, (7, 5)).devices.item())
    x = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16, sharding=sharding)
    with pytest.raises(NotImplementedError, match="cudnn: .* from 8.0 on, got 7.5"):
        jax.jit(functools.partial(attend, implementation="cudnn")).lower(x, x, x)


@pytest.mark.flash
@heads
@pytest.mark.parametrize("lse", [False, True])
def test_flash(heads, lse, multiprocessors):
    """A function of the package that now has another name or other arguments."""
    run = functools.partial(with_gradients, lse=lse, implementation="flash")
    text = jax.jit(run).lower(*operands(heads, one())).as_text()
    assert calls(text, "flash_mha_") == ["fwd", *["bwd"] * (1 + lse)]
    assert "is_causal = true" in text and "window_size_left = -1" in text


@pytest.mark.flash
def test_flash_in_shard_map(multiprocessors):
    """The package's own partitioning, which ignores the share of a device."""
    assert calls(in_shard_map("flash").as_text(), "flash_mha_") == ["fwd", "bwd", "bwd"]


@pytest.fixture
def hopper(monkeypatch):
    """fa4-jax on an H100, whose capability it asks JAX for."""
    module = importlib.import_module("fa4_jax.kernels")
    monkeypatch.setattr(module, "_device_arch", lambda: 90)


# Causal and plain attention; a window; the widest.
FA4 = [((16, 16), 128, {"is_causal": True}), ((32, 8), 128, {}), ((8, 8), 256, {"is_causal": True})]
FA4 += [((8, 2), 64, {"is_causal": True, "local_window_size": (100, 0)})]


@pytest.mark.fa4
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside CuTe and its users
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(("heads", "width", "options"), FA4, ids=str)
def test_fa4(heads, width, options, lse, hopper):
    """A function of the package that now has other arguments, or a kernel that CuTe does not compile."""

    def loss(*arrays):
        state = local_attention(*arrays, implementation="fa4", **options)
        return state.out.astype(jnp.float32).sum() + (state.lse.sum() if lse else 0)

    query, key = (jax.ShapeDtypeStruct((2, 512, n, width), jnp.bfloat16) for n in heads)
    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    lowered = run.trace(query, key, key).lower(lowering_platforms=("cuda",))
    found = re.findall(r"custom_call @cutejax\.(\w+)\.", lowered.as_text())
    assert found[0] == "fa4_fwd_lse"
    names = {"fa4_bwd_pre", "fa4_bwd_post", "fa4_bwd" if heads[0] == heads[1] else "fa4_bwd_gqa"}
    assert names <= set(found)
    assert found.count("fa4_bwd_pre") == 1 + lse
