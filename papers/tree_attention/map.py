"""The convergence of the solvers of the Bayesian reading: python papers/tree_attention/map.py [--json FILE].

For each of 50 seeds: 64 keys of width 8 with values of width 8 and one query, all standard normal, at inverse
temperatures β (the scale of the scores is β/√8). The point whose conjugate is asked for is a mean of the values with
weights drawn evenly from all weights (Dirichlet). All seeds are solved in one call, as rows of a batch.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import energy_attn as ea
from energy_attn import bayes, solvers

SEEDS, KEYS, WIDTH = 50, 64, 8
BETAS = (0.25, 1.0, 4.0, 16.0, 64.0)
DTYPES = ("float64", "float32")


def problem(dtype: str) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Query, keys and values of all seeds; points inside of the hulls, and points beyond an extreme value."""
    shapes = {"query": (1, 1, WIDTH), "key": (KEYS, 1, WIDTH), "value": (KEYS, 1, WIDTH)}
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in shapes}
    inside, outside = [], []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        for name, shape in shapes.items():
            arrays[name].append(rng.standard_normal(shape))
        values = arrays["value"][-1][:, 0]
        inside.append(rng.dirichlet(np.ones(KEYS)) @ values)
        normal = rng.standard_normal(WIDTH)
        normal /= np.linalg.norm(normal)
        outside.append(values[(values @ normal).argmax()] + 0.1 * normal)
    points = (jnp.asarray(np.stack(x)[:, None, None], dtype) for x in (inside, outside))
    return {name: jnp.asarray(np.stack(x), dtype) for name, x in arrays.items()}, *points


def summary(solution: ea.Solution) -> dict[str, Any]:
    """How many rows converged, and their steps."""
    steps = np.asarray(solution.stats["steps"])
    return {
        "converged": int(np.asarray(solution.converged).sum()),
        "median": float(np.median(steps)),
        "most": int(steps.max()),
    }


def measure(dtype: str) -> list[dict[str, Any]]:
    """The figures of one dtype, a dictionary for each inverse temperature."""
    arrays, inside, outside = problem(dtype)

    def gibbs(scale: jax.Array) -> ea.Gibbs:
        return ea.FreeEnergy(scale=scale).at(**arrays)

    def conjugate(solver: Any, point: jax.Array) -> Any:
        return lambda scale: gibbs(scale).conjugate(point, solver=solver, throw=False)

    def mode(solver: Any, regulariser: float | None) -> Any:
        return lambda scale: gibbs(scale).map(regulariser=regulariser, solver=solver, throw=False)

    def saddle(solver: Any) -> Any:
        return lambda scale: bayes.saddle_attention(gibbs(scale), solver=solver, throw=False)

    most = {"max_steps": 10000, "tolerance": 1e-8 if dtype == "float64" else 1e-5}
    newton, lbfgs = solvers.Newton(max_steps=200), solvers.Optax(optax.lbfgs(), max_steps=200)
    programs = {
        "conjugate, Newton": conjugate(newton, inside),
        "conjugate, L-BFGS": conjugate(lbfgs, inside),
        "outside": conjugate(newton, outside),
        "MAP, Newton": mode(solvers.Newton(), None),
        "MAP, Newton, λ = 1": mode(solvers.Newton(), 1.0),
        "MAP, mirror descent": mode(solvers.Mirror(), 1.0),
        "saddle, extragradient": saddle(solvers.Extragradient(**most)),
        "saddle, optimistic": saddle(solvers.Optimistic(**most)),
    }
    compiled = {name: jax.jit(f) for name, f in programs.items()}
    figures = []
    for beta in BETAS:
        scale = jnp.asarray(beta / np.sqrt(WIDTH), dtype)
        exact = np.asarray(ea.attention(**arrays, scale=scale))
        row: dict[str, Any] = {"dtype": dtype, "beta": beta}
        for name, program in compiled.items():
            solution = program(scale)
            row[name] = summary(solution)
            if solution.point is not None:
                row[name]["error"] = float(abs(np.asarray(solution.point) - exact).max())
            if name == "outside":
                row[name] = int((np.asarray(solution.result) == ea.Result.outside_hull).sum())
        figures.append(row)
    return figures


def joint_descent(steps: int = 200, size: float = 0.1) -> dict[str, Any]:
    """The error of the point when Γ is descended in both arguments, at β = 1."""
    arrays, *_ = problem("float64")
    F = ea.FreeEnergy().at(**arrays)
    slopes = jax.grad(lambda *pair: bayes.gamma(F, *pair).sum(), (0, 1))

    @jax.jit
    def descend(source: jax.Array, point: jax.Array) -> jax.Array:
        def body(_: Any, pair: Any) -> Any:
            return tuple(x - size * slope for x, slope in zip(pair, slopes(*pair), strict=True))

        return jax.lax.fori_loop(0, steps, body, (source, point))[1]

    start = jnp.broadcast_to(arrays["value"].mean(1, keepdims=True), arrays["query"].shape)
    error = descend(jnp.zeros_like(start), start) - ea.attention(**arrays)
    median = float(np.median(np.linalg.norm(np.asarray(error), axis=-1)))
    return {"steps": steps, "step size": size, "median error": median}


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown: a row for each method, median (largest) steps in float64 | float32."""
    rows = figures["rows"]
    names = [name for name, x in rows[0].items() if isinstance(x, dict)]
    lines = ["| | " + " | ".join(f"β = {beta:g}" for beta in BETAS) + " |", "|---" * 6 + "|"]
    for name in names:
        cells = []
        for beta in BETAS:
            pair = []
            for dtype in DTYPES:
                (x,) = (r[name] for r in rows if (r["dtype"], r["beta"]) == (dtype, beta))
                cell = f"{x['median']:g} ({x['most']})"
                pair.append(
                    cell if x["converged"] == SEEDS else f"{cell}, {x['converged']}/{SEEDS}"
                )
            cells.append(" / ".join(pair))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints, and writes the figures if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    figures = {
        "seeds": SEEDS,
        "keys": KEYS,
        "width": WIDTH,
        "rows": [row for dtype in DTYPES for row in measure(dtype)],
        "joint descent": joint_descent(),
    }
    print(table(figures))
    outside = [row["outside"] for row in figures["rows"]]
    print(f"points beyond an extreme value that were flagged: {outside} of {SEEDS} each")
    print(f"joint descent: {figures['joint descent']}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
