"""The capacity of a modern Hopfield network: retrieval error against the number of memories and β.

Memories are random points on a sphere of radius √d, as in Theorem 3 of Ramsauer et al. (arXiv 2008.02217); probes are
memories moved by half of that radius in a random direction. The script prints a table and writes capacity.json and
capacity.svg to its own folder, or to that of --out. It takes less than a minute on two cores and needs matplotlib for
the figure.

    python papers/hopfield/capacity.py
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import energy_attn as ea

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _training import write

WIDTH, PROBES, NOISE, SEED, STEPS = 16, 128, 0.5, 0, 300
MEMORIES = tuple(2**i for i in range(2, 15))
BETAS = tuple(float(2 ** (i / 4)) for i in range(-8, 9))


def directions(random: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Random unit vectors, `[count, width]`."""
    drawn = random.standard_normal((count, width))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@jax.jit
def settle(probes: jax.Array, memories: jax.Array, count: jax.Array, beta: jax.Array) -> Any:
    """The fixed points of probes `[T, d]` among the first `count` of the memories `[S, d]`."""
    return ea.hopfield.retrieve(
        probes[:, None],
        memories[:, None],
        scale=beta,
        key_value_seq_lengths=count,
        solver=ea.solvers.FixedPoint(max_steps=STEPS),
        throw=False,
    )


def measure(
    sizes: tuple[int, ...], betas: tuple[float, ...], width: int, probes: int
) -> dict[str, list[list[float]]]:
    """Measures retrieval: by name, a number for each β and number of memories. Raises what `retrieve` raises.

    `error`: the mean distance from the probed memory, in radii. `retrieved`: the share within a tenth of a radius.
    `separated`: the share of memories that theory proves to be stored. `effective`: the median number of memories
    that a fixed point averages over; `steps`: the median number of steps to it; `at_rest`: the share that converged.
    """
    random = np.random.default_rng(SEED)
    radius = width**0.5
    pool = radius * directions(random, max(sizes), width)
    columns = []
    for size in sizes:
        chosen = random.integers(0, size, probes)
        probe = pool[chosen] + NOISE * radius * directions(random, probes, width)
        arrays = [jnp.asarray(x, jnp.float32) for x in (probe, pool)]
        gaps = radius**2 - nearest_scores(pool[:size], chosen)
        column = []
        for beta in betas:
            solution = settle(*arrays, jnp.asarray(size, jnp.int32), jnp.asarray(beta, jnp.float32))
            point = np.asarray(solution.point[:, 0], np.float64)
            errors = np.linalg.norm(point - pool[chosen], axis=1) / radius
            column.append(
                {
                    "error": errors.mean(),
                    "retrieved": (errors < 0.1).mean(),
                    "separated": (gaps >= separation(beta, size, radius)).mean(),
                    "effective": np.median(solution.stats["effective"]),
                    "steps": np.median(solution.stats["steps"]),
                    "at_rest": solution.converged.mean(),
                }
            )
        columns.append(column)
    return {
        name: [[round(float(column[i][name]), 4) for column in columns] for i in range(len(betas))]
        for name in columns[0][0]
    }


def nearest_scores(memories: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The largest inner product of each chosen memory with another one."""
    scores = memories[chosen] @ memories.T
    scores[np.arange(len(chosen)), chosen] = -np.inf
    return scores.max(1)


def separation(beta: float, size: int, radius: float) -> float:
    """The smallest gap of inner products at which Ramsauer et al. call a memory well separated, and prove it stored."""
    return 2 / (beta * size) + np.log(2 * (size - 1) * size * beta * radius**2) / beta


def mean_field(beta: float, width: int) -> float | None:
    """Largest number of memories for which mean field theory has a fixed point at a memory.

    Let x = r m be on the ray of the memory m, of weight w. Each of the others is replaced by its mean over the sphere:
    with the cosine t of a random direction, κ = β d r and Z = <exp(κ t)>, their weights add to (N - 1) Z and their mean
    is A m, A = <t exp(κ t)> / Z. Then

        r = w + (1 - w) A,   w = exp(κ) / (exp(κ) + (N - 1) Z)   <=>   N - 1 = exp(κ) / Z (1 - r) / (r - A).

    From r = 1 downwards N grows to a maximum, where the fixed point meets an unstable one and both vanish. None if it
    grows without bound: the fixed point moves away from the memory gradually.
    """
    cosines = np.cos(np.linspace(0, np.pi, 4001))
    density = np.sqrt(1 - cosines**2) ** (width - 2)
    rays = np.linspace(1, 0.3, 701)[1:, None]
    weights = density * np.exp(beta * width * rays * (cosines - 1))
    mean = weights.sum(1) / density.sum()  # Z exp(-κ)
    lean = (weights * cosines).sum(1) / weights.sum(1)  # A
    rays = rays[:, 0]
    end = int(np.argmax(rays <= lean)) or len(rays)
    number = (1 - rays[:end]) / (rays[:end] - lean[:end]) / mean[:end]
    falls = np.flatnonzero(np.diff(number) < 0)
    return float(1 + number[falls[0]]) if falls.size else None


def theorem_3(beta: float, width: int, failure: float) -> float:
    """The number of memories that Theorem 3 of Ramsauer et al. proves to be stored: √p c^((d-1)/4).

    All are stored, on the sphere of radius √d, except with a probability of failure p.
    """
    c = growth(beta, width / (width - 1), width, failure)
    return float(failure**0.5 * c ** ((width - 1) / 4))


def growth(beta: float, square: float, width: int, failure: float) -> float:
    """The constant c of Theorem 3, on the sphere of radius K √(d-1), where `square` is K²."""
    a = 2 / (width - 1) * (1 + np.log(2 * beta * square * failure * (width - 1)))
    b = 2 * square * beta / 5
    return b / lambert(np.exp(a + np.log(b)))


def lambert(x: float) -> float:
    """The upper branch of Lambert's W: w e^w = x, for x above zero."""
    w = np.log1p(x)
    for _ in range(50):
        w -= (w - x * np.exp(-w)) / (1 + w)
    return float(w)


def table(result: dict[str, Any]) -> str:
    """Prints mean retrieval errors, a line for each β, and the theoretical capacities."""
    lines = [
        "mean |x - m| / M; down: β; across: number of memories; then: mean field's number, and",
        "the one that Theorem 3 proves, with probability 1/2",
        "      " + "".join(f"{size:>6}" for size in result["memories"]) + "    mean f.  proved",
    ]
    for i, beta in enumerate(result["betas"]):
        field_number, proved = (result[name][i] for name in ("mean_field", "theorem_3"))
        errors = "".join(f"{error:>6.2f}" for error in result["error"][i])
        field_number = "none" if field_number is None else f"{field_number:.0f}"
        lines.append(f"{beta:>6.3g}{errors}{field_number:>12}{proved:>8.2g}")
    return "\n".join(lines)


def borders(centres: list[float]) -> np.ndarray:
    """The borders of cells around some centres on a logarithmic axis, one more than the centres."""
    logs = np.log(centres)
    middles = (logs[1:] + logs[:-1]) / 2
    return np.exp([2 * logs[0] - middles[0], *middles, 2 * logs[-1] - middles[-1]])


def draw(result: dict[str, Any]) -> Any:
    """A figure of the errors over both axes, and along the number of memories.

    Raises `ImportError` without matplotlib.
    """
    import matplotlib
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    width, (betas, sizes) = result["width"], (result["betas"], result["memories"])
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    limits = borders(sizes), borders(betas)
    colours = {"cmap": "magma", "vmin": 0, "vmax": 1, "edgecolors": "face", "linewidth": 0.4}
    shown = left.pcolormesh(*limits, result["error"], **colours)
    bar = figure.colorbar(shown, ax=left, pad=0.02)
    bar.set_label("mean error  |x − m| / M")
    bar.outline.set_visible(False)
    fine = np.geomspace(betas[0], betas[-1], 200)
    left.plot(
        [mean_field(beta, width) for beta in fine], fine, color="#39c5bb", lw=2, label="mean field"
    )
    left.contour(sizes, betas, result["separated"], [0.5], colors="white", linestyles="--")
    left.plot([], [], "--", color="white", label="proof holds for half of them")
    left.set(xscale="log", yscale="log", xlim=limits[0][[0, -1]], ylim=limits[1][[0, -1]])
    left.set_yticks(betas[::4], [f"{beta:.3g}" for beta in betas[::4]])
    left.minorticks_off()
    left.set_title("Where memories are retrieved", fontsize=10)
    box = {"frameon": True, "facecolor": "0.25", "labelcolor": "white", "framealpha": 0.8}
    left.legend(loc="lower right", fontsize=8, **box)
    colours = matplotlib.colormaps["viridis"]
    scale = LogNorm(betas[0], betas[-1] * 1.3)
    for beta, errors in zip(betas[::4], result["error"][::4], strict=True):
        colour = colours(scale(beta))
        right.plot(sizes, errors, "o-", color=colour, ms=4, lw=1.6, label=f"β = {beta:.3g}")
        right.axvline(mean_field(beta, width) or np.nan, color=colour, lw=0.8, ls=":")
    right.set(xscale="log", xlim=(sizes[0] * 0.8, sizes[-1] * 1.25), ylim=(-0.03, 1.08))
    right.set_title("Error against their number; dotted: mean field", fontsize=10)
    right.set_ylabel("mean error  |x − m| / M")
    right.legend(frameon=False, fontsize=8, loc="center left")
    right.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("inverse temperature β")
    for axes in (left, right):
        axes.set_xlabel("number of memories N")
    title = f"Modern Hopfield network, d = {width}, memories on the sphere of radius √d, probes off by {NOISE:g} √d"
    figure.suptitle(title, fontsize=11)
    return figure


def run(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes; returns 0. Raises `OSError`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    option = parser.add_argument
    option("--out", type=Path, default=Path(__file__).parent, help="folder for the files")
    option("--memories", type=int, nargs="+", default=MEMORIES, help="their numbers")
    option("--betas", type=float, nargs="+", default=BETAS, help="inverse temperatures")
    option("--width", type=int, default=WIDTH, help="of a memory (%(default)s)")
    option("--probes", type=int, default=PROBES, help="for each number (%(default)s)")
    args = parser.parse_args(arguments)
    began = time.perf_counter()
    result = {
        "width": args.width,
        "probes": args.probes,
        "noise": NOISE,
        "seed": SEED,
        "max_steps": STEPS,
        "memories": list(args.memories),
        "betas": list(args.betas),
        "mean_field": [mean_field(beta, args.width) for beta in args.betas],
        "theorem_3": [theorem_3(beta, args.width, 0.5) for beta in args.betas],
        **measure(tuple(args.memories), tuple(args.betas), args.width, args.probes),
    }
    print(table(result))
    write(result, args.out / "capacity", draw)
    print(f"\n{time.perf_counter() - began:.0f} s; written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(run())
