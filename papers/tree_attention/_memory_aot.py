"""The memory of attention over sharded keys, compiled ahead of time for other machines."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
    """A program: one query, or `sharded`, causal attention of as many queries as there are keys."""

    target: str
    devices: int
    keys: int
    method: str
    heads: int = 16
    kv_heads: int = 16
    width: int = 128
    sharded: bool = False


CASES = (
    # the paper's cards and hidden sizes, and the keys whose 2btd numbers are its 524 MB
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
    *(
        Case("v5p", 8, 2**17, method, 32, 8, sharded=True)
        for method in ("tree", "ring, keys", "ring, queries", "gather", "ulysses")
    ),
)


def local(case: Case, query: Any, key: Any, value: Any) -> Any:
    """The attention of a case, on one of its devices."""
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

    run = jax.shard_map(
        functools.partial(local, case),
        mesh=mesh,
        in_specs=(spec, split, split),
        out_specs=spec,
        check_vma=False,
    )
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
