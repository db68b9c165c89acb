"""A flow of point clouds in one step: a transformer trained with the MeanFlow loss, which contains a derivative.

    python papers/meanflow/meanflow.py

trains the same model with this library's attention and with jax.nn's, compares their errors and the memory of their
training steps, and draws clouds that one evaluation makes of noise. Geng et al., arXiv:2505.13447.
"""

import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _training import SEED, Attend, Experiment, run

WIDTH, HEADS, LAYERS, FREQUENCIES, POINTS = 48, 4, 3, 4, 32


def clouds(key: PRNGKeyArray, count: int, points: int) -> Float[Array, "count points 2"]:
    """Clouds of points about circles of random radii: a cloud's points agree on theirs by attention."""
    keys = jax.random.split(key, 3)
    radius = jax.random.uniform(keys[0], (count, 1, 1), minval=0.5, maxval=1.5)
    angle = jax.random.uniform(keys[1], (count, points), maxval=2 * jnp.pi)
    on_circle = jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)
    return radius * on_circle + 0.03 * jax.random.normal(keys[2], (count, points, 2))


class Block(eqx.Module):
    """A layer of a diffusion transformer: attention and a perceptron, scaled and shifted by the times."""

    to_heads: eqx.nn.Linear
    from_heads: eqx.nn.Linear
    perceptron: eqx.nn.MLP
    modulation: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    attend: Attend = eqx.field(static=True)

    def __init__(self, attend: Attend, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.to_heads = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=keys[0])
        self.from_heads = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.perceptron = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[2])
        # zero at first: then every layer is the identity
        zero = eqx.nn.Linear(WIDTH, 6 * WIDTH, key=key)
        self.modulation = jax.tree.map(jnp.zeros_like, zero)
        self.norm = eqx.nn.LayerNorm(WIDTH, use_weight=False, use_bias=False)
        self.attend = attend

    def __call__(self, x: Float[Array, "points width"], times: Float[Array, " width"]) -> Array:
        """Returns `[points, width]`."""
        shift, scale, gate, *mlp_modulation = jnp.split(self.modulation(jax.nn.silu(times)), 6)
        heads = jax.vmap(self.to_heads)(jax.vmap(self.norm)(x) * (1 + scale) + shift)
        query, key, value = jnp.split(heads.reshape(len(x), 3 * HEADS, -1), 3, axis=1)
        mixed = self.attend(query, key, value).reshape(x.shape)
        x = x + gate * jax.vmap(self.from_heads)(mixed)
        shift, scale, gate = mlp_modulation
        return x + gate * jax.vmap(self.perceptron)(jax.vmap(self.norm)(x) * (1 + scale) + shift)


class Flow(eqx.Module):
    r"""The average velocity $u(z, r, t)$ of a cloud from time $t$ back to $r$, for each of its points."""

    enter: eqx.nn.Linear
    times: eqx.nn.MLP
    blocks: tuple[Block, ...]
    leave: eqx.nn.Linear

    def __init__(self, attend: Attend, key: PRNGKeyArray):
        keys = jax.random.split(key, 3 + LAYERS)
        self.enter = eqx.nn.Linear(2, WIDTH, key=keys[0])
        self.times = eqx.nn.MLP(4 * FREQUENCIES, WIDTH, WIDTH, 1, jax.nn.silu, key=keys[1])
        self.leave = eqx.nn.Linear(WIDTH, 2, key=keys[2])
        self.blocks = tuple(Block(attend, key) for key in keys[3:])

    def __call__(self, z: Float[Array, "points 2"], r: Array, t: Array) -> Float[Array, "points 2"]:
        """The velocity of each point."""
        angles = jnp.stack([t, t - r])[:, None] * jnp.geomspace(1.0, 6.0, FREQUENCIES)
        times = self.times(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).reshape(-1))
        x = jax.vmap(self.enter)(z)
        for block in self.blocks:
            x = block(x, times)
        return jax.vmap(self.leave)(x)


def loss(
    flow: Flow, data: Float[Array, "batch points 2"], key: PRNGKeyArray
) -> tuple[Array, Array]:
    r"""MeanFlow loss of a batch, weighted for training, and the mean square error.

    With $z_t = (1 - t)\, x + t\, \epsilon$ and $v = \epsilon - x$,

    $$\mathcal{L} = \mathbb{E} \| u(z_t, r, t) - \mathrm{sg}(u_{tgt}) \|^2, \qquad
      u_{tgt} = v - (t - r) (v \cdot \partial_z u + \partial_t u)$$

    where sg holds constant: equations 10 and 11. Squares are divided by themselves plus a constant, held
    constant, as in the paper, so that the weighted loss itself is not informative.
    """

    def one(x: Array, key: PRNGKeyArray) -> Array:
        of_noise, of_times, of_equal = jax.random.split(key, 3)
        noise = jax.random.normal(of_noise, x.shape)
        r, t = jnp.sort(jax.random.uniform(of_times, (2,)))
        r = jnp.where(jax.random.bernoulli(of_equal, 0.5), t, r)  # then u is the velocity itself
        z, velocity = (1 - t) * x + t * noise, noise - x
        u, rate = jax.jvp(flow, (z, r, t), (velocity, jnp.zeros_like(r), jnp.ones_like(t)))
        error = u - jax.lax.stop_gradient(velocity - (t - r) * rate)
        square = (error**2).mean()
        return square / jax.lax.stop_gradient(square + 1e-2), square

    weighted, squares = jax.vmap(one)(data, jax.random.split(key, len(data)))
    return weighted.mean(), squares.mean()


@eqx.filter_jit
def generate(flow: Flow, noise: Float[Array, "count points 2"]) -> Float[Array, "count points 2"]:
    """Clouds from noise, each in one evaluation: $x = z_1 - u(z_1, 0, 1)$."""
    return noise - jax.vmap(flow, (0, None, None))(noise, jnp.zeros(()), jnp.ones(()))


def roundness(made: Float[np.ndarray, "count points 2"]) -> float:
    """The mean over clouds of the standard deviation of distances from the origin, over their mean."""
    distance = np.linalg.norm(made, axis=-1)
    return float((distance.std(1) / distance.mean(1)).mean())


def evaluate(flow: Flow) -> dict[str, Any]:
    """The roundness of clouds that are made of noise, and some of them."""
    noise = jax.random.normal(jax.random.key(SEED + 2), (256, POINTS, 2))
    made = {
        "noise": noise,
        "made": generate(flow, noise),
        "data": clouds(jax.random.key(SEED + 3), 256, POINTS),
    }
    return {
        "roundness": {name: round(roundness(np.asarray(x)), 4) for name, x in made.items()},
        "clouds": np.round(np.asarray(made["made"][:8]), 3).tolist(),
    }


def describe(result: dict[str, Any]) -> list[str]:
    """The roundness of the clouds."""
    return [f"spread of distances from the origin: {result['roundness']}"]


def draw(result: dict[str, Any], figure: Any) -> None:
    """The clouds."""
    for axes, made in zip(figure.subplots(1, len(result["clouds"])), result["clouds"], strict=True):
        axes.scatter(*np.asarray(made).T, s=6, color="#009e73")
        axes.set(xlim=(-1.9, 1.9), ylim=(-1.9, 1.9), aspect="equal", xticks=[], yticks=[])
    figure.suptitle("Clouds made of noise in one evaluation", fontsize=11)


EXPERIMENT = Experiment(
    Path(__file__),
    __doc__ or "",
    Flow,
    clouds,
    loss,
    points=POINTS,
    steps=5000,
    rate=2e-3,
    evaluate=evaluate,
    describe=describe,
    draw=draw,
    portion=0.65,
)

if __name__ == "__main__":
    sys.exit(run(EXPERIMENT))
