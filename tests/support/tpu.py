"""Programs compiled for TPUs that are not there."""

import re

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from energy_attn.cli._ahead import ALONE as ALONE
from tests.support.selection import few

CHIPS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}


# The others take turns: a kernel is lowered alike for all, in blocks of other sizes.
every_chip = pytest.mark.parametrize("chip", few(list(CHIPS), "v6e"))


def devices(chip):
    return topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices


def compiled(chip, f, *shapes, kernels):
    """The program of `f` for arrays of `(dtype, *shape)`, which must contain that many `kernels`."""
    where = SingleDeviceSharding(devices(chip)[0])
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for dtype, *shape in shapes]
    lowered = jax.jit(f).lower(*arrays)
    assert lowered.as_text().count("tpu_custom_call") == kernels
    return lowered.compile()


def operands(queries, keys, heads, kv_heads, width=128, value_width=None, dtype="bfloat16"):
    value_width = value_width or width
    return [
        (dtype, 1, queries, heads, width),
        (dtype, 1, keys, kv_heads, width),
        (dtype, 1, keys, kv_heads, value_width),
    ]


def temporary(program):
    """Bytes of memory that a program uses beside its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def kernels_memory(program):
    """Bytes of a core's memory that each kernel of a program was granted, and that it uses."""
    granted = "scoped_memory_configs"
    lines = [x for x in program.as_text().splitlines() if '"tpu_custom_call"' in x]
    size = r'"{}":\[{{[^}}]*"size":"(\d+)"'
    return [
        tuple(int(re.search(size.format(name), line)[1]) for name in (granted, f"used_{granted}"))
        for line in lines
    ]
