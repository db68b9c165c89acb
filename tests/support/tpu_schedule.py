"""The schedule that libtpu makes of the forward kernel; a program of its own, since libtpu reads its flags once.

    python -m tests.support.tpu_schedule CHIP ...

Prints for each chip the bundles of a step, for 512 x 1024 pairs of a row and a key, in blocks for the smallest chip and
in those for this one. A bundle is the instructions of one cycle.
"""

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

from energy_attn.kernels import local_attention
from energy_attn.kernels.pallas.tpu._kernel import LAYOUT_SIZES, PallasTPU
from tests.support.tpu import compiled, operands

ALONE = {  # libtpu looks for no TPU and no metadata server, and loads beside another process that has it
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",  # libtpu ends a process with flags that it does not know
}
LABEL = re.compile(r"\s*(0x[0-9a-f]+|0) +([A-Z][A-Z])?:? *:? ", re.ASCII)
BLOCK = re.compile(r"The window shape is bf16\[[\d,]*?(\d+),128\]")


def longest_region(text):
    """The bundles between two labels of a listing, where they are most: a step without a mask."""
    lines = [found for found in map(LABEL.match, text.splitlines()) if found]
    starts = [int(x[1], 16) for x in lines if x[2]] + [int(lines[-1][1], 16) + 1]
    return max(stop - start for start, stop in itertools.pairwise(starts))


def bundles(chip, kernel, folder):
    """Those of a step without a mask."""
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


def alone(module: str, *chips: str) -> Any:
    """What such a program prints of chips."""
    command = [sys.executable, "-m", module, *chips]
    done = subprocess.run(
        command, env=os.environ | ALONE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def main(folder: Path) -> dict[str, list[int]]:
    """The bundles of each chip."""
    kernels = PallasTPU(LAYOUT_SIZES), PallasTPU()
    return {chip: [bundles(chip, kernel, folder) for kernel in kernels] for chip in sys.argv[1:]}


if __name__ == "__main__":
    print(json.dumps(with_listings(main)))
