"""Decode steps over a cache whose keys and values are sharded over all devices of a job.

SLURM, Kubernetes or `launch.py` starts it once per process; the program is the same on a laptop, on a pod of TPUs and
on several nodes of GPUs. Each process makes the keys of its own devices; none holds all of them.
"""

import argparse
import time

import jax
import numpy as np

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, fetch, initialize, make_mesh, place


def main() -> None:
    """Runs the steps; process 0 prints the results."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--keys-per-device", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--merge", default="auto")
    parser.add_argument("--wait", type=int, default=30, help="seconds for all processes to start")
    args = parser.parse_args()

    initialize(initialization_timeout=args.wait)  # before anything else uses a device
    mesh = make_mesh()
    rng = np.random.default_rng(jax.process_index())
    local = args.keys_per_device * jax.local_device_count()

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    with jax.set_mesh(mesh):
        along_keys = jax.P(None, mesh.axis_names)
        shape = (1, local, args.heads, args.width)
        key, value = place((normal(*shape), normal(*shape)), along_keys)
        # the query is the same in all processes: each draws it from the same seed
        first = np.random.default_rng(0).standard_normal((1, 1, args.heads, args.width))
        query = place(first.astype(np.float32), jax.P())

        @jax.jit
        def step(query, key, value):
            parallel = SequenceParallel(mesh.axis_names, merge=args.merge)
            out, energy = ea.attention(query, key, value, parallel=parallel, return_energy=True)
            return out / (1e-6 + abs(out).max()), energy

        query, energy = step(query, key, value)
        fetch(energy)  # after this the step is compiled, and all processes have arrived
        begin = time.perf_counter()
        for _ in range(args.steps):
            query, energy = step(query, key, value)
        energies = fetch(energy)
        seconds = (time.perf_counter() - begin) / args.steps

    if jax.process_index() == 0:
        print(
            f"{jax.process_count()} processes, {jax.device_count()} devices, mesh {dict(mesh.shape)}"
        )
        print(f"{key.shape[1]} keys, {1e3 * seconds:.2f} ms a step")
        print(f"energy of the first head: {energies[0, 0, 0]:.4f} nats")


if __name__ == "__main__":
    main()
