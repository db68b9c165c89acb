"""Clusters of GPUs to compile for without a GPU or driver, and the machine code of kernels."""

import functools
import importlib.util
import os
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh


@functools.cache
def toolkit() -> Path:
    """The folder of CUDA's compiler, which also goes into the flags that the plugin reads when it is loaded."""
    # in the packages for CUDA 12 and in those for CUDA 13
    places = [
        Path(root, part)
        for root in importlib.util.find_spec("nvidia").submodule_search_locations
        for part in ("cuda_nvcc", "cu13")
    ]
    folder = next(place for place in places if (place / "bin" / "ptxas").is_file())
    os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"  # ptxas
    # there is no GPU to time kernels on
    os.environ["XLA_FLAGS"] += f" --xla_gpu_cuda_data_dir={folder} --xla_gpu_autotune_level=0"
    return folder


@functools.cache
def nodes(number: int, devices: int, capability: tuple[int, int] = (9, 0)) -> Mesh:
    """A mesh of nodes and GPUs, with the axes "node" and "device".

    GPUs of another compute capability differ from an H200 in nothing else: only what a capability decides is seen in
    programs for them.
    """
    toolkit()
    text = Path(__file__).with_name("h200.txtpb").read_text()
    major, minor = capability
    said = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
    text = text.replace("cuda_compute_capability { major: 9 }", said)
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"{number}x1x{devices}", target_config=text
    )
    return Mesh(np.array(described.devices).reshape(number, devices), ("node", "device"))


# bytes of an instruction since compute capability 7.0; its first 12 bits are the operation
SIZE = 16
# operations in code for compute capability 9.0: a branch, and products of warp groups and of warps
BRANCH, PRODUCTS = 0x947, (0x9F0, 0x23C)


class Kernel(NamedTuple):
    """One kernel, assembled.

    Attributes:
        ptx: its code before CUDA's assembler.
        registers: those of a thread, at most 255.
        spilled: bytes of a thread that are kept in memory, for want of registers.
        shared: bytes of shared memory of a program.
        steps: the instructions of each innermost loop with products of matrices.
    """

    ptx: str
    registers: int
    spilled: int
    shared: int
    steps: tuple[int, ...]

    @property
    def waits(self) -> tuple[int, ...]:
        """How many groups of copies may be on their way while a step waits for its own, loop by loop.

        The second of two waits, behind a loop, is for all.
        """
        return tuple(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", self.ptx)))[::2]


def entries(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """The code before CUDA's assembler of kernels in a folder whose names match, with the group of the match."""
    for file in folder.glob("*.ptx"):
        for entry in re.split(r"(?=\.visible \.entry )", file.read_text())[1:]:
            if found := re.match(rf"\.visible \.entry {name}\(", entry):
                yield found[1], entry


def assembled(folder: Path) -> dict[str, Kernel]:
    """The library's kernels among the code that XLA has written to a folder, by name."""
    found = {}
    for file in folder.glob("*.ptx"):
        code = {
            re.match(r"\.visible \.entry (\w+)\(", entry)[1]: entry
            for entry in re.split(r"(?=\.visible \.entry )", file.read_text())[1:]
        }
        if not any(name.startswith("attention") for name in code):
            continue
        said = allocated(file)
        sections = dict(_sections(file.with_suffix(".cubin").read_bytes()))
        for name, spilled, registers in said:
            steps = tuple(_loops(sections[f".text.{name}"]))
            sizes = code[name], int(registers), int(spilled), _shared(folder, name)
            found[name] = Kernel(*sizes, steps)
    return {name: kernel for name, kernel in found.items() if name.startswith("attention")}


def allocated(file: Path) -> list[tuple[str, str, str]]:
    """The name of each kernel of a file of PTX, which is assembled beside it, its spilled bytes and its registers."""
    binary = file.with_suffix(".cubin")
    command = [toolkit() / "bin" / "ptxas", "-v", "--gpu-name=sm_90a", "-o", binary, file]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return re.findall(
        r"entry function '(\w+)'.*\n.*\n.* (\d+) bytes spill stores.*\n.*Used (\d+) registers",
        report,
    )


def _shared(folder: Path, name: str) -> int:
    """Bytes of shared memory, by the last of the programs that Triton's passes write."""
    (file,) = folder.glob(f"*.{name}.triton-to-llvm.txt")
    return int(re.findall(r"ttg\.shared = (\d+)", file.read_text())[-1])


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    count, names = struct.unpack_from("<HH", elf, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + 64 * i) for i in range(count)]
    for name, kind, _, _, start, size in headers:
        place = headers[names][4] + name
        empty = kind == 8  # takes no place in the file
        yield elf[place : elf.index(b"\0", place)].decode(), b"" if empty else elf[start:][:size]


def _loops(code: bytes) -> Iterator[int]:
    """The lengths of loops: from a branch back to its target."""
    words = [int.from_bytes(code[i : i + SIZE], "little") for i in range(0, len(code), SIZE)]
    for place, word in enumerate(words):
        if word & 0xFFF != BRANCH:
            continue
        high = word >> 34 & (1 << 48) - 1  # a signed distance in units of 4 bytes, in two parts
        distance = ((high - (high >> 47 << 48)) << 8 | word >> 16 & 0xFF) // 4
        target = place + 1 + distance
        inside = words[target : place + 1]
        if any(x & 0xFFF in PRODUCTS for x in inside):
            yield len(inside)
