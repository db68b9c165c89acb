"""Trains a small model twice, with this library's attention and with jax.nn's; shared by scripts of papers."""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray

import energy_attn as ea

Attend = Callable[[Array, Array, Array], Array]
# jax.nn's forms the matrix of weights.
ATTENTION: dict[str, Attend] = {
    "energy_attn": ea.attention,
    "jax.nn": jax.nn.dot_product_attention,
}
COLOURS = {"energy_attn": "#0072b2", "jax.nn": "#d55e00"}
LENGTHS = (256, 512, 1024, 2048, 4096)
SEED = 0


class Experiment(NamedTuple):
    """A model, its training, and its evaluation.

    Attributes:
        path: the script; the files of results are in its folder and have its name.
        about: its docstring.
        model: makes a model of an attention and a random key.
        data: draws a batch from a key, a number of entries and a number of points.
        loss: of a model, a batch and a key: the loss, and the error to be shown.
        points: the number of points of each entry.
        steps: the number of training steps.
        rate: the learning rate at the start.
        evaluate: returns the results of a trained model, for the file of results.
        describe: returns lines of text about them.
        draw: draws them into a part of a figure.
        portion: the height of that part relative to the panels of errors and memory.
    """

    path: Path
    about: str
    model: Callable[[Attend, PRNGKeyArray], Any]
    data: Callable[[PRNGKeyArray, int, int], Any]
    loss: Callable[[Any, Any, PRNGKeyArray], tuple[Array, Array]]
    points: int
    steps: int
    rate: float
    evaluate: Callable[[Any], dict[str, Any]]
    describe: Callable[[dict[str, Any]], list[str]]
    draw: Callable[[dict[str, Any], Any], None]
    portion: float
    batch: int = 32


def optimiser(rate: float, steps: int) -> optax.GradientTransformation:
    """Adam with clipped gradients, and a rate that falls to zero."""
    schedule = optax.cosine_decay_schedule(rate, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


def train(experiment: Experiment, name: str, steps: int, most: int) -> tuple[Any, list[float]]:
    """The model after `steps` of a schedule of `most`, and the error of every step."""
    adam = optimiser(experiment.rate, most)

    @functools.partial(eqx.filter_jit, donate="all-except-first")
    def step(key: PRNGKeyArray, model: Any, state: Any) -> tuple[Any, Any, Array]:
        data_key, loss_key = jax.random.split(key)
        data = experiment.data(data_key, experiment.batch, experiment.points)
        (_, error), gradient = eqx.filter_value_and_grad(experiment.loss, has_aux=True)(
            model, data, loss_key
        )
        updates, state = adam.update(gradient, state)
        return eqx.apply_updates(model, updates), state, error

    model = experiment.model(ATTENTION[name], jax.random.key(SEED))
    state = adam.init(eqx.filter(model, eqx.is_array))
    errors = []
    for i in range(steps):
        key = jax.random.fold_in(jax.random.key(SEED + 1), i)
        model, state, error = step(key, model, state)
        errors.append(error)
    return model, list(map(float, errors))


def step_memory(experiment: Experiment, name: str, points: int) -> float:
    """MiB of temporary memory of the compiled gradient of the loss of one entry."""
    key = jax.random.key(SEED)
    arrays, static = eqx.partition(experiment.model(ATTENTION[name], key), eqx.is_array)
    data = jax.eval_shape(lambda: experiment.data(key, 1, points))

    def gradient(arrays: Any, data: Any, key: PRNGKeyArray) -> Any:
        return jax.grad(lambda x: experiment.loss(eqx.combine(x, static), data, key)[0])(arrays)

    compiled = jax.jit(gradient).lower(arrays, data, key).compile()
    return round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 2)


def draw(experiment: Experiment, result: dict[str, Any]) -> Any:
    """Draws errors and memory above the experiment's own panel. Raises `ImportError` without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, experiment.portion))
    left, right = above.subplots(1, 2)
    size = max(result["steps"] // 100, 1)
    for (name, errors), style in zip(result["errors"].items(), ("-", "--"), strict=True):
        means = np.asarray(errors[: len(errors) // size * size]).reshape(-1, size).mean(1)
        steps = np.arange(len(means)) * size
        left.plot(steps, means, style, color=COLOURS[name], label=name)
        right.plot(result["points"], result["memory"][name], "o-", color=COLOURS[name], label=name)
    left.set(xlabel="step", ylabel="mean square error", title="The same training")
    right.set(xscale="log", yscale="log", xlabel="points T", ylabel="MiB")
    right.set_title("Memory of a training step")
    right.set_xticks(result["points"], list(map(str, result["points"])))
    right.minorticks_off()
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    experiment.draw(result, below)
    return figure


def write(result: dict[str, Any], path: Path, draw: Callable[[dict[str, Any]], Any]) -> None:
    """Writes results as JSON, a line for each, and with matplotlib their figure as SVG. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(name)}: {json.dumps(x)}" for name, x in result.items()]
    path.with_suffix(".json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    try:
        import matplotlib
    except ImportError:
        print("no figure: matplotlib is not installed", file=sys.stderr)
        return
    with matplotlib.rc_context({"svg.hashsalt": "energy_attn"}):
        draw(result).savefig(path.with_suffix(".svg"), metadata={"Date": None})


def run(experiment: Experiment, arguments: list[str] | None = None) -> int:
    """Trains, measures, prints and writes; returns 0. Raises `OSError`."""
    parser = argparse.ArgumentParser(description=experiment.about.split("\n\n")[0])
    option = parser.add_argument
    option("--out", type=Path, default=experiment.path.parent, help="folder for the files")
    option("--steps", type=int, default=experiment.steps, help="of training (%(default)s)")
    option("--compared", type=int, default=300, help="of these with jax.nn's, too")
    option("--points", type=int, nargs="+", default=LENGTHS, help="whose memory is compared")
    args = parser.parse_args(arguments)
    began = time.perf_counter()
    model, errors = train(experiment, "energy_attn", args.steps, args.steps)
    _, reference_errors = train(experiment, "jax.nn", min(args.compared, args.steps), args.steps)
    differences = np.abs(
        np.asarray(errors[: len(reference_errors)]) / np.asarray(reference_errors) - 1
    )
    result = {
        "steps": args.steps,
        "errors": {
            name: [float(f"{x:.5g}") for x in errors]
            for name, errors in zip(ATTENTION, (errors, reference_errors), strict=True)
        },
        "largest_difference": {
            str(n): float(f"{differences[:n].max():.1e}")
            for n in (10, 100, 300)
            if n <= len(reference_errors)
        },
        "points": list(args.points),
        "memory": {
            name: [step_memory(experiment, name, n) for n in args.points] for name in ATTENTION
        },
        **experiment.evaluate(model),
    }
    first, last = (float(np.mean(x)) for x in (errors[:50], errors[-50:]))
    print(f"error: {first:.3f} in the first 50 steps, {last:.4f} in the last")
    print("largest difference from jax.nn's errors, relative:", result["largest_difference"])
    print(*experiment.describe(result), sep="\n")
    for points, *sizes in zip(args.points, *result["memory"].values(), strict=True):
        print(f"{points:>5} points: {sizes[0]:8.1f} MiB, jax.nn {sizes[1]:8.1f} MiB")
    write(result, args.out / experiment.path.stem, functools.partial(draw, experiment))
    print(f"{time.perf_counter() - began:.0f} s; written to {args.out}")
    return 0
