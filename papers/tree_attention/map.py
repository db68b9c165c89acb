"""The convergence of the solvers of the Bayesian reading: python papers/tree_attention/map.py writes map.json.

For each of 50 seeds: 64 keys of width 8 with values of width 8 and one query, all standard normal, at inverse
temperatures β (the scale of the scores is β/√8). The point whose conjugate is asked for is a mean of the values with
weights drawn evenly from all weights (Dirichlet). All seeds are solved in one call, as rows of a batch.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import energy_attn as ea
from energy_attn.bayes import saddle_attention as saddle
from energy_attn.solvers import Extragradient, Mirror, Newton, Optax, Optimistic

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


def measure(dtype: str) -> list[dict[str, Any]]:
    """The figures of one dtype, a dictionary for each inverse temperature."""
    arrays, inside, outside = problem(dtype)
    most = {"max_steps": 10000, "tolerance": 1e-8 if dtype == "float64" else 1e-5}
    newton, lbfgs = Newton(max_steps=200), Optax(optax.lbfgs(), max_steps=200)
    programs = {
        "conjugate, Newton": lambda P: P.conjugate(inside, solver=newton, throw=False),
        "conjugate, L-BFGS": lambda P: P.conjugate(inside, solver=lbfgs, throw=False),
        "outside": lambda P: P.conjugate(outside, solver=newton, throw=False),
        "MAP, Newton": lambda P: P.map(solver=Newton(), throw=False),
        "MAP, Newton, λ = 1": lambda P: P.map(regulariser=1.0, solver=Newton(), throw=False),
        "MAP, mirror descent": lambda P: P.map(regulariser=1.0, solver=Mirror(), throw=False),
        "saddle, extragradient": lambda P: saddle(P, solver=Extragradient(**most), throw=False),
        "saddle, optimistic": lambda P: saddle(P, solver=Optimistic(**most), throw=False),
    }
    compiled = {
        name: jax.jit(lambda scale, f=f: f(ea.FreeEnergy(scale=scale).at(**arrays)))
        for name, f in programs.items()
    }
    figures = []
    for beta in BETAS:
        scale = jnp.asarray(beta / np.sqrt(WIDTH), dtype)
        exact = np.asarray(ea.attention(**arrays, scale=scale))
        row: dict[str, Any] = {"dtype": dtype, "beta": beta}
        for name, program in compiled.items():
            solution = program(scale)
            if name == "outside":
                row[name] = int((np.asarray(solution.result) == ea.Result.outside_hull).sum())
                continue
            steps = np.asarray(solution.stats["steps"])
            converged = int(np.asarray(solution.converged).sum())
            row[name] = {"converged": converged, "median": float(np.median(steps))}
            row[name]["most"] = int(steps.max())
            if solution.point is not None:
                row[name]["error"] = float(abs(np.asarray(solution.point) - exact).max())
        figures.append(row)
    return figures


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown: a row for each method, median (largest) steps in float64 / float32."""
    rows = figures["rows"]
    names = [name for name, x in rows[0].items() if isinstance(x, dict)]
    lines = ["| | " + " | ".join(f"β = {beta:g}" for beta in BETAS) + " |", "|---" * 6 + "|"]
    for name in names:
        cells = []
        for beta in BETAS:
            pair = []
            for dtype in DTYPES:
                (x,) = (r[name] for r in rows if (r["dtype"], r["beta"]) == (dtype, beta))
                some = "" if x["converged"] == SEEDS else f", {x['converged']}/{SEEDS}"
                pair.append(f"{x['median']:g} ({x['most']}){some}")
            cells.append(" / ".join(pair))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints, and writes the figures."""
    jax.config.update("jax_enable_x64", True)
    rows = [row for dtype in DTYPES for row in measure(dtype)]
    figures = {"seeds": SEEDS, "keys": KEYS, "width": WIDTH, "rows": rows}
    print(table(figures))
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
