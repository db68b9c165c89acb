"""Programs compiled for TPUs that are not there, and what libtpu lists of them.

libtpu reads its flags once, so that listings are made by a program of its own:

    python -m tests.support.tpu schedule CHIP ...
    python -m tests.support.tpu tiles CHIP ...

`schedule` prints for each chip the bundles of a step of the forward kernel, for 512 x 1024 pairs of a row and a key, in
blocks for the smallest chip and in blocks for this one. A bundle is the instructions of one cycle.

`tiles` prints for each chip, and for each of some calls of different lengths and batches, how often each floating-point
vector instruction occurs in each canonical kernel.
"""

import collections
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from energy_attn.cli._ahead import ALONE as ALONE
from energy_attn.kernels import AttentionState, local_attention
from energy_attn.kernels.pallas.canonical._kernel import CanonicalTPU
from energy_attn.kernels.pallas.tpu._kernel import LAYOUT_SIZES, PallasTPU
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


LABEL = re.compile(r"\s*(0x[0-9a-f]+|0) +([A-Z][A-Z])?:? *:? ", re.ASCII)
BLOCK = re.compile(r"The window shape is bf16\[[\d,]*?(\d+),128\]")


def longest_region(text):
    """The bundles between two labels of a listing, where they are most: a step without a mask."""
    lines = [found for found in map(LABEL.match, text.splitlines()) if found]
    starts = [int(x[1], 16) for x in lines if x[2]] + [int(lines[-1][1], 16) + 1]
    return max(stop - start for start, stop in itertools.pairwise(starts))


def bundles(chip, kernel, folder):
    """The bundles of a step without a mask."""
    run = functools.partial(local_attention, implementation=kernel)
    compiled(chip, run, *operands(8192, 8192, 4, 2), kernels=1)
    (listing,) = (
        x for x in folder.glob("*attention_forward*final_bundles.txt") if "analysis" not in x.name
    )
    text = listing.read_text(encoding="utf-8")
    for path in folder.iterdir():
        path.unlink()
    keys = max(map(int, BLOCK.findall(text)))  # of which there are more than rows in a block
    return longest_region(text) * 1024 // keys


def with_listings(run: Callable[[Path], Any]) -> Any:
    """`run(folder)`, of programs whose instructions libtpu lists in the folder; the first that is compiled."""
    with tempfile.TemporaryDirectory() as name:
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={name} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=final_bundles"
        )
        return run(Path(name))


def listed(what: str, *chips: str) -> Any:
    """The result of this module as a program, by chip."""
    command = [sys.executable, "-m", __name__, what, *chips]
    # libtpu ends a process with flags that it does not know
    variables = os.environ | ALONE | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def schedule(chip: str, folder: Path) -> list[int]:
    """The bundles of the kernel with each layout."""
    return [bundles(chip, kernel, folder) for kernel in (PallasTPU(LAYOUT_SIZES), PallasTPU())]


CALLS = (2, 1000, 1000), (1, 1, 7777), (1, 3000, 400)  # batch, queries, keys
INSTRUCTION = re.compile(
    r"\b(v[a-z0-9]+\.[a-z0-9.]*(?:f32|bf16)[a-z0-9.]*|vmat\w+[.\w]*|vpop\.erf)\b"
)
KERNEL = re.compile(r"attention_canonical_(\w+?)\.\d+-")


def derivatives(query, key, value):
    """The state of causal attention, its gradients and a tangent."""
    run = functools.partial(local_attention, is_causal=True, implementation=CanonicalTPU())
    state, back = jax.vjp(run, query, key, value)
    moved = jax.jvp(run, (query, key, value), (query, key, value))
    return state, back(AttentionState(state.out, state.lse)), moved


def tiles(chip: str, folder: Path) -> list[dict[str, dict[str, int]]]:
    """How often each vector instruction occurs, by call and kernel."""
    found = []
    for batch, queries, keys in CALLS:
        shapes = [("bfloat16", batch, n, k, 128) for n, k in ((queries, 4), (keys, 2), (keys, 2))]
        compiled(chip, derivatives, *shapes, kernels=4)
        listings = [x for x in folder.glob("*final_bundles.txt") if "analysis" not in x.name]
        found.append(
            {
                KERNEL.search(x.name)[1]: collections.Counter(INSTRUCTION.findall(x.read_text()))
                for x in listings
                if KERNEL.search(x.name)
            }
        )
        for path in folder.iterdir():
            path.unlink()
    return found


if __name__ == "__main__":
    command, *chips = sys.argv[1:]
    print_of = {"schedule": schedule, "tiles": tiles}[command]
    print(json.dumps(with_listings(lambda folder: {x: print_of(x, folder) for x in chips})))
