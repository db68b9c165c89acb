"""Derivatives that JAX's own kernels of attention have, by lowering them: the table of `docs/second_order.md`."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

import energy_attn as ea
from tests.support.flags import ROOT

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of JAX 0.12, which names tokamax
    from jax.experimental.pallas.ops.gpu import attention as gpu

COLUMNS = ["grad", "jvp", "rev∘rev", "fwd∘rev", "rev∘fwd", "fwd∘fwd"]
TABLE = re.compile(r"^\|  \| grad \| jvp .*?\n\n", re.M | re.S)


def rows():
    """The cells of each row of the page's table, by its first cell."""
    (table,) = TABLE.findall((ROOT / "docs" / "second_order.md").read_text(encoding="utf-8"))
    lines = [[x.strip() for x in line.split("|")[1:-1]] for line in table.strip().splitlines()]
    assert lines[0][1:] == COLUMNS
    return {line[0].strip("`"): line[1:] for line in lines[2:]}


def of_splash(query, key, value):
    both = splash_masks.MultiHeadMask([splash_masks.CausalMask((256, 256))] * 2)
    kernel = splash.make_splash_mha(mask=both, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (query, key, value)))


def of_flash(query, key, value):
    return flash.flash_attention(*(x.swapaxes(1, 2) for x in (query, key, value)))


JAX_NN = jax.nn.dot_product_attention
KERNELS = {
    "jax.nn, by XLA": (JAX_NN, "cpu"),
    "jax.nn, cudnn": (functools.partial(JAX_NN, implementation="cudnn"), "cuda"),
    "splash_attention": (of_splash, "tpu"),
    "pallas.ops.tpu.flash_attention": (of_flash, "tpu"),
    "pallas.ops.gpu.attention": (functools.partial(gpu.mha, segment_ids=None), "cuda"),
    "energy_attn": (ea.attention, "cpu"),
}


def modes(f):
    """The derivatives of `f` in the order of `COLUMNS`."""

    def gradient(f):
        return jax.grad(lambda *x: jnp.sin(f(*x).astype(jnp.float32)).sum(), (0, 1, 2))

    def tangent(f):
        return lambda *x: jax.jvp(f, x, x)[1]

    again = lambda *x: jax.vjp(gradient(f), *x)[1](x)  # noqa: E731
    first = gradient(f), tangent(f)
    return [*first, again, tangent(first[0]), gradient(first[1]), tangent(first[1])]


def judged(derivative, platform):
    """`yes` if the derivative is lowered, `dense` if it has an array of all scores, `raises` if neither."""
    short, long = (jax.ShapeDtypeStruct((1, x, 2, 128), jnp.bfloat16) for x in (256, 4096))
    try:
        jax.jit(derivative).trace(short, short, short).lower(lowering_platforms=(platform,))
    except (TypeError, ValueError, AssertionError, NotImplementedError):
        return "raises"
    if platform != "cpu":
        return "yes"
    return "dense" if "4096,4096]" in str(jax.make_jaxpr(derivative)(*(long,) * 3)) else "yes"


@pytest.fixture
def as_on_hopper(monkeypatch):
    """cuDNN's checks pass, which ask the machine for it."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    for name, found in (("check_cudnn_version", 91000), ("check_compute_capability", True)):
        monkeypatch.setattr(fused, name, lambda *_, found=found: found)


@pytest.mark.usefixtures("as_on_hopper", "user_settings")
@pytest.mark.parametrize("name", KERNELS)
def test_table(name):
    """A library that the page says raises, and does not, or has derivatives that the page denies."""
    if f"jax {jax.__version__}" not in (ROOT / "docs" / "second_order.md").read_text():
        pytest.skip("the page names another JAX")
    attend, platform = KERNELS[name]
    assert rows()[name] == [judged(x, platform) for x in modes(attend)]


@pytest.mark.usefixtures("user_settings")
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("kind", range(6), ids=COLUMNS)
@pytest.mark.full
def test_ours_on_other_platforms(kind, platform):
    """A derivative of any kind that a GPU or a TPU does not get."""
    assert judged(modes(ea.attention)[kind], platform) == "yes"


def test_all_rows():
    """A row that no test judges."""
    assert set(rows()) == set(KERNELS)
