"""Clusters of H200, or of GPUs of another capability, to compile for, ahead of time, without GPU or driver."""

import functools
import importlib.util
import os
from pathlib import Path

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
