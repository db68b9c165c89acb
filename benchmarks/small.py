"""Programs of few tokens in a `lax.scan` of steps, compared with `jax.nn` and Equinox."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

import energy_attn

from .attention import Job, arrays, compilation, gradient
from .runner import JAX_NN, OURS, Case, Run, Sides

EQUINOX = "eqx.nn"
STEPS = 20
_ATTENTIONS: dict[str, Job] = {
    OURS: energy_attn.attention,
    JAX_NN: jax.nn.dot_product_attention,
}


def _along(job: Job) -> Job:
    """The derivative in a direction of query, key and value, in which each moves along the next."""
    return lambda *x: jax.jvp(job, x, (*x[1:], x[0]))[1]


def _scanned(derive: Callable[[Job], Job], dtype: str, B: int, T: int, N: int, H: int) -> Sides:
    inputs = arrays(dtype, B=B, T=T, S=T, N=N, K=N, H=H)

    def run(attend: Job) -> Run:
        job = derive(attend)

        def step(x: list[Array], _: None) -> tuple[list[Array], None]:
            found = job(*x)
            found = found if isinstance(found, tuple) else (found,) * 3
            return [a + 1e-3 * b for a, b in zip(x, found, strict=True)], None

        loop = jax.jit(lambda x: lax.scan(step, x, length=STEPS)[0])
        return functools.partial(loop, inputs)

    return {name: functools.partial(run, x) for name, x in _ATTENTIONS.items()}


def _descent(loss: Callable[[Any], Array], model: Any) -> Run:
    """Steps of gradient descent in one program."""
    moved, fixed = eqx.partition(model, eqx.is_inexact_array)

    def step(moved: Any, _: None) -> tuple[Any, None]:
        slope = jax.grad(lambda x: loss(eqx.combine(x, fixed)))(moved)
        return jax.tree.map(lambda x, y: x - 1e-2 * y, moved, slope), None

    loop = jax.jit(lambda x: lax.scan(step, x, length=STEPS)[0])
    return lambda: jax.tree.leaves(loop(moved))


def _layers(dtype: str, B: int, T: int, N: int, H: int, train: bool) -> Sides:
    """A layer that is mapped over a batch: calls of it, or steps of its training."""
    width, keys = N * H, jax.random.split(jax.random.key(0), 3)
    x, target = (jax.random.normal(key, (B, T, width), dtype) for key in keys[:2])
    theirs = eqx.nn.MultiheadAttention(N, width, key=keys[2])
    ours = energy_attn.nn.MultiheadAttention(N, width, key=keys[2])
    names = [f"{x}_proj" for x in ("query", "key", "value", "output")]
    weights = [getattr(theirs, name).weight for name in names]
    ours = eqx.tree_at(lambda y: [getattr(y, name).weight for name in names], ours, weights)

    def called(layer: Any, x: Array) -> Array:
        return jax.vmap(layer)(x, x, x)

    def run(layer: Any) -> Run:
        if train:
            return _descent(lambda y: ((called(y, x) - target) ** 2).mean(), layer)
        loop = eqx.filter_jit(
            lambda y, x: lax.scan(lambda x, _: (called(y, x), None), x, length=STEPS)[0]
        )
        return functools.partial(loop, layer, x)

    return {OURS: functools.partial(run, ours), EQUINOX: functools.partial(run, theirs)}


class _ViT(eqx.Module):
    """A vision transformer (arXiv 2010.11929) of patches that are already flat, with a mean over tokens."""

    embed: Float[Array, "pixels width"]
    blocks: list[dict[str, Float[Array, "rows columns"]]]
    classes: Float[Array, "width number"]
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, layers: int, *, key: Key[Array, ""]) -> None:
        draw = iter(jax.random.split(key, 2 + 4 * layers))

        def matrix(rows: int, columns: int) -> Array:
            return jax.random.normal(next(draw), (rows, columns)) * rows**-0.5

        self.embed, self.classes, self.heads = matrix(48, width), matrix(width, 10), heads
        shapes = {"project": 3, "join": 1, "widen": 4}
        self.blocks = [
            {name: matrix(width, n * width) for name, n in shapes.items()}
            | {"narrow": matrix(4 * width, width)}
            for _ in range(layers)
        ]

    def __call__(self, attend: Job, patches: Array) -> Array:
        x = patches @ self.embed
        for block in self.blocks:
            q, k, v = (
                y.reshape(*y.shape[:2], self.heads, -1)
                for y in jnp.split(jax.nn.standardize(x) @ block["project"], 3, -1)
            )
            x = x + attend(q, k, v).reshape(x.shape) @ block["join"]
            x = x + jax.nn.gelu(jax.nn.standardize(x) @ block["widen"]) @ block["narrow"]
        return jax.nn.standardize(x).mean(1) @ self.classes


def _vision(dtype: str, layers: int, B: int, T: int, N: int, width: int) -> Sides:
    keys = jax.random.split(jax.random.key(0), 3)
    model = _ViT(width, N, layers, key=keys[0])
    patches = jax.random.normal(keys[1], (B, T, 48), dtype)
    labels = jax.random.randint(keys[2], (B,), 0, 10)

    def run(attend: Job) -> Run:
        def loss(model: _ViT) -> Array:
            logits = jax.nn.log_softmax(model(attend, patches))
            return -jnp.take_along_axis(logits, labels[:, None], 1).mean()

        return _descent(loss, model)

    return {name: functools.partial(run, x) for name, x in _ATTENTIONS.items()}


_DERIVATIVES: dict[str, Callable[[Job], Job]] = {
    "forward": lambda x: x,
    "gradient": gradient,
    "jvp": _along,
    "Hessian-vector product": lambda x: _along(gradient(x)),
}
_SHAPES = (2, 16, 4, 8), (8, 12, 4, 16), (8, 64, 4, 16), (4, 64, 12, 64)


def _shape(*sizes: int) -> dict[str, int]:
    return dict(zip("BTNH", sizes, strict=True))


CASES = (
    *(
        Case(f"{name}, {STEPS} steps", "float32", _shape(*sizes), functools.partial(_scanned, job))
        for name, job in _DERIVATIVES.items()
        for sizes in _SHAPES
    ),
    *(
        Case(f"{name}, {STEPS} steps", "float32", _shape(16, T, 4, 8), _layers, {"train": train})
        for name, train in (("MultiheadAttention", False), ("MultiheadAttention, training", True))
        for T in (12, 16, 64)
    ),
    *(
        Case(
            "compilation, forward + backward",
            "float32",
            {"B": 2, "T": T, "S": T, "N": 4, "K": 4, "H": 32},
            compilation,
            {"causal": False, "layers": 1},
        )
        for T in (16, 64, 128, 256)
    ),
    *(
        Case(
            f"vision transformer, training, {STEPS} steps",
            "float32",
            {"layers": 4, "B": B, "T": T, "N": 4, "width": 128},
            _vision,
        )
        for B, T in ((32, 16), (16, 64))
    ),
)
