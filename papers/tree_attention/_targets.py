"""Targets of ahead-of-time compilation: TPU slices with libtpu, GPUs with CUDA's compiler."""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jax.experimental import topologies

from energy_attn.distributed import cost

ROOT = Path(__file__).resolve().parents[2]


class Target(NamedTuple):
    """Devices to compile for.

    Attributes:
        name: for display.
        memory: bytes of a device, as published.
        topology: the network, for the cost model.
        describe: returns the devices as JAX describes them.
    """

    name: str
    memory: float
    topology: cost.Topology
    describe: Callable[[], list[Any]]


def tpu(chip: str, shape: str, memory: float) -> Target:
    """A TPU slice of a shape such as 2x2x2."""
    name = f"{chip}:{shape}"

    def describe() -> list[Any]:
        # so that libtpu looks for no TPU and no metadata server, and keeps no logs
        os.environ.update(
            TPU_WORKER_HOSTNAMES="localhost",
            TPU_ACCELERATOR_TYPE="v5litepod-4",
            TPU_LOG_DIR="disabled",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        )
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices

    chips = math.prod(map(int, shape.split("x")))
    return Target(f"TPU {name}", memory, cost.topology(f"tpu_{chip}", (chips,)), describe)


def _gpus(name: str, memory: float, topology: cost.Topology, config: Path) -> Target:
    def describe() -> list[Any]:
        sys.path.append(str(ROOT))
        os.environ.setdefault("XLA_FLAGS", "")
        from tests.support.cuda import toolkit

        toolkit()
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology=f"1x1x{topology.devices}",
            target_config=config.read_text(),
        ).devices

    return Target(f"{topology.devices}x {name}", memory, topology, describe)


H200 = _gpus("H200", 141e9, cost.topology("dgx_h200", (8,)), ROOT / "tests/support/h200.txtpb")
RTX_4090 = _gpus(
    "RTX 4090", 24e9, cost.topology("rtx_4090", (2,)), Path(__file__).with_name("rtx4090.txtpb")
)


def held(compiled: Any) -> int:
    """Bytes that a program holds on one device at most, its arguments included."""
    used = compiled.memory_analysis()
    total = used.argument_size_in_bytes + used.temp_size_in_bytes + used.output_size_in_bytes
    return total - used.alias_size_in_bytes
