"""The canonical fold compared with the tree written out, and the layout that it asks for."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from energy_attn import attention
from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import canonical_tree as tree
from tests.support.meshes import in_parts, mesh_of


def join(a, b):
    """Neither associative nor commutative."""
    return 0.7 * a + 0.3 * b


def written_out(items: dict, level: int, index: int = 0):
    """The node of a level, None if it has no items."""
    some = {n: x for n, x in items.items() if n >> level == index}
    if level == 0 or not some:
        return some.get(index)
    left, right = (written_out(some, level - 1, 2 * index + i) for i in (0, 1))
    return left if right is None else right if left is None else join(left, right)


def test_fold():
    """Another tree where numbers have gaps, begin anywhere or cross a power of two; a node that overwrites another."""
    rng = np.random.default_rng(0)

    @jax.jit
    def found(numbers, values, present):
        depth = tree.depth_of(20)
        fold = tree.start(jnp.float64(0), depth, numbers[present.argmax()])
        for number, value, here in zip(numbers, values, present, strict=True):
            more = tree.insert(fold, number, value, join)
            fold = jax.tree.map(lambda x, y, here=here: jnp.where(here, x, y), more, fold)
        return tree.result(fold, join)

    for first in (0, 1, 13, 1000, 1023, 2**23 - 7):
        numbers, values = np.arange(first, first + 20, dtype=np.int32), rng.standard_normal(20)
        for present in (np.full(20, True), rng.random(20) < 0.5, rng.random(20) < 0.15):
            items = {int(n): x for n, x in zip(numbers[present], values[present], strict=True)}
            wanted = written_out(items, 24) if items else 0.0
            np.testing.assert_allclose(found(numbers, values, present), wanted, rtol=1e-13)


def test_as_written_is_the_identity():
    """A missing or wrong rule of the wish for a layout: of either mode, of both, under `jax.vmap`."""
    x, change = np.random.default_rng(0).standard_normal((2, 3, 4))

    def f(x):
        return tree.as_written(x) ** 3

    def second(x):
        return jax.jvp(jax.grad(lambda x: f(x).sum()), (x,), (jnp.asarray(change[0]),))[1]

    found = jax.jit(jax.vmap(second))(x)
    np.testing.assert_allclose(found, 6 * x * change[0], rtol=1e-14)
    np.testing.assert_array_equal(jax.jvp(f, (x,), (change,))[1], 3 * x**2 * change)


def test_as_written_is_not_serialised(monkeypatch):
    """A program of a ring for TPUs that JAX refuses to export, as its queries or heads are computed in parts."""
    in_parts(monkeypatch)
    query, key = (jax.ShapeDtypeStruct((1, 576, n, 128), jnp.bfloat16) for n in (4, 2))

    def loss(*arrays):
        parallel = SequenceParallel("device", "ring")
        return attention(*arrays, is_causal=True, parallel=parallel).sum()

    with jax.set_mesh(mesh_of("8")):
        train = jax.jit(jax.grad(loss, (0, 1, 2)))
        program = jax.export.export(train, platforms=("tpu",))(query, key, key)
    assert "tpu_custom_call" in program.mlir_module()
