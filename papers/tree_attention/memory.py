"""The paper's figure 4, peak memory, from programs that are compiled ahead of time: nothing is run.

    python papers/tree_attention/memory.py --targets rtx4090 --out docs/benchmarks
    python papers/tree_attention/memory.py --targets v5p --add --out docs/benchmarks

Attention over keys that are sharded over devices, in bfloat16: one query, by the tree and by the ring of keys that
the paper compares with, over two RTX 4090s, the paper's, and over TPU slices, with the numbers of keys and devices
swept; and as many queries as keys, as for a prompt. The memory that XLA reports for a device is compared with the cost
model and, for one query, with the paper's equations 29 and 30.

TPUs need libtpu, GPUs CUDA's compiler: `make test-tpu` and `make test-cuda` install them. `--add` keeps the rows of the
other targets in the file.
"""

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _report import draw_memory, machine, memory_table, write
from _targets import RTX_4090, held, tpu
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import cost, methods, sharded_attention

AXIS = "device"
TARGETS = {
    ("rtx4090", 2): RTX_4090,
    ("v5p", 4): tpu("v5p", "2x2x1", 95e9),
    ("v5p", 8): tpu("v5p", "2x2x2", 95e9),
    ("v5p", 64): tpu("v5p", "4x4x4", 95e9),
}
METHODS = {
    "tree": methods.Tree("allreduce"),
    "ring, keys": methods.Ring("keys"),
    "ring, queries": methods.Ring("queries"),
    "gather": "gather",
    "ulysses": "ulysses",
}
MERGES = {"tree": "allreduce", "ring, keys": "keys", "ring, queries": "queries"}


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
    options: dict[str, Any] = {"axis_name": AXIS, "method": METHODS[case.method]}
    options |= {"queries_sharded": case.sharded}
    if case.sharded:
        start = lax.axis_index(AXIS) * key.shape[1]
        positions = start + jnp.arange(key.shape[1], dtype=jnp.int32)[None]
        options |= {"is_causal": True, "query_positions": positions, "key_positions": positions}
    return sharded_attention(query, key, value, **options).out


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
    shape = cost.Shape(
        *(1, queries, case.keys, case.heads, case.kv_heads, case.width),
        causal=case.sharded,
        queries_sharded=case.sharded,
    )
    method_and_merge = case.method.partition(", ")[0], MERGES.get(case.method)
    return {
        **case._asdict(),
        "device": target.name,
        "arguments": used.argument_size_in_bytes,
        "temporaries": used.temp_size_in_bytes,
        "held": held(compiled),
        "model": cost.memory(*method_and_merge, shape, target.topology),
        "paper": None if case.sharded else paper(case),
    }


def paper(case: Case) -> int | None:
    """Equations 29 and 30 in bytes: $4btd + 2bd$ numbers for a ring of keys, $2btd + 2bd + 2bn_h$ for the tree."""
    width = case.heads * case.width
    shard = 2 * case.keys // case.devices * width
    numbers = {"ring, keys": 2 * shard + 2 * width, "tree": shard + 2 * width + 2 * case.heads}
    return 2 * numbers[case.method] if case.method in numbers else None


def main() -> int:
    """Compiles for the targets that the arguments name, prints rows, and writes JSON and a figure."""
    targets = tuple(dict.fromkeys(name for name, _ in TARGETS))
    parser = argparse.ArgumentParser(description="Peak memory of tree and ring, compiled ahead.")
    add = parser.add_argument
    add("--targets", type=lambda text: text.split(","), default=["v5p"], help=", ".join(targets))
    add("--add", action="store_true", help="keep the rows of other targets in the file")
    add("--out", type=Path, default=Path("memory"), help="folder for the results")
    args = parser.parse_args()
    for target in args.targets:
        if target not in targets:
            parser.error(f"--targets: wanted some of {', '.join(targets)}, got {target}")
    jax.config.update("jax_platforms", "cpu")  # nothing is run
    path = args.out / "memory.json"
    kept = json.loads(path.read_text())["rows"] if args.add and path.is_file() else []
    rows = [x for x in kept if x["target"] not in args.targets]
    rows += [row(case) for case in CASES if case.target in args.targets]
    print(memory_table(rows))
    write(path, {"machine": machine(), "rows": rows}, draw_memory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
