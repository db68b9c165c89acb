"""Small models trained twice, with this library's attention and with jax.nn's: what the scripts of papers share."""

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
    """A model, what it is trained on, and what is said of it.

    Attributes:
        path: the script; the files of results are beside it and have its name.
        about: its docstring.
        model: makes a model of an attention and a random key.
        data: draws a batch of so many entries of so many points, of a key.
        loss: of a model, a batch and a key: what is minimised, and the error that is shown.
        points: the number of points of each entry.
        steps: the number of training steps.
        rate: the learning rate at the start.
        evaluate: what is found of a trained model, for the file of results.
        describe: lines that say it.
        draw: draws it into a part of a figure.
        portion: the height of that part beside that of the errors and the memory.
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


def train(of: Experiment, name: str, steps: int, most: int) -> tuple[Any, list[float]]:
    """The model after `steps` of a schedule of `most`, and the error of every step."""
    adam = optimiser(of.rate, most)

    @functools.partial(eqx.filter_jit, donate="all-except-first")
    def step(key: PRNGKeyArray, model: Any, state: Any) -> tuple[Any, Any, Array]:
        of_data, of_loss = jax.random.split(key)
        data = of.data(of_data, of.batch, of.points)
        (_, error), gradient = eqx.filter_value_and_grad(of.loss, has_aux=True)(
            model, data, of_loss
        )
        updates, state = adam.update(gradient, state)
        return eqx.apply_updates(model, updates), state, error

    model = of.model(ATTENTION[name], jax.random.key(SEED))
    state = adam.init(eqx.filter(model, eqx.is_array))
    errors = []
    for i in range(steps):
        key = jax.random.fold_in(jax.random.key(SEED + 1), i)
        model, state, error = step(key, model, state)
        errors.append(error)
    return model, list(map(float, errors))


def step_memory(of: Experiment, name: str, points: int) -> float:
    """MiB of temporary memory of the compiled gradient of the loss of one entry."""
    key = jax.random.key(SEED)
    arrays, rest = eqx.partition(of.model(ATTENTION[name], key), eqx.is_array)
    data = jax.eval_shape(lambda: of.data(key, 1, points))

    def gradient(arrays: Any, data: Any, key: PRNGKeyArray) -> Any:
        return jax.grad(lambda x: of.loss(eqx.combine(x, rest), data, key)[0])(arrays)

    compiled = jax.jit(gradient).lower(arrays, data, key).compile()
    return round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 2)


def draw(of: Experiment, result: dict[str, Any], path: Path) -> None:
    """Errors and memory, above what the experiment draws. Raises `ImportError` without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, of.portion))
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
    of.draw(result, below)
    with matplotlib.rc_context({"svg.hashsalt": "energy_attn"}):
        figure.savefig(path, metadata={"Date": None})


def run(of: Experiment, arguments: list[str] | None = None) -> int:
    """Trains, measures, prints and writes; returns 0. Raises `OSError`."""
    parser = argparse.ArgumentParser(description=of.about.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=of.path.parent, help="folder for the files")
    parser.add_argument("--steps", type=int, default=of.steps, help="of training (%(default)s)")
    parser.add_argument("--compared", type=int, default=300, help="of these with jax.nn's, too")
    parser.add_argument(
        "--points", type=int, nargs="+", default=LENGTHS, help="whose memory is compared"
    )
    given = parser.parse_args(arguments)
    began = time.perf_counter()
    model, errors = train(of, "energy_attn", given.steps, given.steps)
    _, others = train(of, "jax.nn", min(given.compared, given.steps), given.steps)
    apart = np.abs(np.asarray(errors[: len(others)]) / np.asarray(others) - 1)
    result = {
        "steps": given.steps,
        "errors": {
            name: [float(f"{x:.5g}") for x in found]
            for name, found in zip(ATTENTION, (errors, others), strict=True)
        },
        "largest_difference": {
            str(n): float(f"{apart[:n].max():.1e}") for n in (10, 100, 300) if n <= len(others)
        },
        "points": list(given.points),
        "memory": {name: [step_memory(of, name, n) for n in given.points] for name in ATTENTION},
        **of.evaluate(model),
    }
    first, last = (float(np.mean(x)) for x in (errors[:50], errors[-50:]))
    print(f"error: {first:.3f} in the first 50 steps, {last:.4f} in the last")
    print("largest difference from jax.nn's errors, relative:", result["largest_difference"])
    print(*of.describe(result), sep="\n")
    for points, *sizes in zip(given.points, *result["memory"].values(), strict=True):
        print(f"{points:>5} points: {sizes[0]:8.1f} MiB, jax.nn {sizes[1]:8.1f} MiB")
    given.out.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(name)}: {json.dumps(x)}" for name, x in result.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (given.out / f"{of.path.stem}.json").write_text(text, encoding="utf-8")
    try:
        draw(of, result, given.out / f"{of.path.stem}.svg")
    except ImportError:
        print("no figure: matplotlib is not installed", file=sys.stderr)
    print(f"{time.perf_counter() - began:.0f} s; written to {given.out}")
    return 0
