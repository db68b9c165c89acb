"""The paper's models compiled for machines that are not here: do they fit, and what do they send?

XLA compiles ahead of time for TPU slices with libtpu, for GPUs with CUDA's compiler; weights are
abstract. Nothing is run.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _tables_paper import LLAMAS, abstract
from _tables_run import AXIS, METHODS, decoder, predicted, reader, sent
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import SequenceParallel, cost
from energy_attn.models import shard

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 1024


class Target(NamedTuple):
    """Devices to compile for: a name for people, bytes of memory of each as their maker counts them,
    what the cost model knows of them, and what describes them to JAX.
    """

    name: str
    memory: float
    topology: cost.Topology
    describe: Callable[[], list[Any]]


class Case(NamedTuple):
    """A model on a target. `split`: each device holds a part of every weight, not all of it."""

    target: str
    model: str
    prompt: int
    split: bool = False


def _tpu(name: str) -> Callable[[], list[Any]]:
    def describe() -> list[Any]:
        # so that libtpu looks for no TPU and no metadata server, and keeps no logs
        os.environ.update(
            TPU_WORKER_HOSTNAMES="localhost",
            TPU_ACCELERATOR_TYPE="v5litepod-4",
            TPU_LOG_DIR="disabled",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        )
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices

    return describe


def _gpus(number: int, config: Path) -> Callable[[], list[Any]]:
    def describe() -> list[Any]:
        sys.path.append(str(ROOT))
        os.environ.setdefault("XLA_FLAGS", "")
        from tests.cuda.target import toolkit

        toolkit()
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology=f"1x1x{number}",
            target_config=config.read_text(),
        ).devices

    return describe


TARGETS = {
    "h200": Target(
        *("8x H200", 141e9, cost.dgx_h100()), _gpus(8, ROOT / "tests" / "cuda" / "h200.txtpb")
    ),
    "rtx4090": Target(
        *("2x RTX 4090", 24e9, cost.rtx_4090(2)),
        _gpus(2, Path(__file__).with_name("rtx4090.txtpb")),
    ),
    "v5p": Target("TPU v5p:2x2x2", 95e9, cost.tpu("v5p", (8,)), _tpu("v5p:2x2x2")),
    "v5e": Target("TPU v5e:2x4", 16e9, cost.tpu("v5e", (8,)), _tpu("v5e:2x4")),
}
CASES = (
    Case("h200", "Llama 3.1 8B", 256 * 1024),
    Case("h200", "Llama 3.1 8B", 256 * 1024, split=True),
    Case("h200", "Llama 3.2 1B", 256 * 1024),
    Case("rtx4090", "Llama 3.1 8B", 32 * 1024),
    Case("rtx4090", "Llama 3.2 1B", 32 * 1024),
    Case("v5p", "Llama 3.1 8B", 256 * 1024),
    Case("v5p", "Llama 3.2 1B", 256 * 1024),
    Case("v5e", "Llama 3.1 8B", 256 * 1024, split=True),  # whole, the weights alone fill a chip
    Case("v5e", "Llama 3.2 1B", 256 * 1024),
)


def compile_case(case: Case, target: Target) -> dict[str, Any]:
    """Compiles the reading of the prompt and a decode step; says what they hold and send."""
    config = LLAMAS[case.model]
    model = abstract(config)  # made before the mesh is in force: nothing can be made on its devices
    mesh = Mesh(np.array(target.describe()), (AXIS,))
    model = shard(model, mesh, tensor=AXIS if case.split else "none")
    slots = case.prompt + CHUNK

    def whole(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P()))

    def stored(x: Any) -> jax.ShapeDtypeStruct:
        spec = P(None, AXIS) if x.ndim == 4 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        parallel = SequenceParallel(AXIS, topology=target.topology)
        cache = jax.eval_shape(lambda m: m.empty_cache(1, slots, parallel=parallel), model)
        cache = jax.tree.map(stored, cache)
        kept = jax.tree.map(lambda x: x.sharding, cache)
        runs: dict[str, Any] = {"prompt": (reader(CHUNK), whole(1, case.prompt), (None, kept))}
        for name in ("tree", "ring, keys"):
            runs[name] = decoder(METHODS[name], 1), whole(1, 1), (None, None, kept)
        programs = {
            name: jax.jit(run, donate_argnums=2, out_shardings=out)
            .lower(model, tokens, cache)
            .compile()
            for name, (run, tokens, out) in runs.items()
        }
    found = {name: {"holds": held(x), "sends": sent(x)} for name, x in programs.items()}
    for name in METHODS.keys() & found:
        said = predicted(name, config, slots, "bfloat16", target.topology)
        found[name]["attention_sends"] = said
    return {
        "target": target.name,
        "memory": target.memory,
        "model": case.model,
        "weights": "split over the devices" if case.split else "whole on every device",
        "slots": slots,
        "programs": found,
    }


def held(compiled: Any) -> int:
    """Bytes that a program holds on one device at most, its arguments among them."""
    used = compiled.memory_analysis()
    total = used.argument_size_in_bytes + used.temp_size_in_bytes + used.output_size_in_bytes
    return total - used.alias_size_in_bytes
