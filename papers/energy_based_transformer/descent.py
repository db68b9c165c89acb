"""A transformer whose output is a minimum of its own energy, trained through the descent to it.

    python papers/energy_based_transformer/descent.py

trains the same model with this library's attention and with jax.nn's, compares their errors and the memory of their
training steps, and draws the curves that it infers and the energies that it descends. Gladstone et al., 2025,
arXiv:2507.02092.
"""

import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _training import SEED, Attend, Experiment, run

WIDTH, HEADS, LAYERS, DESCENTS, HARMONICS, POINTS = 32, 4, 2, 4, 4, 24


class Curve(eqx.Module):
    """Values of a curve at random places, and which of them are observed."""

    place: Float[Array, " points"]
    value: Float[Array, " points"]
    observed: Bool[Array, " points"]


def curves(key: PRNGKeyArray, count: int, points: int) -> Curve:
    """Random Fourier series at random places in [-1, 1], a quarter of the values observed."""
    keys = jax.random.split(key, 4)
    place = jax.random.uniform(keys[0], (count, points), minval=-1.0)
    orders = jnp.arange(1.0, HARMONICS + 1)
    weights = jax.random.normal(keys[1], (2, count, 1, HARMONICS)) / orders
    angles = place[..., None] * orders * jnp.pi / 2
    value = (weights[0] * jnp.sin(angles) + weights[1] * jnp.cos(angles)).sum(-1)
    return Curve(place, value, jax.random.bernoulli(keys[2], 0.25, (count, points)))


class Block(eqx.Module):
    """Attention and a perceptron, each added to its normalised input."""

    to_heads: eqx.nn.Linear
    from_heads: eqx.nn.Linear
    perceptron: eqx.nn.MLP
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attend: Attend = eqx.field(static=True)

    def __init__(self, attend: Attend, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.to_heads = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=keys[0])
        self.from_heads = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.perceptron = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.silu, key=keys[2])
        self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attend = attend

    def __call__(self, x: Float[Array, "points width"]) -> Float[Array, "points width"]:
        """The next features of each point."""
        heads = jax.vmap(self.to_heads)(jax.vmap(self.norms[0])(x))
        query, key, value = jnp.split(heads.reshape(len(x), 3 * HEADS, -1), 3, axis=1)
        x = x + jax.vmap(self.from_heads)(self.attend(query, key, value).reshape(x.shape))
        return x + jax.vmap(self.perceptron)(jax.vmap(self.norms[1])(x))


class Energy(eqx.Module):
    r"""The energy $E(c, y)$ of values $y$ in the context $c$, and their descent of it."""

    enter: eqx.nn.Linear
    blocks: tuple[Block, ...]
    leave: eqx.nn.Linear
    log_step: Float[Array, ""]

    def __init__(self, attend: Attend, key: PRNGKeyArray):
        keys = jax.random.split(key, 2 + LAYERS)
        self.enter = eqx.nn.Linear(3 + 2 * HARMONICS, WIDTH, key=keys[0])
        self.leave = eqx.nn.Linear(WIDTH, 1, key=keys[1])
        self.blocks = tuple(Block(attend, key) for key in keys[2:])
        self.log_step = jnp.zeros(())

    def __call__(self, curve: Curve, y: Float[Array, " points"]) -> Float[Array, ""]:
        """The energy; lower where the values fit the observed ones."""
        angles = curve.place[:, None] * jnp.arange(1.0, HARMONICS + 1) * jnp.pi / 2
        observed_values = jnp.where(curve.observed, curve.value, 0.0)
        features = [
            jnp.stack([y, observed_values, curve.observed], -1),
            jnp.sin(angles),
            jnp.cos(angles),
        ]
        x = jax.vmap(self.enter)(jnp.concatenate(features, -1))
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.leave)(x).sum()

    def descend(self, curve: Curve) -> tuple[Float[Array, " points"], Float[Array, " steps"]]:
        r"""$y \leftarrow y - \alpha \nabla_y E(c, y)$ from zero, and the energies on the way."""

        @jax.checkpoint
        def step(y: Array, _: None) -> tuple[Array, Array]:
            value, gradient = jax.value_and_grad(self, argnums=1)(curve, y)
            return y - jnp.exp(self.log_step) * gradient, value

        y, energies = jax.lax.scan(step, jnp.zeros_like(curve.value), None, length=DESCENTS)
        return y, jnp.append(energies, self(curve, y))


def loss(model: Energy, batch: Curve, key: PRNGKeyArray) -> tuple[Array, Array]:
    """The mean square error of the values at the end of the descent, twice: its gradient is of second order."""
    del key
    inferred, _ = jax.vmap(model.descend)(batch)
    error = ((inferred - batch.value) ** 2).mean()
    return error, error


def evaluate(model: Energy) -> dict[str, Any]:
    """The error of inferred values, how often energies fall, and some curves."""
    test = curves(jax.random.key(SEED + 2), 256, POINTS)
    inferred, energies = map(np.asarray, jax.jit(jax.vmap(model.descend))(test))
    place, value, observed = (np.asarray(x) for x in (test.place, test.value, test.observed))
    return {
        "hidden": {
            "error": round(float(((inferred - value) ** 2)[~observed].mean()), 4),
            "variance": round(float(value[~observed].var()), 4),
        },
        "falls": float((np.diff(energies) < 0).mean()),
        "energies": np.round(energies[:8], 3).tolist(),
        "curves": [
            [np.round(1.0 * x[i], 3).tolist() for x in (place, value, observed, inferred)]
            for i in range(4)
        ],
    }


def describe(result: dict[str, Any]) -> list[str]:
    """The error of inferred values, and how often the energy falls."""
    return [
        f"hidden values: {result['hidden']}",
        f"the energy falls in {result['falls']:.1%} of the steps of the descent",
    ]


def draw(result: dict[str, Any], figure: Any) -> None:
    """The energies on the way, and inferred curves."""
    first, *panels = figure.subplots(1, 1 + len(result["curves"]))
    for energies in result["energies"]:
        first.plot(np.asarray(energies) - energies[0], "o-", color="#009e73", ms=3, lw=1)
    first.set(xlabel="step of the descent", title="Energy, from its start")
    first.spines[["top", "right"]].set_visible(False)
    for axes, shown in zip(panels, result["curves"], strict=True):
        place, value, observed, inferred = map(np.asarray, shown)
        order = np.argsort(place)
        axes.plot(place[order], value[order], color="0.7", label="curve")
        axes.plot(place[order], inferred[order], color="#0072b2", label="inferred")
        is_observed = observed.astype(bool)
        axes.scatter(
            place[is_observed],
            value[is_observed],
            s=18,
            color="#d55e00",
            label="observed",
            zorder=3,
        )
        axes.set(xticks=[], yticks=[])
    panels[-1].legend(frameon=False, fontsize=8)


EXPERIMENT = Experiment(
    Path(__file__),
    __doc__ or "",
    Energy,
    curves,
    loss,
    points=POINTS,
    steps=2000,
    rate=2e-3,
    evaluate=evaluate,
    describe=describe,
    draw=draw,
    portion=0.75,
)

if __name__ == "__main__":
    sys.exit(run(EXPERIMENT))
