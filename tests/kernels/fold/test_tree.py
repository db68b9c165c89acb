"""The canonical fold, beside the tree written out."""

import jax
import jax.numpy as jnp
import numpy as np

from energy_attn.kernels.fold import _tree as tree


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
