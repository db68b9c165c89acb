"""Trains a small Llama of bytes over data, sequence and tensor axes of a mesh, and once more on one device.

The text is this repository's license. The script writes the losses of both trainings, those after a checkpoint was
read, what each device holds, and what a compiled step sends; `docs/mesh_training.md` explains it. It takes two minutes.

    python examples/mesh_training.py --out docs/mesh_training/report.json
"""

import argparse
import collections
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Before JAX starts: eight simulated devices where there is no accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from energy_attn.distributed import SequenceParallel, collectives, make_mesh
from energy_attn.models import Llama, LlamaConfig, shard

AXES = ("data", "sequence", "tensor")
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
ROWS, LENGTH = 4, 256
# --8<-- [start:options]
PARALLEL = SequenceParallel("sequence", "ring", heads="tensor", batch="data")
OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
# --8<-- [end:options]


# --8<-- [start:layout]
def layout(model, mesh):
    """Shardings of the weights within a step and between steps."""
    whole = jax.tree.map(lambda x: x.sharding, shard(model, mesh))

    def part(weight, sharding):  # an axis that is whole, over "data" too
        names = [*sharding.spec, *[None] * (weight.ndim - len(sharding.spec))]
        for i, size in enumerate(weight.shape):
            if names[i] is None and size % mesh.shape["data"] == 0:
                names[i] = "data"
                break
        return jax.NamedSharding(mesh, jax.P(*names))

    return whole, jax.tree.map(part, model, whole)
    # --8<-- [end:layout]


# --8<-- [start:step]
def mean_loss(model, tokens, parallel=PARALLEL):
    """The mean loss of all tokens but the first of each row."""
    return model.loss(tokens, parallel=parallel)


def step(model, state, tokens, *, loss, whole, parts):
    """One step of training: the new model and state, and the loss."""

    def of_weights(model):
        model = jax.lax.with_sharding_constraint(model, whole)
        return loss(model, tokens)

    value, slope = jax.value_and_grad(of_weights)(model)
    slope = jax.lax.with_sharding_constraint(slope, parts)
    updates, state = OPTIMISER.update(slope, state, model)
    return optax.apply_updates(model, updates), state, value
    # --8<-- [end:step]


def mapped_loss(model: Llama, tokens: jax.Array) -> Any:
    """The mean loss by `jax.vmap` over rows; the model sees one row."""
    parallel = SequenceParallel("sequence", "ring", heads="tensor")
    return jax.vmap(lambda row: mean_loss(model, row[None], parallel))(tokens).mean()


# --8<-- [start:checkpoint]
def save(path, training):
    """Saves a training; each process writes the shards on its devices."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, training)


def load(path, like):
    """Loads a saved training with the shardings of `like`."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)
    # --8<-- [end:checkpoint]


def batch(text: np.ndarray, number: int) -> np.ndarray:
    """Tokens of a step, by its number alone, so that a resumed training reads on."""
    random = np.random.default_rng(number)
    starts = random.integers(0, len(text) - LENGTH, ROWS)
    return text[starts[:, None] + np.arange(LENGTH)].astype(np.int32)


class Trainer:
    """A compiled step on a mesh, or on one device where the mesh is None."""

    def __init__(self, text: np.ndarray, mesh: Any, config: LlamaConfig, dtype: Any) -> None:
        self.text, self.mesh = text, mesh
        self.model = Llama(config, dtype, key=jax.random.key(0))
        if mesh is None:
            one = jax.tree.map(lambda x: x.sharding, self.model)
            self.whole = self.parts = one
            self.rows, self.loss = jax.devices()[0], partial(mean_loss, parallel=None)
        else:
            self.whole, self.parts = layout(self.model, mesh)
            self.rows = jax.NamedSharding(mesh, jax.P("data", "sequence"))
            self.loss = mean_loss
        self.step = self.compiled(self.loss)

    def start(self) -> tuple[Any, Any]:
        """The model and the optimiser's state, laid out."""
        copy = jax.tree.map(lambda x: x.copy(), self.model)  # a step donates its arrays
        model = jax.device_put(copy, self.parts)
        return model, self.laid_out(OPTIMISER.init(model))

    def laid_out(self, state: Any) -> Any:
        """The optimiser's state, whose arrays are copies of the weights or numbers."""
        if self.mesh is None:
            return state
        alone = jax.NamedSharding(self.mesh, jax.P())
        return jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, alone), state)

    def batch(self, number: int) -> jax.Array:
        """Tokens of a step, on the devices that read them."""
        return jax.device_put(batch(self.text, number), self.rows)

    def compiled(self, loss: Callable[..., Any], gathered: bool = True) -> jax.stages.Compiled:
        """The program of a step with this loss; `gathered=False`: where weights lie is left to XLA."""
        whole = self.whole if gathered else self.parts
        function = partial(step, loss=loss, whole=whole, parts=self.parts)
        jitted = jax.jit(function, donate_argnums=(0, 1))
        arguments = *self.start(), self.batch(0)
        if self.mesh is None:
            return jitted.lower(*arguments).compile()
        with jax.set_mesh(self.mesh):
            return jitted.lower(*arguments).compile()

    def train(self, training: tuple[Any, Any], numbers: range) -> tuple[tuple[Any, Any], list]:
        """The training after these steps, and their losses."""
        losses, (model, state) = [], training
        for number in numbers:
            model, state, loss = self.step(model, state, self.batch(number))
            losses.append(float(loss))
        return (model, state), losses


def axes_of(groups: Any, mesh: Any) -> str:
    """The axes of a mesh along which the devices of a collective differ."""
    devices = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    wanted_groups = {frozenset(group) for group in groups}
    for count in range(1, devices.ndim + 1):
        for inner in itertools.combinations(range(devices.ndim), count):
            outer = [i for i in range(devices.ndim) if i not in inner]
            size = int(np.prod([devices.shape[i] for i in inner]))
            rows = devices.transpose(*outer, *inner).reshape(-1, size).tolist()
            if wanted_groups == set(map(frozenset, rows)):
                return ", ".join(mesh.axis_names[i] for i in inner)
    return "several"


def sent(compiled: jax.stages.Compiled, mesh: Any) -> list[dict[str, Any]]:
    """Number and bytes of a program's collectives by axes and kind, at most."""
    counts: Any = collections.defaultdict(lambda: [0, 0])
    for each in collectives(compiled):
        total = counts[axes_of(each.groups, mesh), each.kind]
        count = 1 if each.count is None else each.count  # in a branch, which may not be taken
        total[0] += count
        total[1] += count * each.bytes
    return [
        {"axes": axes, "kind": kind, "count": count, "bytes": size}
        for (axes, kind), (count, size) in sorted(counts.items())
    ]


def held(tree: Any) -> int:
    """Bytes of a tree on the first device."""
    shards = (x.addressable_shards[0].data for x in jax.tree.leaves(tree))
    return sum(shard.nbytes for shard in shards)


def gap(losses: list[float], wanted: list[float]) -> float:
    """The largest difference of two curves."""
    return float(np.abs(np.subtract(losses, wanted)).max())


def in_float64(text: np.ndarray, steps: int, config: LlamaConfig, mesh: Any) -> float:
    """The largest difference of the losses on the mesh from one device's, where rounding is small."""
    with jax.enable_x64(True):
        trainers = [Trainer(text, x, config, np.float64) for x in (mesh, None)]
        return gap(*(x.train(x.start(), range(steps))[1] for x in trainers))


def measure(text: np.ndarray, steps: int, config: LlamaConfig = CONFIG) -> dict[str, Any]:
    """Measures training on the mesh, on one device and from a checkpoint; memory and collectives."""
    mesh = make_mesh((2, 2, 2), AXES)
    ours, alone = (Trainer(text, x, config, np.float32) for x in (mesh, None))
    half = range(steps // 2), range(steps // 2, steps)
    with tempfile.TemporaryDirectory() as folder:
        training, losses = ours.train(ours.start(), half[0])
        save(f"{folder}/training", training)
        done, rest = ours.train(training, half[1])
        model, again = ours.train(load(f"{folder}/training", ours.start()), half[1])
    same = map(np.array_equal, jax.tree.leaves(done), jax.tree.leaves(model))
    _, wanted = alone.train(alone.start(), range(steps))
    losses += rest
    unnamed = partial(mean_loss, parallel=SequenceParallel("sequence", "ring"))
    programs = {
        "as above": ours.step,
        "rows mapped by `jax.vmap`": ours.compiled(mapped_loss),
        "without `heads=` and `batch=`": ours.compiled(unnamed),
        "weights not gathered first": ours.compiled(mean_loss, gathered=False),
    }
    ours, alone = ours.start(), alone.start()
    return {
        "steps": steps,
        "weights": sum(x.size for x in jax.tree.leaves(ours[0])),
        "arrays": len(jax.tree.leaves(ours[0])),
        "jax": jax.__version__,
        "losses": {"mesh": losses, "one device": wanted},
        "difference": {
            "float32, first half": gap(losses[: steps // 2], wanted[: steps // 2]),
            "float32": gap(losses, wanted),
            "float64": in_float64(text, steps, config, mesh),
        },
        "resumed": {"after": steps // 2, "equal": rest == again and all(same)},
        "held": {
            "weights": [held(ours[0]), held(alone[0])],
            "state": [held(ours[1]), held(alone[1])],
        },
        "sent": {name: sent(program, mesh) for name, program in programs.items()},
    }


def table(result: dict[str, Any]) -> str:
    """Formats the collectives of each program as a Markdown table."""
    rows = [(x["axes"], x["kind"]) for program in result["sent"].values() for x in program]
    names = list(result["sent"])
    lines = [f"| over | operation | {' | '.join(names)} |", f"|{'---|' * (2 + len(names))}"]
    for row in sorted(set(rows)):
        cells = [
            next((x for x in result["sent"][name] if (x["axes"], x["kind"]) == row), None)
            for name in names
        ]
        shown = ["" if x is None else f"{x['count']}: {x['bytes']:,}" for x in cells]
        lines.append(f"| {row[0]} | {row[1]} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measures and writes; returns 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=200, help="of training (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="file for what was measured")
    args = parser.parse_args(arguments)
    license = Path(__file__).resolve().parents[1] / "LICENSE"
    text = np.frombuffer(license.read_bytes(), np.uint8)
    result = measure(text, args.steps)
    lines = (f"{json.dumps(name)}: {json.dumps(x)}" for name, x in result.items())
    args.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(table(result))
    print("largest differences of the losses:", result["difference"])
    print(f"resumed with equal bits: {result['resumed']['equal']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
