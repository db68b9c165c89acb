"""Programs lowered for GPUs and TPUs on a machine without them: in any context, on this JAX and later ones."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn import attention
from energy_attn.kernels import _imports, implementations, local_attention
from energy_attn.kernels.dispatch import _probe
from energy_attn.kernels.internal import explain, tried
from tests.support.problems import call_of
from tests.support.selection import few, few_rows
from tests.support.traits import kernel_of, register

pytestmark = pytest.mark.usefixtures("user_settings")

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
TRITON, HOPPER, MOSAIC = "__gpu$xla.gpu.triton", "mosaic_gpu_v2", "tpu_custom_call"


def abstract(dtype=jnp.bfloat16, sharding=None):
    return (jax.ShapeDtypeStruct((2, 256, 4, 64), dtype, sharding=sharding),) * 3


def with_gradients(*arrays, **options):
    def run(*arrays):
        return local_attention(*arrays, is_causal=True, **options)

    state, back = jax.vjp(run, *arrays)
    return state, back(state._replace(lse=0 * state.lse))


def calls(run, arrays, platform):
    """The custom calls of a program."""
    # a new function, so that no trace with other kernels is found in the cache
    lowered = jax.jit(lambda *x: run(*x)).trace(*arrays).lower(lowering_platforms=(platform,))
    return set(re.findall(r"custom_call @([\w$.]+)", lowered.as_text())) - {"Sharding"}


@pytest.fixture
def afresh(monkeypatch):
    """New kernels, and empty caches in the library and in JAX."""

    def forget():
        register(monkeypatch, *(type(kernel_of(name))() for name in implementations()))
        _imports.private_names.cache_clear()
        _probe._tried.cache_clear()
        jax.clear_caches()

    forget()
    yield forget
    monkeypatch.undo()
    forget()


LENGTHS = {"key_value_seq_lengths": jax.ShapeDtypeStruct((2,), jnp.int32)}
PACKED = dict.fromkeys(
    ("query_segment_ids", "key_segment_ids"), jax.ShapeDtypeStruct((2, 256), jnp.int32)
)
DEFAULTS = {
    "cuda-bfloat16": (jnp.bfloat16, {}, {FORWARD, BACKWARD}, "cudnn"),
    "cuda-float32": (jnp.float32, {}, {TRITON}, "pallas_gpu"),
    "tpu-bfloat16": (jnp.bfloat16, {}, {MOSAIC}, "splash"),
    "tpu-float32": (jnp.float32, {}, {MOSAIC}, "pallas_tpu"),
    "rocm-bfloat16": (jnp.bfloat16, {}, set(), "blockwise"),
    "cpu-bfloat16": (jnp.bfloat16, {}, set(), "blockwise"),
    "cuda-lengths": (jnp.bfloat16, LENGTHS, {FORWARD, BACKWARD}, "cudnn"),
    "tpu-lengths": (jnp.bfloat16, LENGTHS, {MOSAIC}, "splash"),
    "tpu-segments": (jnp.bfloat16, PACKED, {MOSAIC}, "splash"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", DEFAULTS)
def test_default(name):
    """A kernel whose lowering needs other parameters than this JAX passes, or a GPU; XLA where a kernel fits; a padded
    or packed batch that leaves the vendor's kernels, for positions that these do not take.
    """
    platform = name.partition("-")[0]
    dtype, options, wanted, kernel = DEFAULTS[name]

    def run(*arrays):
        given = dict(zip(options, arrays[3:], strict=True))
        assert _explained(platform, *arrays[:3], **given).name == kernel
        return with_gradients(*arrays[:3], **given)

    assert calls(run, (*abstract(dtype), *options.values()), platform) == wanted


def test_ragged_rows_over_devices():
    """Lengths that become positions where only rows are sharded, which leaves each device its whole sequences."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])

    def run(*arrays):
        return attention(*arrays[:3], key_value_seq_lengths=arrays[3], is_causal=True)

    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("x"))
        lengths = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=rows)
        assert calls(run, (*abstract(sharding=rows), lengths), "cuda") == {FORWARD}


def _explained(platform, *arrays, **options):
    call = call_of(*arrays, is_causal=True, **options)
    return explain(tried(), call.settings, call.operands, platform)


@pytest.mark.smoke
def test_mosaic_gpu():
    """A part of Mosaic GPU that a version of JAX renamed: the kernel would decline, and nobody would notice."""

    def named(*arrays):
        return with_gradients(*arrays, implementation="mosaic_gpu")

    assert calls(named, abstract(), "cuda") == {HOPPER}


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((2, 256, 4, 64), "mosaic_gpu"),
        ((2, 255, 4, 64), "pallas_gpu"),
        ((2, 256, 4, 256), "pallas_gpu"),
    ],
    ids=["many rows", "few rows", "wide"],
)
def test_hopper(shape, wanted):
    """Few rows by a slower kernel, or the derivatives of wide heads by XLA's operations, thirty times slower."""

    def run(x, positions):
        assert _explained("cuda", x, x, x, query_positions=positions).name == wanted

    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    jax.eval_shape(run, x, jax.ShapeDtypeStruct(shape[:2], jnp.int32))


@pytest.mark.full
@pytest.mark.parametrize("dtype", few(["bfloat16", "float32"], "bfloat16"))
def test_in_any_context(dtype, afresh):
    """A probe that is traced into the program around it, or under its mesh, precision or configuration."""
    dtype = jnp.dtype(dtype)
    wanted = {FORWARD, BACKWARD} if dtype == jnp.bfloat16 else {TRITON}
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec, arrays = P("x"), abstract(dtype, NamedSharding(mesh, P("x")))
    split = jax.shard_map(with_gradients, mesh=mesh, in_specs=spec, out_specs=spec)
    with jax.set_mesh(mesh):
        assert calls(split, arrays, "cuda") == wanted
    afresh()
    with jax.enable_x64(True), jax.disable_jit(), jax.numpy_rank_promotion("raise"):
        assert calls(with_gradients, abstract(dtype), "cuda") == wanted
    afresh()
    with jax.default_matmul_precision("highest"), jax.checking_leaks():
        mapped = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in abstract(dtype)]
        assert calls(jax.vmap(with_gradients), mapped, "cuda") == wanted


def test_unknown_parameters(afresh, monkeypatch):
    """A future lowering with unknown parameters: an error from jit where the next kernel fits."""

    def lowering(ctx, *arrays, unheard_of, **options):
        raise AssertionError("called without it")

    found = _imports.private_names("cudnn")
    known = found.forward
    primitive = Primitive("another_cudnn")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *x, **options: known.abstract_eval(*x, **options)[0])
    mlir.register_lowering(primitive, lowering, platform="cuda")
    monkeypatch.setattr(found, "forward", primitive)
    assert calls(with_gradients, abstract(), "cuda") == {HOPPER}
    with pytest.raises(NotImplementedError, match=f"cudnn: .*{jax.__version__}.*unheard_of"):
        calls(lambda *x: with_gradients(*x, implementation="cudnn"), abstract(), "cuda")
    choice = _explained("cuda", *(jnp.zeros(x.shape, x.dtype) for x in abstract()))
    assert choice.name == "mosaic_gpu" and "unheard_of" in dict(choice.declined)["cudnn"]


def test_other_results(afresh, monkeypatch):
    """Statistics in another layout, which shapes tell before results are wrong."""
    kernel = kernel_of("cudnn")
    forward = type(kernel).forward

    def turned(*x):
        state = forward(*x)
        return state._replace(lse=state.lse.swapaxes(1, 2))

    monkeypatch.setattr(type(kernel), "forward", turned)
    assert "float32[1, 2, 640]" in _probe.obstacle(kernel, "cuda")
    assert calls(with_gradients, abstract(), "cuda") == {HOPPER}


@pytest.fixture
def gone(afresh, monkeypatch):
    """Removes one of the private names from JAX, as a new version may."""
    uses = dict(_imports._USES)

    def take(use, name):
        versions, names = uses[use]
        changed = versions, names | {name: f"{names[name]}_as_it_was"}
        monkeypatch.setitem(_imports._USES, use, changed)
        _imports.private_names.cache_clear()

    return take


# flash-attn-jax and fa4-jax are not installed for these tests
@pytest.mark.smoke
@pytest.mark.parametrize("use", sorted({*_imports._USES} - {"flash", "fa4"}))
def test_private_names(use, gone):
    """A listed name that this JAX lacks, or a name that is used before it is looked up."""
    assert set(vars(_imports.private_names(use))) == set(_imports._USES[use][1])
    for name, place in list(_imports._USES[use][1].items()):
        gone(use, name)
        with pytest.raises(
            NotImplementedError, match=f"{use}: wanted .*{place}.*{jax.__version__}"
        ):
            _imports.private_names(use)


@pytest.mark.parametrize(
    ("use", "name", "platform", "next_one"),
    few_rows([("cudnn", "Mask", "cuda", HOPPER), ("splash", "backward_query", "tpu", MOSAIC)]),
)
def test_names_that_are_gone(use, name, platform, next_one, gone):
    """An AttributeError from a call after JAX drops a private name."""
    gone(use, name)
    assert calls(with_gradients, abstract(), platform) == {next_one}
    with pytest.raises(NotImplementedError, match=f"{use}: wanted .*_as_it_was.*{jax.__version__}"):
        with_gradients(*(jnp.zeros(x.shape, x.dtype) for x in abstract()), implementation=use)


def test_rocm():
    """Kernels for NVIDIA's GPUs interpreted silently on AMD's, a thousand times slower."""
    with pytest.raises(NotImplementedError, match="pallas_gpu: it is made for cuda, got .* rocm"):
        calls(lambda *x: local_attention(*x, implementation="pallas_gpu"), abstract(), "rocm")
