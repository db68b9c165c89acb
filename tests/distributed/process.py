"""One of several processes: decodes over a mesh of all their devices, and says what it found as a line of JSON.

Run by `test_processes.py`, as `python -m tests.distributed.process COORDINATOR COUNT INDEX`.
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, collectives, make_mesh, tree_attention

from ..problems import PROBLEMS, everything
from ..reference import dense, dense_vjp

DECODE = PROBLEMS["decode_source"]  # 13 keys, positions, a window: padded to the devices
TRAIN = everything("processes", B=2, T=5, S=16)


def main(coordinator: str, count: int, index: int) -> dict:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, count, index, initialization_timeout=30)
    mesh = make_mesh()

    def put(x, *spec):  # each process gives what its own devices hold
        x, sharding = np.asarray(x), NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    with jax.set_mesh(mesh):
        arrays = {name: put(x) for name, x in DECODE.arrays.items()}
        options = {
            name: put(x) if isinstance(x, jax.Array) else x for name, x in DECODE.options.items()
        }

        @jax.jit
        def decode(arrays):
            def total(source):
                rest = arrays | {"source": source}
                energy = ea.free_energy(**rest, **options, parallel=SequenceParallel())
                return energy.sum(), energy

            return jax.grad(total, has_aux=True)(arrays["source"])

        out, energy = decode(arrays)

        keys = P(None, ("node", "device"))
        shards = [put(TRAIN.query), put(TRAIN.key, *keys), put(TRAIN.value, *keys)]

        @jax.jit
        def loss(query, key, value):
            spread = jax.shard_map(
                lambda q, k, v: tree_attention(q, k, v, axis_name=("node", "device")),
                in_specs=(P(), keys, keys),
                out_specs=P(),
            )
            return spread(query, key, value).out.sum()

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shards).compile()
        dquery, dkey = gradient(*shards)

    exact_out, exact_energy = dense(DECODE)
    plain = type(TRAIN)("plain", TRAIN.query, TRAIN.key, TRAIN.value)
    exact = dense_vjp(plain, np.ones_like(dense(plain)[0]), np.zeros(TRAIN.query.shape[:3]))
    mine = [(np.asarray(x.data), exact["key"][x.index]) for x in dkey.addressable_shards]
    errors = {
        "out": np.abs(local(out) - exact_out).max(),
        "energy": np.abs(local(energy) - exact_energy).max(),
        "gradient of the query": np.abs(local(dquery) - exact["query"]).max(),
        "gradient of my keys": max(np.abs(a - b).max() for a, b in mine),
    }
    return {
        "processes": jax.process_count(),
        "mesh": dict(mesh.shape),
        "my devices": [d.process_index for d in mesh.devices[index]],
        "errors": {name: float(error) for name, error in errors.items()},
        "groups": [list(map(list, c.groups)) for c in collectives(gradient)],
    }


def local(x: jax.Array) -> np.ndarray:
    """A replicated array, as this process holds it."""
    assert x.is_fully_replicated
    return np.asarray(x.addressable_data(0))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
