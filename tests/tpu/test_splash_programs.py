"""JAX's splash kernels as the adapter calls them, compiled ahead of time for real chips: only libtpu is needed."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.kernels import AttentionState, local_attention
from tests.support.selection import few_rows
from tests.support.tpu import compiled, devices, every_chip, operands, temporary

ROWS = 8192
pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("user_settings")]
attention = functools.partial(local_attention, implementation="splash", is_causal=True)


def both_gradients(query, key, value, **options):
    state, back = jax.vjp(functools.partial(attention, **options), query, key, value)
    return state, back(AttentionState(state.out, state.lse))


@pytest.mark.parametrize(("heads", "kv_heads", "width"), few_rows([(32, 8, 64), (8, 2, 256)]))
@every_chip
def test_gradients(chip, heads, kv_heads, width):
    """Blocks that do not fit a chip, or more memory than copies with the heads in front."""
    shapes = operands(ROWS, ROWS, heads, kv_heads, width)
    program = compiled(chip, both_gradients, *shapes, kernels=3)
    # q, k, v, out, dout and three gradients, of 128 lanes each at least; energies in 128 lanes; and
    # out once more, where it is checked for NaN
    elements = ROWS * max(width, 128) * (4 * heads + 4 * kv_heads)
    assert temporary(program) <= 2 * elements + 4 * 128 * heads * ROWS + 2**26


@every_chip
def test_segments(chip):
    """Ids of segments in a layout that the compiler declines; lengths become such ids."""

    def run(ids, *arrays):
        return both_gradients(*arrays, query_segment_ids=ids, key_segment_ids=ids)

    ids = "int32", 1, ROWS
    compiled(chip, run, ids, *operands(ROWS, ROWS, 8, 2, 64), kernels=3)


@every_chip
def test_window(chip):
    """The smaller grid of a window, whose masks are cut differently."""
    run = functools.partial(attention, local_window_size=(1000, 0), scale=0.125)
    compiled(chip, run, *operands(ROWS, ROWS, 16, 16, 128), kernels=1)


def test_in_shard_map():
    """Results whose types lack the mesh axes they vary over, which JAX wants there."""
    mesh = Mesh(devices("v5e"), ("x",))
    spec = P("x")
    run = jax.shard_map(
        both_gradients, mesh=mesh, in_specs=spec, out_specs=(AttentionState(spec, spec), spec)
    )
    arrays = [
        jax.ShapeDtypeStruct((4, 1024, n, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for n in (4, 2, 2)
    ]
    text = jax.jit(run).lower(*arrays).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
