"""The rules of programs for TPUs and GPUs, interpreted: values, and bits that do not depend on the other rows.

That nothing else in such programs rounds, and that a tile is the same text in all, tests/tpu and tests/cuda show.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from energy_attn.kernels.dispatch import _tile_program
from energy_attn.kernels.internal import platform_here
from energy_attn.kernels.pallas.tile_program._evaluated import chip_for, evaluated, narrowed
from tests.support.arrays import array
from tests.support.compare import close, of_sums, same
from tests.support.llama import CONFIG, GPT_OSS, build
from tests.support.selection import few, few_rows

CHIPS = {x: chip_for(x, interpret=x != platform_here()) for x in ("cuda", "tpu")}
platforms = pytest.mark.parametrize("platform", CHIPS)
ROWS, WIDTH, GROUPS = 70, 300, 4
_RNG = np.random.default_rng(0)
X = _RNG.standard_normal((ROWS, WIDTH))
WEIGHT = _RNG.standard_normal((GROUPS, 50, WIDTH))
TOKENS = _RNG.integers(0, 9, ROWS).astype(np.int32)  # of which many are the same
SIZES = np.array([10, 0, 33, 20], np.int32)  # the last rows are of no group
TO_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


def ragged(x, weight):
    return lax.ragged_dot_general(x, weight, array(SIZES), TO_GROUPS)


def gradient_of(f, index):
    """The gradient of the sum of squares of `f`, of one of its arguments."""
    return lambda *x: jax.grad(lambda *x: (f(*x) ** 2).sum(), index)(*x)


FUNCTIONS = {
    "softmax": lambda x, w: jax.nn.softmax(x),
    "norm": lambda x, w: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) + x,
    "gelu": lambda x, w: jax.nn.gelu(x),
    "silu": lambda x, w: jax.nn.silu(x),
    "angles": lambda x, w: jnp.sin(x) + jnp.cos(x) ** 3,
    "cumulative": lambda x, w: jnp.cumsum(x, 1) + lax.cumsum(x, 0, reverse=True),
    "embedding": gradient_of(lambda x, w: x[array(TOKENS)], 0),
    "chosen": gradient_of(lambda x, w: jnp.take_along_axis(x, array(TOKENS)[:, None], 1), 0),
    "nothing": lambda x, w: x[:0].sum(0)[None] + x[:, :0] @ w[0, :, :0].T[:, :1],
    "map": lambda x, w: x @ w[0].T,
    "gradient of a map": gradient_of(lambda x, w: x @ w[0].T, 1),
    "groups": ragged,
    "gradient of groups": gradient_of(ragged, 1),
    "gradient of rows of groups": gradient_of(ragged, 0),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def by_rules(platform, f, *arrays):
    program = jax.make_jaxpr(f)(*arrays)
    return evaluated(program.jaxpr, program.consts, arrays, platform, CHIPS[platform])[0]


@pytest.mark.parametrize(
    ("platform", "name"), few_rows([(x, y) for y in FUNCTIONS for x in CHIPS], 2)
)
def test_values(platform, name):
    """A wrong sum, product or rule, in float32 and beside float64."""
    f, size = FUNCTIONS[name], 1e4 if name == "angles" else 1
    given = [array(x.astype(np.float32)) for x in (size * X, WEIGHT)]
    wanted = np.asarray(f(*(x.astype(jnp.float64) for x in given)))
    close(by_rules(platform, f, *given), wanted.astype(np.float32), tolerance=2e-6)


@platforms
@pytest.mark.parametrize(
    "kinds", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")]
)
@pytest.mark.parametrize("sizes", [(1, 7, 3), (5, 48, 72), (70, 1100, 517)])
def test_products(platform, kinds, sizes):
    """Edges of tiles, numbers of two types, and a row whose bits depend on how many there are."""
    rows, depth, columns = sizes
    rng = np.random.default_rng(1)
    a, b = (
        jnp.asarray(rng.standard_normal(x), kind)
        for x, kind in zip(((rows, depth), (columns, depth)), kinds, strict=True)
    )
    product = CHIPS[platform].product
    found = product(a, b, True)
    a_wide, b_wide = np.float64(a), np.float64(b)
    wanted = (a_wide @ b_wide.T).astype(np.float32)
    tolerance = of_sums(depth, np.abs(a_wide) @ np.abs(b_wide).T, wanted)
    close(found, wanted, tolerance=tolerance)
    close(product(a, b.T, False), wanted, tolerance=tolerance)
    same(product(a[:1], b, True), found[:1])


@platforms
def test_what_is_not_finite(platform):
    """A number that makes sums before it, or of other products, NaN."""
    x = np.zeros((4, 300), np.float32)
    x[0, 200], x[1, 7], x[2, 130], x[2, 140], x[3] = np.inf, -np.inf, -np.inf, np.inf, 1
    x[3, 150] = np.nan
    found = by_rules(platform, lambda x: jnp.cumsum(x, 1), array(x))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found, np.cumsum(x, 1))
    # parts of float32 that are 0, beside an infinity
    numbers = jnp.asarray([[np.inf], [-np.inf], [np.nan]], jnp.bfloat16)
    for one in 1.0, 1 / 3:
        found = CHIPS[platform].product(numbers, jnp.full((1, 1), one, jnp.float32), True)
        np.testing.assert_array_equal(found, np.float32(numbers) * np.float32(one))


@platforms
def test_thirds(platform):
    """A bit of a number of float32 that its three parts lose, or a NaN that they make of an infinity."""
    rng = np.random.default_rng(1)
    # parts of smaller ones are flushed
    x = rng.standard_normal((60, 8)) * 10.0 ** rng.uniform(-30, 38, (60, 8))
    x = jnp.asarray(np.clip(x, -3.4e38, 3.4e38), jnp.float32)
    product, one = CHIPS[platform].product, jnp.eye(8, dtype=jnp.bfloat16)
    same(product(x, one, True), x)
    same(product(one, x, True), x.T)
    for number in np.inf, -np.inf, np.nan:
        found = product(jnp.full((1, 1), number, jnp.float32), jnp.ones((1, 1), jnp.bfloat16), True)
        np.testing.assert_array_equal(found, number)


@platforms
def test_sums_of_rows(platform):
    """A sum whose order depends on how many rows there are."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((129, 1300)), jnp.float32)
    found = CHIPS[platform].sums(x)
    close(found, np.float64(x).sum(1).astype(np.float32), tolerance=1e-6)
    for rows in 1, 9, 128:
        same(CHIPS[platform].sums(x[:rows]), found[:rows])


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_rounding(kind):
    """A number that is rounded otherwise than XLA's conversion does it: ties, small and large ones, signs of zeros."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(20000) * 10.0 ** rng.uniform(-10, 6, 20000)).astype(np.float32)
    ends = [0.0, -0.0, np.inf, -np.inf, 65519.0, 65520.0, -6e-8, 3e-8, 2.0**-14, 1 + 2.0**-8, 1e-39]
    x = jnp.asarray(np.concatenate([x, np.asarray(ends, np.float32)]))
    found, wanted = (
        np.asarray(y).view(np.uint16)
        for y in (jax.jit(narrowed, static_argnums=1)(x, kind), x.astype(kind))
    )
    np.testing.assert_array_equal(found, wanted)
    assert np.isnan(narrowed(jnp.float32(np.nan), kind))


@pytest.mark.parametrize(
    ("f", "what"),
    [
        (lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x), "got while"),
        (lambda x: lax.erfc(x), "got erfc"),
        (lambda x: jnp.einsum("bi,bi->b", x, x), "got one over batch axes"),
        (lambda x: x.astype(jnp.float64) + 1, "got add of float64"),
        (lambda x: jnp.abs(lax.complex(x, x)), "got complex of complex64"),
        (lambda x: x.astype(jnp.float8_e4m3fn), "got convert_element_type of float8"),
    ],
)
def test_declined(f, what):
    """An operation whose order is XLA's, which it may choose by timing."""
    with pytest.raises(NotImplementedError, match=f"reproducible: wanted .*{what}"):
        jax.eval_shape(functools.partial(by_rules, "cuda", f), jnp.ones((2, 3), jnp.float32))


@pytest.fixture
def on_chip(monkeypatch, request):
    """Decoders computed by the rules for a chip, on CPUs."""

    def rules(*program):
        return evaluated(*program, request.param, CHIPS[request.param])

    monkeypatch.setattr(_tile_program.cpu, "evaluated", rules)


@pytest.mark.parametrize("on_chip", few([*CHIPS], "tpu"), indirect=True)
@pytest.mark.parametrize("config", few([CONFIG, GPT_OSS], GPT_OSS), ids=["llama", "gpt_oss"])
def test_decoders(on_chip, config):
    """A rule that a layer needs, or its derivative, and a wrong one."""
    model = build(config, jnp.float32, scale=0.3)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 40, (2, 70)), jnp.int32)

    @functools.partial(jax.jit, static_argnums=2)
    def both(model, tokens, reproducible):
        def loss(model):
            return model.log_probs(tokens, reproducible=reproducible).mean()

        return jax.value_and_grad(loss)(model)

    with jax.default_matmul_precision("highest"):  # GPUs multiply in TF32 by default
        found, wanted = (jax.tree.map(np.asarray, both(model, tokens, x)) for x in (True, False))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close(x / np.abs(y).max(), y / np.abs(y).max(), tolerance=2e-5)
