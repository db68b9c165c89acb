"""One host of `latency.py`: times every method with the others, and checks every answer.

Run as `python _worker.py PLAN`, with a plan in JSON (`Plan`); it writes its measurements to a file.
"""

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _network import die_with_parent

HEADS, WIDTH = 16, 64


class Problem(NamedTuple):
    """A query and evenly sharded keys; any process can make any shard."""

    keys: int
    devices: int

    def query(self) -> np.ndarray:
        """`[1, 1, N, H]`, in float32."""
        return self._random(self.devices)(1)

    def shard(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one device, `[1, S/p, N, H]` in float32."""
        random = self._random(device)
        each = self.keys // self.devices
        return random(each), random(each)

    def _random(self, part: int) -> Callable[[int], np.ndarray]:
        rng = np.random.default_rng((self.keys, self.devices, part))

        def normal(length: int) -> np.ndarray:
            return rng.standard_normal((1, length, HEADS, WIDTH), dtype=np.float32)

        return normal


class Plan(NamedTuple):
    """The instructions of a host."""

    host: int
    hosts: int
    devices: int
    keys: list[int]
    turns: int
    steps: int
    seconds_per_method: float
    seconds: int
    coordinator: str
    folder: str  # contains answers.npz, by number of keys; HOST.json is written there


def methods(axes: tuple[str, ...], devices: int) -> dict[str, Callable[..., Any]]:
    """Every method by name, from query, key and value of a device to `out` of the query.

    A scatter of states leaves each device its part of the heads, which is all that it needs where the weights
    are sharded by head over the same devices; it is left out where these do not divide the heads.
    """
    import jax.numpy as jnp
    from jax import lax

    from energy_attn.distributed import methods, sharded_attention
    from energy_attn.distributed.internal import STRATEGIES
    from energy_attn.kernels import AttentionState, local_attention

    def three_reductions(query: Any, key: Any, value: Any) -> Any:
        out, lse = local_attention(query, key, value)
        weight = jnp.exp(lse - lax.pmax(lse, axes))
        numerator = lax.psum(out * weight[..., None], axes)
        return numerator / lax.psum(weight, axes)[..., None]

    def alone(query: Any, key: Any, value: Any) -> Any:
        return local_attention(query, key, value).out

    def over(method: methods.Tree | methods.Ring) -> Callable[..., Any]:
        options: dict[str, Any] = {"axis_name": axes, "method": method, "queries_sharded": False}
        return lambda *arrays: sharded_attention(*arrays, **options).out

    def tree(merge: Any) -> Callable[..., Any]:
        return over(methods.Tree(merge))

    def ring(rotate: Any) -> Callable[..., Any]:
        return over(methods.Ring(rotate))

    def scatter(way: Callable[..., Any]) -> Callable[..., Any]:
        def by_device(x: Any) -> Any:
            parts = x.reshape(*x.shape[:2], devices, HEADS // devices, *x.shape[3:])
            return jnp.moveaxis(parts, 2, 0)

        def scattered(query: Any, key: Any, value: Any) -> Any:
            state = local_attention(query, key, value)
            return way(AttentionState(*map(by_device, state)), axes).out

        return scattered

    scatters = {
        "scatter, sums": scatter(STRATEGIES["allreduce"].scatter),
        "scatter, exchange": scatter(STRATEGIES["gather"].scatter),
    }
    merges = ["allreduce", "gather", "butterfly", "halving"]
    merges += [*["hierarchical"] * (len(axes) > 1), "auto"]
    return {
        "no exchange": alone,
        "pmax + psum + psum": three_reductions,
        **{f"tree, {merge}": tree(merge) for merge in merges},
        **(scatters if HEADS % devices == 0 else {}),
        "ring, queries": ring("queries"),
        "ring, keys": ring("keys"),
    }


class Side:
    """A compiled method with its arrays and measurements."""

    def __init__(self, compiled: Any, arrays: list[Any], answer: np.ndarray | None) -> None:
        self.run = lambda: compiled(*arrays)
        self.answer = answer
        self.milliseconds: list[float] = []
        self.error = 0.0

    def turn(self, steps: int) -> None:
        """A step that does not count, then some that do; the answer of each is checked.

        Decoding is one step after another, and none begins before the last has ended.
        """
        import jax

        jax.block_until_ready(self.run())
        outs = []
        start = time.perf_counter()
        for _ in range(steps):
            outs.append(jax.block_until_ready(self.run()))
        self.milliseconds.append(1e3 * (time.perf_counter() - start) / steps)
        if self.answer is not None:
            shards = [shard for out in outs for shard in out.addressable_shards]
            self.error = max(self.error, *(self.error_of(shard) for shard in shards))

    def error_of(self, shard: Any) -> float:
        """The error of a device's answer, for all heads or its part of them, against float64."""
        out = np.asarray(shard.data, np.float64)[0, 0, 0]
        parts = self.answer.reshape(-1, *out.shape)
        return float(abs(out - parts[(shard.index[0].start or 0) % len(parts)]).max())


def measure(plan: Plan, keys: int, mesh: Any) -> dict[str, Any]:
    """Times every method on `keys` keys, in turns, so that disturbances affect all."""
    import jax
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from energy_attn.distributed import collectives

    axes = tuple(mesh.axis_names)
    problem = Problem(keys, mesh.size)
    shape = (1, keys, HEADS, WIDTH)
    sharded, everywhere = (NamedSharding(mesh, spec) for spec in (P(None, axes), P()))
    shard = functools.cache(problem.shard)

    def shard_of(part: int) -> Callable[[Any], np.ndarray]:
        each = keys // mesh.size
        return lambda index: shard((index[1].start or 0) // each)[part]

    query = problem.query()
    arrays = [
        jax.make_array_from_callback(query.shape, everywhere, lambda index: query),
        *[jax.make_array_from_callback(shape, sharded, shard_of(part)) for part in (0, 1)],
    ]
    answer = np.load(Path(plan.folder, "answers.npz"))[str(keys)]
    sides, sent = {}, {}
    for name, method in methods(axes, mesh.size).items():
        # an axis for the devices: each has its own answer, and each is checked
        mapped = jax.shard_map(
            lambda *arrays, method=method: method(*arrays)[None],
            mesh=mesh,
            in_specs=(P(), P(None, axes), P(None, axes)),
            out_specs=P(axes),
        )
        compiled = jax.jit(mapped).lower(*arrays).compile()
        sent[name] = [(c.kind, c.bytes, c.count) for c in collectives(compiled)]
        sides[name] = Side(compiled, arrays, None if name == "no exchange" else answer)
    for side in sides.values():
        side.turn(1)  # opens connections
    # A slow method has fewer turns, of one step; all hosts must agree on the number.
    each, fewest_turns = (
        np.array([1e-3 * x.milliseconds.pop() for x in sides.values()]),
        min(5, plan.turns),
    )
    steps = np.where(
        each * (plan.steps + 1) * fewest_turns > plan.seconds_per_method, 1, plan.steps
    )
    turns = np.clip(plan.seconds_per_method / (each * (steps + 1)), fewest_turns, plan.turns)
    agreed = multihost_utils.broadcast_one_to_all(np.stack([turns, steps]).astype(np.int32))
    for turn in range(plan.turns):
        for side, limit, count in zip(sides.values(), *agreed.tolist(), strict=True):
            if turn < limit:
                side.turn(count)
    return {
        name: {
            "collectives": sent[name],
            "milliseconds": side.milliseconds,
            "error": side.error,
        }
        for name, side in sides.items()
    }


def main(plan: Plan) -> list[dict[str, Any]]:
    """Connects to the other hosts and measures all lengths."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={plan.devices}"
    import jax

    from energy_attn.distributed import make_mesh

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(plan.coordinator, plan.hosts, plan.host, initialization_timeout=60)
    shape, names = (plan.hosts, plan.devices), ("node", "device")
    mesh = make_mesh(shape, names) if plan.devices > 1 else make_mesh(shape[:1], names[:1])
    return [measure(plan, keys, mesh) for keys in plan.keys]


if __name__ == "__main__":
    die_with_parent()
    own_plan = Plan(**json.loads(sys.argv[1]))
    signal.alarm(own_plan.seconds)  # whatever happens
    Path(own_plan.folder, f"{own_plan.host}.json").write_text(json.dumps(main(own_plan)))
