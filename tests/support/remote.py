"""The kernel of `merge="remote"` on eight simulated TPUs, watched for races: a line of JSON for each mesh.

Started by `test_remote.py` as `python -m tests.support.remote`, with threads enough for eight devices that wait
for each other.
"""

import json
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from energy_attn.distributed import make_mesh
from energy_attn.distributed.merge._remote_kernel import fits, fold_in_kernel
from energy_attn.kernels import AttentionState, merge_all

MESHES = {
    "8": ((8,), ("a",), ("a",)),
    "2x4": ((2, 4), ("a", "b"), ("a", "b")),
    "2x4, the last": ((2, 4), ("a", "b"), ("b",)),
    "2x2x2, all but one": ((2, 2, 2), ("a", "b", "c"), ("a", "c")),
}


def states() -> AttentionState:
    """Eight states of 2 × 5 rows: some empty on one device, one on all, ties, and an empty one with anything in it."""
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal((8, 2, 5, 6)), 30 * rng.standard_normal((8, 2, 5))
    lse[[1, 6]] = -np.inf  # devices without keys
    lse[:, 0, 0] = -np.inf  # a row without keys
    lse[4:, 0, 1] = lse[:4, 0, 1]
    out = np.where(np.isfinite(lse)[..., None], out, 0)
    lse[2, 1, 2], out[2, 1, 2] = -np.inf, np.nan
    return AttentionState(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32))


def run(mesh: str, mode: Literal["on_wait", "eager"]) -> dict:
    """What the kernel finds on a mesh, beside the fold in one place in float64."""
    sizes, names, axes = MESHES[mesh]
    interpret = pltpu.InterpretParams(
        detect_races=True, dma_execution_mode=mode, uninitialized_memory="nan"
    )

    def fold(out: jax.Array, lse: jax.Array) -> AttentionState:
        state = AttentionState(out[0], lse[0])
        assert fits(state, axes)
        found = fold_in_kernel(state, axes, names, interpret)
        return jax.tree.map(lambda x: x[None], found)

    given = states()
    with jax.set_mesh(make_mesh(sizes, names)):
        spread = jax.shard_map(fold, in_specs=jax.P(names), out_specs=jax.P(names), check_vma=False)
        found = jax.device_get(jax.jit(spread)(*given))
    kept = [i for i, name in enumerate(names) if name not in axes]
    folded = [i for i, name in enumerate(names) if name in axes]

    def groups(x: np.ndarray) -> np.ndarray:  # [groups, devices of a group, ...]
        x = np.asarray(x).reshape(*sizes, *x.shape[1:])
        rest = range(len(sizes), x.ndim)
        x = x.transpose(*kept, *folded, *rest)
        return x.reshape(-1, int(np.prod([sizes[i] for i in folded])), *x.shape[len(sizes) :])

    outs, lses = groups(found.out), groups(found.lse)
    same = all(bool((x == x[:, :1]).all()) for x in (outs, lses))
    error = 0.0
    with jax.enable_x64(True):
        wide = [groups(np.asarray(x, np.float64)) for x in given]
        for i, parts in enumerate(zip(*wide, strict=True)):
            exact = merge_all(AttentionState(*map(jnp.asarray, parts)))
            assert (np.isneginf(lses[i, 0]) == np.isneginf(exact.lse)).all()
            seen = np.isfinite(exact.lse)
            error = max(
                error,
                float(np.abs(outs[i, 0] - exact.out).max()),
                float(np.abs((lses[i, 0] - exact.lse)[seen] / exact.lse[seen]).max()),
            )
    return {"mesh": mesh, "mode": mode, "same": same, "error": error}


if __name__ == "__main__":
    for mesh in MESHES:  # copies made as late as may be
        print(json.dumps(run(mesh, "on_wait")), flush=True)
    print(json.dumps(run("8", "eager")), flush=True)
