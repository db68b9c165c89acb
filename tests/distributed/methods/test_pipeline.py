"""`parallel=` inside a `jax.shard_map` over its axes: a device's part of a call, folded with the others'.

What a pipeline needs, as JAX cannot differentiate a `shard_map` inside another one that is over some axes alone.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, make_mesh, shard_sequence, unshard_sequence
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.naive import naive
from tests.support.observables import measure
from tests.support.problems import cast, everything
from tests.support.reference import dense, dense_vjp, rows
from tests.support.selection import few, few_rows

STAGES, LENGTH, WIDTH, PARTS = 2, 16, 16, 2
AXES = ("node", "device")


def apply(weights, x, attend):
    """One stage, `[B, T, WIDTH]`: attention of 8 heads, by `attend`; `weights` are of queries, keys and values."""
    query, key, value = ((x @ w).reshape(*x.shape[:-1], 8, -1) for w in weights)
    return x + attend(query, key, value, is_causal=True).reshape(x.shape)


def on_one_device(query, key, value, is_causal=False):
    """Naive attention."""
    seen = jnp.tril(jnp.ones((query.shape[1], key.shape[1]), bool)) | (not is_causal)
    arrays = {"query": query, "key": key, "value": value}
    return naive(arrays, seen[None, None], scale=query.shape[-1] ** -0.5)[0]


def pipeline(weights, x, parallel):
    """Micro-batches `[PARTS, B, T, WIDTH]` through both stages, each on its half of the mesh."""
    attend = functools.partial(ea.attention, parallel=parallel)

    def stage(weights, x):
        first, last = (lax.axis_index("stage") == i for i in (0, STAGES - 1))

        def tick(held, i):
            held = jnp.where(first, x[jnp.minimum(i, PARTS - 1)], held)
            out = apply(weights[0], held, attend)
            on = lax.ppermute(out, "stage", [(s, (s + 1) % STAGES) for s in range(STAGES)])
            return on, jnp.where(last, out, 0)

        start = lax.pcast(jnp.zeros_like(x[0]), "stage", to="varying")
        _, found = lax.scan(tick, start, jnp.arange(PARTS + STAGES - 1))
        return lax.psum(found[STAGES - 1 :], "stage")

    sequence = P(None, None, AXES)
    return jax.shard_map(stage, in_specs=(P("stage"), sequence), out_specs=sequence)(weights, x)


@pytest.mark.parametrize(
    ("method", "layout"),
    few_rows(
        [
            ("ring", "zigzag"),
            ("tree", "contiguous"),
            ("ulysses", "striped"),
            ("hybrid", "zigzag"),
            ("gather", "striped"),
        ]
    ),
)
def test_pipeline(method, layout):
    """Gradients through stages and devices at once: positions of a part, a gradient that is not summed, or twice."""
    parallel = SequenceParallel(AXES, method, layout=layout)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((STAGES, 3, WIDTH, WIDTH)) / 4
    x, direction = rng.standard_normal((2, PARTS, 1, LENGTH, WIDTH))

    def alone(weights, x):
        x = x[:, 0]
        for stage in weights:
            x = apply(stage, x, on_one_device)
        return x[:, None]

    def slopes(run):
        loss = lambda *arrays: (run(*arrays) * direction).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(weights, x)

    def spread(weights, x):
        out = pipeline(weights, shard_sequence(x, parallel, axis=2), parallel)
        return unshard_sequence(out, parallel, axis=2)

    exact = slopes(alone)
    with jax.set_mesh(make_mesh((STAGES, 2, 2), ("stage", *AXES))):
        found = slopes(spread)
    close(found, exact)


@pytest.mark.parametrize("method", few(["tree", "ring"], "tree"))
def test_queries_on_all_devices(method):
    """A step of decoding: queries taken for a part of them, attention that is summed over devices, an observable."""
    whole = everything("inside", B=2, T=5, S=16)
    problem = replace(
        whole, bias=None, mask=None, query_seq_lengths=None, key_value_seq_lengths=None
    )
    arrays, _ = cast(problem, jnp.float64)
    direction = jnp.asarray(problem.rng("direction").standard_normal(dense(problem)[0].shape))
    options = problem.options | {"parallel": SequenceParallel("device", method)}
    numbers = {n: options.pop(n) for n in ("query_segment_ids", "key_segment_ids")}

    def part(arrays, numbers):
        source = arrays.pop("source")
        F = measure(**arrays, **numbers, **options)
        return F.attention(), F(source), F.entropy()

    def spread(arrays):
        keys = {"key", "value", "key_segment_ids"}
        specs = [{n: P(None, "device") if n in keys else P() for n in x} for x in (arrays, numbers)]
        return jax.shard_map(part, in_specs=tuple(specs), out_specs=P())(arrays, numbers)

    def run(arrays):
        (out, energy, entropy), back = jax.vjp(spread, arrays)
        zero = jnp.zeros_like(energy)
        return out, energy, entropy, back((direction, zero, zero))[0]

    with jax.set_mesh(mesh_of("8")):
        out, energy, entropy, gradients = jax.jit(run)(arrays)
    plain = replace(problem, source=None)
    close(out, dense(plain)[0])
    close(energy, dense(problem)[1])
    weights = rows(plain).weights
    exact = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1).transpose(0, 2, 1)
    close(entropy, exact)
    slopes = dense_vjp(plain, np.asarray(direction), np.zeros(energy.shape))
    close({name: gradients[name] for name in slopes}, slopes)


def gradient_of_stages(method):
    """The gradient through a `jax.shard_map` over stages, inside of which attention is over the other axis."""
    attend = functools.partial(ea.attention, parallel=SequenceParallel("device", method))

    def total(x):
        stage = jax.shard_map(
            lambda x: jnp.sin(attend(x, x, x)),
            in_specs=P("stage"),
            out_specs=P("stage"),
            axis_names={"stage"},
        )
        return stage(x).sum()

    return jax.jit(jax.grad(total))


def test_a_ring_inside_stages():
    """A gradient that is not that of the whole."""
    x = np.sin(np.arange(64.0)).reshape(2, 8, 2, 2)
    with jax.set_mesh(make_mesh((2, 4), ("stage", "device"))):
        found = gradient_of_stages("ring")(x)
    wanted = jax.jit(jax.grad(lambda x: jnp.sin(on_one_device(x, x, x)).sum()))(x)
    close(found, wanted, tolerance=1e-12)


def test_limits_of_jax():
    """What docs/devices.md says that JAX cannot differentiate; if this fails, newer JAX can: update the page."""
    with jax.set_mesh(make_mesh((2, 4), ("stage", "device"))):
        with pytest.raises(ValueError, match="(?i)manual"):
            gradient_of_stages("tree").lower(jnp.ones((2, 8, 1, 2)))
