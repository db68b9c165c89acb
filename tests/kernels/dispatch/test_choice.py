"""The choice of a kernel when a program is lowered: by platform and partitioning, under vmap; explained; by policy."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn import attention, masks
from energy_attn.kernels import (
    AbstractKernel,
    AttentionState,
    implementations,
    local_attention,
)
from energy_attn.kernels.dispatch import _lowering, _registry
from energy_attn.kernels.internal import CallPolicy, call_policy, cotangents, explain, tried
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.problems import PROBLEMS, call_of, cast
from tests.support.programs import instructions
from tests.support.traits import kernel_of, register


class Marked(AbstractKernel):
    """A kernel whose state tells that it ran: `out` is its own number, `lse` the size of the batch it got."""

    exported = True
    masks = (masks.AbstractMask,)

    def __init__(self, name, platforms, number, interpreted=()):
        self.name, self.platforms, self.interpreted = name, platforms, interpreted
        self.number = number

    def check(self, call):
        if call.operands.query.dtype == jnp.float64:
            raise NotImplementedError("query: wanted at most 32 bits, got float64")

    def forward(self, call):
        operands = call.operands
        shape = (*operands.query.shape[:-1], operands.value.shape[-1])
        out = jnp.full(shape, self.number, operands.value.dtype) * jnp.ones_like(
            operands.value[0, 0, 0, 0]
        )
        return AttentionState(out, jnp.full(shape[:-1], float(shape[0]), jnp.float32))

    def backward(self, call, state, cotangent):
        number = self.number + (cotangent.lse is None) / 2
        found = [jnp.full_like(x, number) for x in call.operands.qkv]
        return cotangents(*found)


MINE, THEIRS, SLOW = 3.0, 5.0, 7.0


@pytest.fixture
def kernels(monkeypatch):
    """Kernels for CPUs, for TPUs and for interpretation, before the library's own."""
    made = (
        Marked("mine", ("cpu",), MINE),
        Marked("theirs", ("tpu",), THEIRS),
        Marked("slow", ("cuda",), SLOW, interpreted=("cpu",)),
    )
    register(monkeypatch, *made, *map(kernel_of, implementations()))
    jax.clear_caches()
    yield
    jax.clear_caches()


def arrays(dtype=jnp.float32):
    return cast(PROBLEMS["grouped"], dtype)[0]


def attend(arrays, implementation=None):
    return local_attention(**arrays, implementation=implementation)


def constants(lowered):
    """The marked kernels that a program contains."""
    text = lowered.as_text().lower()
    return {number for number in (MINE, THEIRS, SLOW) if f"{number:.6e}" in text}


@pytest.mark.smoke
def test_platform_lowered_for(kernels):
    """A choice by the machine that traces, where a laptop compiles for a pod."""
    traced = jax.jit(attend).trace(arrays())
    assert constants(traced.lower(lowering_platforms=("cpu",))) == {MINE}
    assert constants(traced.lower(lowering_platforms=("tpu",))) == {THEIRS}
    assert constants(traced.lower(lowering_platforms=("cuda",))) == {SLOW}
    assert constants(traced.lower(lowering_platforms=("rocm",))) == set()


def test_export_for_several_platforms(kernels):
    """A program exported for two platforms with one kernel for both."""
    exported = jax.export.export(jax.jit(attend), platforms=("cpu", "tpu"))(arrays())
    text = exported.mlir_module()
    assert "3.000000e+00" in text and "5.000000e+00" in text
    np.testing.assert_array_equal(exported.call(arrays()).out, MINE)


@pytest.mark.smoke
def test_values_and_gradients(kernels):
    """A backward by another kernel than the forward, outside of jit too; a symbolic zero that is lost."""
    given = arrays()
    assert float(attend(given).out.ravel()[0]) == MINE
    for field, number in (("lse", MINE), ("out", MINE + 0.5)):
        gradient = jax.grad(lambda a, field=field: getattr(attend(a), field).sum())(given)
        for name, found in gradient.items():
            np.testing.assert_array_equal(found, number, err_msg=f"{field} in {name}")


def test_declined(kernels):
    """A kernel that is used although it declines."""
    out = attend(arrays(jnp.float64)).out
    np.testing.assert_array_equal(out, attend(arrays(jnp.float64), "reference").out)


def test_interpreted_only_by_name(kernels):
    """A slow interpreted kernel chosen where another fits, or refused although named."""
    run = functools.partial(attend, arrays())
    assert float(run(("theirs", "slow")).out.ravel()[0]) == SLOW
    assert float(run(("slow", "mine")).out.ravel()[0]) == MINE
    with pytest.raises(NotImplementedError, match="theirs: it is made for tpu, got a program for"):
        run("theirs")


def test_only_by_name(kernels, monkeypatch):
    """A kernel that no hardware has run, chosen for a user who did not ask for it; or refused although named."""
    monkeypatch.setattr(_registry, "_BY_NAME", frozenset({"mine"}))
    assert "mine" not in tried() and "mine" in implementations()
    np.testing.assert_array_equal(attend(arrays()).out, attend(arrays(), "reference").out)
    np.testing.assert_array_equal(attend(arrays(), "mine").out, MINE)
    np.testing.assert_array_equal(attend(arrays(), ("theirs", "mine")).out, MINE)


def test_partitioned_programs_get_xla(kernels):
    """A kernel in a program that XLA partitions, which would gather all arrays for it or fail."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    given = {name: jax.device_put(x, NamedSharding(mesh, P("x"))) for name, x in arrays().items()}
    split = jax.jit(attend)(given)
    np.testing.assert_allclose(split.out, attend(arrays(), "reference").out, rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="mine: XLA cannot split it over devices"):
        jax.jit(lambda a: attend(a, "mine"))(given)
    manual = jax.shard_map(attend, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_array_equal(jax.jit(manual)(given).out, MINE)
    # manual over one axis alone: XLA still partitions the program over the other
    both = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    partly = jax.shard_map(attend, mesh=both, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    given = {name: jax.device_put(x, NamedSharding(both, P("x"))) for name, x in arrays().items()}
    np.testing.assert_allclose(jax.jit(partly)(given).out, split.out, rtol=1e-5, atol=1e-6)
    explicit = jax.make_mesh(
        (2,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2]
    )
    with jax.set_mesh(explicit):
        given = {name: jax.device_put(x, P("x")) for name, x in arrays().items()}
        # in a jax.shard_map over the axes of the types
        found = attention(**given, implementation=tried())
        np.testing.assert_array_equal(found, MINE)
        with pytest.raises(NotImplementedError, match="query: wanted an array that its type does"):
            attend(given, "mine")


@pytest.mark.smoke
def test_vmap_folds_the_batch(kernels):
    """A reshape that mixes up the batch and the mapped axis."""
    given = arrays()
    queries = jnp.stack([given["query"]] * 3, axis=1)
    batch = given["query"].shape[0]
    mapped = jax.vmap(lambda q: attend(given | {"query": q}), in_axes=1)
    state = mapped(queries)
    np.testing.assert_array_equal(state.out, MINE)
    np.testing.assert_array_equal(state.lse, 3 * batch)  # one call of a larger batch
    # the outer axis is in the middle
    twice = jax.vmap(mapped, in_axes=2)(jnp.stack([queries] * 2, axis=2))
    assert twice.out.shape == (2, *state.out.shape)
    np.testing.assert_array_equal(twice.lse, 6 * batch)


def test_vmap_with_a_bias():
    """The cotangent of a bias for the whole batch that is the sum over what is mapped, or that of its first."""
    # [mapped, B, T or S, N, H]
    given = np.random.default_rng(0).normal(size=(4, 3, 2, 1, 2, 4))
    query, key, value, d_lse = (array(x, jnp.float32) for x in given)
    bias = array(np.zeros((1, 2, 1, 1)), jnp.float32)

    def gradient(query, key, value, d_lse):
        def energy(bias):
            names = {"bias": bias, "implementation": "decode_cpu"}
            return local_attention(query, key, value, **names).lse

        return jax.vjp(energy, bias)[1](d_lse[..., 0])[0]

    found = jax.jit(jax.vmap(gradient))(query, key, value, d_lse)
    wanted = np.asarray(d_lse)[..., 0].sum((1, 2))  # of one key, whose weight is one
    close(found, wanted[:, None, :, None, None], tolerance=1e-6)


def test_explain(kernels):
    """`info` that reports another kernel than the one used, or no reason."""

    def chosen(dtype, platform):
        operands, settings, _ = call_of(**arrays(dtype))
        return explain(implementations(), settings, operands, platform)

    assert chosen(jnp.float32, "cpu")[:2] == ("mine", ())
    assert chosen(jnp.float32, "tpu")[:2] == ("theirs", ())  # the others are not for it
    name, declined, _ = chosen(jnp.float64, "cpu")
    assert name == "reference"
    assert dict(declined)["mine"] == "query: wanted at most 32 bits, got float64"


@pytest.mark.parametrize("implementation", [None, "cudnn", "splash", "decode", "reference"])
def test_explain_second_order(implementation, monkeypatch):
    """`info` that names a kernel of XLA's operations for second derivatives other than they run."""
    rows = 1 if implementation == "decode" else 128
    arrays = [jnp.ones((1, x, 1, 64), jnp.bfloat16) for x in (rows, 128, 128)]
    used = set()

    def watch(kernel, name):
        method = getattr(kernel, name)

        def seen(self, *args):
            used.add(self.name)
            return method(self, *args)

        monkeypatch.setattr(kernel, name, seen)

    for kernel in map(kernel_of, tried()):
        for name in ("forward", "backward", "tangent") if not kernel.platforms else ():
            watch(type(kernel), name)
    names = (implementation,) if implementation else tried()
    call = call_of(*arrays)
    platform = "tpu" if implementation == "splash" else "cuda"
    second = explain(names, call.settings, call.operands, platform).second_order

    def total(*x):
        return local_attention(*x, implementation=implementation).lse.sum()

    jax.make_jaxpr(lambda *x: jax.jvp(jax.grad(total, (0, 1, 2)), x, x)[1])(*arrays)
    assert second in used and used <= {second, implementation}


def test_few_queries_and_keys():
    """Loops over one block; or the matrix of all scores where many keys, or queries, make it large."""
    for query_len, key_len, name in (
        (64, 64, "reference"),
        (1, 64, "reference"),
        (65, 64, "blockwise"),
        (64, 65, "blockwise"),
        (1, 65, "decode_cpu"),
    ):
        query, key = (jnp.zeros((2, n, 4, 8), jnp.float32) for n in (query_len, key_len))
        call = call_of(query, key, key)
        assert explain(tried(), call.settings, call.operands, "cpu").name == name


@pytest.mark.parametrize("is_causal", [False, True])
def test_vmap_of_few_queries(is_causal):
    """An axis of size 1 between products, with which XLA computes a softmax by itself: 1.3 times slower under vmap."""
    attend = functools.partial(ea.attention, is_causal=is_causal)
    x = jax.ShapeDtypeStruct((3, 16, 4, 8), jnp.float32)

    def program(f):
        def total(*x):
            return jnp.sin(f(*x)).sum()

        return instructions(jax.jit(jax.grad(total, (0, 1, 2))).lower(x, x, x).compile())

    assert program(jax.vmap(attend)) == program(attend)


def test_a_row_without_keys():
    """Few queries: a NaN of a fully masked row, or of its cotangent, which reaches keys and values as 0 · NaN."""
    query, key, value, d_out = np.random.default_rng(0).standard_normal((4, 2, 5, 2, 3))
    shown = np.ones((1, 1, 5, 5), bool)
    shown[..., 1, :] = False

    def gradients(fill):
        x, cotangent = query.copy(), d_out.copy()
        x[:, 1], cotangent[:, 1] = fill, fill
        attend = functools.partial(ea.attention, mask=jnp.asarray(shown))
        return jax.vjp(attend, *map(jnp.asarray, (x, key, value)))[1](jnp.asarray(cotangent))

    for found, wanted in zip(gradients(np.nan), gradients(0.0), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_one_cached_program_for_each_shape(kernels):
    """Calls outside of jit that compile every time."""
    attend(arrays())
    sizes = _lowering._bind._cache_size()
    attend(arrays())
    assert _lowering._bind._cache_size() == sizes


def test_a_slower_kernel_is_passed_over():
    """Many rows of a key head: by `decode_cpu` only if no other that is named takes them."""
    query, key = (jnp.zeros((2, length, 4, 8), jnp.float32) for length in (33, 65))
    call = call_of(query, key, key)
    many = call.settings, call.operands
    few = call.settings, call.operands._replace(query=call.operands.query[:, :32])
    for names, of_many in (
        (tried(), "blockwise"),
        (("decode_cpu", "blockwise"), "blockwise"),
        (("decode_cpu",), "decode_cpu"),
        (("decode_cpu", "pallas_tpu"), "decode_cpu"),
    ):
        name, declined, _ = explain(names, *many, "cpu")
        assert name == of_many
        assert name == "decode_cpu" or "got 33" in dict(declined)["decode_cpu"]
        assert explain(names, *few, "cpu").name == "decode_cpu"


def test_policy_of_usual_calls():
    """A default that changes the method or the kernels of a layout."""
    policy = call_policy("blockwise")
    assert policy == CallPolicy(("blockwise",)) and policy.method is None and policy.run is None
    assert not (policy.folds_sinks or policy.attention_only or policy.row_tiles or policy.leaf)
    assert policy.laid_out(256) is policy and policy.reads_trees
    assert policy.bind(dict, 256)() == {}


REPRODUCIBLE = call_policy(None, True)


@pytest.mark.parametrize("given", [(None, True), (REPRODUCIBLE.laid_out(512).kernels,)])
def test_policy_of_reproducible_calls(given):
    """Canonical kernels that are named, as by a decoder, taken for any others."""
    policy = call_policy(*given)
    assert policy.method == "reproducible" and policy.folds_sinks and policy.attention_only
    assert policy.run == (None if given[0] is None else 512)
    laid_out = policy.laid_out(256)
    assert laid_out.run == 256 and laid_out.kernels == REPRODUCIBLE.laid_out(256).kernels
    assert {kernel.run for kernel in laid_out.kernels} == {256}
    assert policy.bind(dict, 256)() == {"implementation": laid_out.kernels}
    assert policy.row_tiles and policy.leaf == 256 and not policy.reads_trees
    assert laid_out.laid_out(None) == call_policy(None, True)
    # static: compared and hashed
    assert len({policy, laid_out, call_policy(*given), call_policy(None)}) == 3
