"""The paper's figure 4, peak memory, from programs that are compiled ahead of time: nothing is run.

    JAX_PLATFORMS=cpu python -m papers.tree_attention.memory rtx4090 v5p --out docs/benchmarks/memory.json

Attention over keys that are sharded over devices, in bfloat16: one query, by the tree and by the ring of keys that
the paper compares with, over two RTX 4090s, the paper's, and over TPU slices, with the numbers of keys and devices
swept; and as many queries as keys, as for a prompt. The memory that XLA reports for a device is compared with the cost
model and, for one query, with the paper's equations 29 and 30.

TPUs need libtpu, GPUs CUDA's compiler: `make test-tpu` and `make test-cuda` install them.
"""

import argparse
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import cost, methods, sharded_attention

from ._results import add

AXIS = "device"


class Target(NamedTuple):
    """Devices to compile for, which need not be there: a name, the network, and a function that describes them."""

    name: str
    topology: cost.Topology
    describe: Callable[[], list[Any]]


def tpu(shape: str) -> Target:
    """A slice of TPU v5p of a shape such as 2x2x2."""

    def describe() -> list[Any]:
        from tests.support.tpu import ALONE

        os.environ.update(ALONE)
        return topologies.get_topology_desc(platform="tpu", topology_name=f"v5p:{shape}").devices

    chips = math.prod(map(int, shape.split("x")))
    return Target(f"TPU v5p:{shape}", cost.topology("tpu_v5p", (chips,)), describe)


def cards() -> list[Any]:
    """Two RTX 4090s, from a description for XLA."""
    from tests.support.cuda import toolkit

    os.environ.setdefault("XLA_FLAGS", "")
    toolkit()
    config = Path(__file__).with_name("rtx4090.txtpb").read_text()
    options = {"topology": "1x1x2", "target_config": config}
    return topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices


TARGETS = {
    ("rtx4090", 2): Target("2x RTX 4090", cost.topology("rtx_4090", (2,)), cards),
    ("v5p", 4): tpu("2x2x1"),
    ("v5p", 8): tpu("2x2x2"),
    ("v5p", 64): tpu("4x4x4"),
}


class Case(NamedTuple):
    """A program: one query, or if `sharded` causal attention with as many queries as keys."""

    target: str
    devices: int
    keys: int
    method: str
    heads: int = 16
    kv_heads: int = 16
    width: int = 128
    sharded: bool = False


METHODS = {
    "tree": methods.Tree("allreduce"),
    "ring, keys": methods.Ring("keys"),
    "ring, queries": methods.Ring("queries"),
    "gather": "gather",
    "ulysses": "ulysses",
}
CASES = (
    # the paper's cards and hidden sizes; 128,000 keys make 2btd numbers the paper's 524 MB
    *(
        Case("rtx4090", 2, 128_000, method, heads, heads)
        for heads in (16, 32)
        for method in ("tree", "ring, keys")
    ),
    *(
        Case("v5p", devices, keys, method)
        for devices, keys in ((8, 2**17), (8, 2**19), (8, 2**21), (4, 2**19), (64, 2**19))
        for method in ("tree", "ring, keys")
    ),
    Case("v5p", 8, 2**19, "ring, queries"),
    *(Case("v5p", 8, 2**17, method, 32, 8, sharded=True) for method in METHODS),
)


def local(case: Case, query: Any, key: Any, value: Any) -> Any:
    """Computes the attention of a case on one of its devices."""
    options: dict[str, Any] = {"method": METHODS[case.method], "queries_sharded": case.sharded}
    if case.sharded:
        start = lax.axis_index(AXIS) * key.shape[1]
        positions = start + jnp.arange(key.shape[1], dtype=jnp.int32)[None]
        options |= {"is_causal": True, "query_positions": positions, "key_positions": positions}
    return sharded_attention(query, key, value, axis_name=AXIS, **options).out


def row(case: Case) -> dict[str, Any]:
    """Memory of a case's compiled program per device, compared with the cost model and the paper."""
    target = TARGETS[case.target, case.devices]
    mesh = Mesh(np.array(target.describe()), (AXIS,))
    split = P(None, AXIS)
    queries, spec = (case.keys, split) if case.sharded else (1, P())

    def array(length: int, heads: int, spec: P) -> jax.ShapeDtypeStruct:
        shape, sharding = (1, length, heads, case.width), NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    specs: dict[str, Any] = {"in_specs": (spec, split, split), "out_specs": spec}
    run = jax.shard_map(functools.partial(local, case), mesh=mesh, check_vma=False, **specs)
    key = array(case.keys, case.kv_heads, split)
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(array(queries, case.heads, spec), key, key).compile()
    used: Any = compiled.memory_analysis()
    held = used.argument_size_in_bytes + used.temp_size_in_bytes + used.output_size_in_bytes
    shape = cost.Shape(
        *(1, queries, case.keys, case.heads, case.kv_heads, case.width),
        causal=case.sharded,
        queries_sharded=case.sharded,
    )
    method, _, merge = case.method.partition(", ")
    merge = "allreduce" if method == "tree" else merge or None
    return {
        **case._asdict(),
        "device": target.name,
        "arguments": used.argument_size_in_bytes,
        "temporaries": used.temp_size_in_bytes,
        "held": held - used.alias_size_in_bytes,
        "model": cost.memory(method, merge, shape, target.topology),
        "paper": None if case.sharded else paper(case),
    }


def paper(case: Case) -> int | None:
    """Equations 29 and 30 in bytes: $4btd + 2bd$ numbers for a ring of keys, $2btd + 2bd + 2bn_h$ for the tree."""
    width = case.heads * case.width
    shard = 2 * case.keys // case.devices * width
    numbers = {"ring, keys": 2 * shard + 2 * width, "tree": shard + 2 * width + 2 * case.heads}
    return 2 * numbers[case.method] if case.method in numbers else None


def main() -> None:
    """Compiles for the targets that the arguments name, and adds rows to a file."""
    parser = argparse.ArgumentParser(description="Peak memory of tree and ring, compiled ahead.")
    parser.add_argument("targets", nargs="+", choices={name for name, _ in TARGETS})
    parser.add_argument("--out", type=Path, default=Path("memory.json"), help="file of results")
    args = parser.parse_args()
    rows = [row(case) for case in CASES if case.target in args.targets]
    add(args.out, "rows", rows, Case._fields)


if __name__ == "__main__":
    main()
