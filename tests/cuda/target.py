"""Clusters of H200 to compile for, ahead of time, without GPU or driver."""

import functools
import importlib.util
import os
from pathlib import Path

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh


@functools.cache
def toolkit() -> Path:
    """Where CUDA's compiler lies; also tells the plugin, which reads its flags when it is loaded."""
    # as the packages for CUDA 12 and those for CUDA 13 have it
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
def nodes(number: int, devices: int) -> Mesh:
    """So many nodes of so many GPUs, along the axes "node" and "device"."""
    toolkit()
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology=f"{number}x1x{devices}",
        target_config=Path(__file__).with_name("h200.txtpb").read_text(),
    )
    return Mesh(np.array(described.devices).reshape(number, devices), ("node", "device"))
