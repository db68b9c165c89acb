"""The memory and communication of the paper's models, compiled ahead of time for other machines.

Weights are abstract. Nothing is run.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _tables_paper import LLAMAS, abstract
from _tables_run import AXIS, CHUNK, METHODS, decoder, predicted, reader, sent
from _targets import H200, RTX_4090, Target, held, tpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import SequenceParallel
from energy_attn.models import shard


class Case(NamedTuple):
    """A model on a target. `split`: each device holds a part of every weight, not all of it."""

    target: str
    model: str
    prompt: int
    split: bool = False


TARGETS = {
    "h200": H200,
    "rtx4090": RTX_4090,
    "v5p": tpu("v5p", "2x2x2", 95e9),
    "v5e": tpu("v5e", "2x4", 16e9),
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
    """Compiles the prefill and a decode step; returns the memory that they hold and the bytes that they send."""
    config = LLAMAS[case.model]
    model = abstract(config)  # made before the mesh is in force: nothing can be made on its devices
    mesh = Mesh(np.array(target.describe()), (AXIS,))
    model = shard(model, mesh, tensor=AXIS if case.split else "none")
    slots = case.prompt + CHUNK

    def replicated(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P()))

    def stored(x: Any) -> jax.ShapeDtypeStruct:
        spec = P(None, AXIS) if x.ndim == 4 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        parallel = SequenceParallel(AXIS, topology=target.topology)
        cache = jax.eval_shape(lambda m: m.empty_cache(1, slots, parallel=parallel), model)
        cache = jax.tree.map(stored, cache)
        cache_shardings = jax.tree.map(lambda x: x.sharding, cache)
        runs: dict[str, Any] = {
            "prompt": (reader(CHUNK), replicated(1, case.prompt), (None, cache_shardings))
        }
        for name in ("tree", "ring, keys"):
            runs[name] = decoder(METHODS[name], 1), replicated(1, 1), (None, None, cache_shardings)
        programs = {
            name: jax.jit(run, donate_argnums=2, out_shardings=out)
            .lower(model, tokens, cache)
            .compile()
            for name, (run, tokens, out) in runs.items()
        }
    programs_report = {name: {"holds": held(x), "sends": sent(x)} for name, x in programs.items()}
    for name in METHODS.keys() & programs_report:
        prediction = predicted(name, config, slots, "bfloat16", target.topology)
        programs_report[name]["attention_sends"] = prediction
    return {
        "target": target.name,
        "memory": target.memory,
        "model": case.model,
        "weights": "split over the devices" if case.split else "whole on every device",
        "slots": slots,
        "programs": programs_report,
    }
