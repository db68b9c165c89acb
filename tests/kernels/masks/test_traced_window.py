"""Windows that are arrays, against static ones by definition: derivatives, the blocks that are read, meshes, caches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import masks
from energy_attn.distributed import KVCache, SequenceParallel, collectives
from energy_attn.kernels.internal import explain, tried
from energy_attn.kernels.xla._blocks import BlockedOperands, Index
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.problems import call_of

T, WINDOWS = 24, (3, 24, 0, 5)


def arrays(dtype="float64"):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((2, T, n, 4)), dtype) for n in (4, 2, 2))


def dense(query, key, value, window):
    """Causal attention within a window, by definition."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, jnp.repeat(key, 2, 2)) / 2
    places = np.arange(T, dtype=np.int32)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance <= window)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(value, 2, 2))


def layers(attend, qkv, windows):
    """Layers with different windows."""

    def layer(query, window):
        return query + attend(query, *qkv[1:], window), None

    return jax.lax.scan(layer, qkv[0], windows)[0]


def traced(query, key, value, window, **options):
    return ea.attention(query, key, value, local_window_size=(window, 0), **options)


def derivatives(f, qkv):
    along = jax.tree.map(lambda x: jnp.cos(x[:, ::-1]), qkv)

    def loss(qkv):
        return (jnp.sin(f(qkv)) * qkv[0]).sum()

    return jax.jvp(f, (qkv,), (along,)), jax.jvp(jax.grad(loss), (qkv,), (along,))


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_layers_of_one_scan(implementation):
    """A window that is that of another layer, or a derivative of any order that is not that of its window."""
    qkv, windows = arrays(), np.asarray(WINDOWS, np.int32)
    attend = functools.partial(traced, implementation=implementation)
    found = jax.jit(lambda x: derivatives(lambda x: layers(attend, x, windows), x))(qkv)
    wanted = jax.jit(lambda x: derivatives(lambda x: layers(dense, x, windows), x))(qkv)
    close(jax.tree.leaves(found), jax.tree.leaves(wanted))


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (lambda n: (n, 2), (3, 2)),
        (lambda n: (None, n), (None, 3)),
        (lambda n: n, 3),
        (lambda n: jnp.stack([n, n + 1]), (3, 4)),
    ],
    ids=["left", "right", "both", "pair"],
)
def test_forms_of_a_window(given, known):
    """A side that is taken for the other, or for both."""
    qkv = arrays()
    attend = functools.partial(ea.attention, *qkv)
    found = jax.jit(lambda n: attend(local_window_size=given(n)))(jnp.int32(3))
    close(found, attend(local_window_size=known))


def test_sizes_are_one_program():
    """A window that compiles a program for each of its values."""
    traces = []

    @jax.jit
    def run(qkv, window):
        traces.append(window)
        return traced(*qkv, window)

    qkv = arrays()
    for window in WINDOWS:
        close(run(qkv, jnp.int32(window)), dense(*qkv, window))
    assert len(traces) == 1


def test_only_the_window_is_read():
    """Work that does not shrink with the window: a loop over all blocks of keys, with a mask."""
    qkv = tuple(jnp.ones((1, 4096, 1, 8), "float32") for _ in range(3))

    @jax.jit
    def read(window):
        call = call_of(*qkv, local_window_size=(window, 0))
        blocks = BlockedOperands(call.operands, call.settings)
        assert (blocks.grid.queries, blocks.grid.keys) == (512, 512)
        meet = jax.vmap(jax.vmap(lambda i, j: blocks.meet(Index(0, i, j)), (0, None)), (None, 0))
        return meet(jnp.arange(8), jnp.arange(8)).sum()

    # those on and below the diagonal, and two in a row
    assert [int(read(jnp.int32(window))) for window in (4096, 100)] == [36, 15]


@pytest.mark.parametrize("most", [None, 4])
def test_over_a_mesh(most):
    """A halo that is shorter than the window, or all keys that are sent in spite of a bound."""
    qkv = arrays()
    options = {"parallel": SequenceParallel("device", method="ring"), "max_window": most}

    def found(window, qkv):
        return derivatives(lambda x: traced(*x, window, **options), qkv)

    with jax.set_mesh(mesh_of("8")):
        result = jax.jit(found)(jnp.int32(3), qkv)
        spec = jax.P(None, "device")
        placed = jax.tree.map(
            lambda x: jax.device_put(x, jax.NamedSharding(mesh_of("8"), spec)), qkv
        )
        program = (
            jax.jit(lambda n, x: traced(*x, n, **options)).lower(jnp.int32(3), placed).compile()
        )
    close(jax.tree.leaves(result), jax.tree.leaves(derivatives(lambda x: dense(*x, 3), qkv)))
    sent = sum(x.bytes * x.count for x in collectives(program) if x.kind == "collective-permute")
    one_token = 2 * 2 * 2 * 4 * 8  # keys and values of a token, in a batch of two
    assert sent == one_token * (4 if most else T - T // 8)


def test_a_bound_hides_what_is_outside():
    """A traced window that sees farther than what was sent, or than slots that a ring of a cache keeps."""
    qkv = arrays()
    close(traced(*qkv, jnp.int32(20), max_window=(4, None)), dense(*qkv, 4))
    _, key, value = qkv
    cache = KVCache.empty(2, 8, 2, 4, window=5, dtype=jnp.float64)
    for i in range(T):
        cache = cache.append(key[:, i : i + 1], value[:, i : i + 1])
    attend = jax.jit(lambda n: cache.attend(qkv[0][:, -1:], local_window_size=(n, 0)).out)
    for window in (2, 5, 7):
        close(attend(jnp.int32(window)), dense(*qkv, min(window, 5))[:, -1:])


def test_the_registry_says_who_takes_it():
    """A kernel of a vendor that ignores the window."""
    x = jnp.ones((2, 96, 2, 16), jnp.bfloat16)
    call = call_of(x, x, x, mask=masks.TracedWindow(3, 0))
    for platform, chosen in (("cpu", "blockwise"), ("tpu", "pallas_tpu"), ("cuda", "pallas_gpu")):
        found = explain(tried(), call.settings, call.operands, platform)
        assert found.name == chosen, found
        declined = dict(found.declined)
        assert all("mask" in declined[x] for x in ("cudnn", "splash") if x in declined), declined


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")  # of Equinox
def test_an_energy_has_static_sides(unchecked):
    """An array that is a static field, compared by `==` where a program is looked up."""
    with pytest.raises(TypeError, match=r"got int32\[\]; masks.TracedWindow\(left, right\) takes"):
        ea.FreeEnergy(local_window_size=np.asarray(3, np.int32))
    energy = ea.FreeEnergy(mask=masks.TracedWindow(3, 0), max_window=4)
    close(energy.attention(*arrays()), dense(*arrays(), 3))
