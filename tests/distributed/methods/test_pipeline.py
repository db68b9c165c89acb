"""`parallel=` inside a `jax.shard_map` over its axes: a device's part of a call, folded with the others'.

What a pipeline needs, as JAX cannot differentiate a `shard_map` inside another one that is over some axes alone.
"""

import functools
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, make_mesh, shard_sequence, unshard_sequence
from tests.support.measures import measure
from tests.support.meshes import close, mesh_of
from tests.support.problems import cast, everything
from tests.support.reference import dense, dense_vjp, rows
from tests.support.selection import few_rows

STAGES, LENGTH, WIDTH, PARTS = 2, 16, 16, 3
AXES = ("node", "device")


def layer(parallel=None):
    energy = ea.FreeEnergy(is_causal=True, parallel=parallel)
    size = {"num_heads": 8, "query_size": WIDTH, "num_kv_heads": 4, "dtype": jnp.float64}
    return ea.MultiheadAttention(**size, energy=energy, key=jax.random.key(0))


def apply(weights, x, parallel=None):
    """One stage, `[B, T, WIDTH]`; `weights` are a list of arrays."""
    arrays, static = eqx.partition(layer(parallel), eqx.is_array)
    mix = eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), weights), static)
    return x + jax.vmap(lambda x: mix(x, x, x))(x)


def pipeline(weights, x, parallel):
    """Micro-batches `[PARTS, B, T, WIDTH]` through both stages, each on its half of the mesh."""

    def stage(weights, x):
        here = [w[0] for w in weights]
        first, last = (lax.axis_index("stage") == i for i in (0, STAGES - 1))

        def tick(held, i):
            held = jnp.where(first, x[jnp.minimum(i, PARTS - 1)], held)
            out = apply(here, held, parallel)
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
    one = jax.tree.leaves(eqx.filter(layer(), eqx.is_array))
    weights = [jnp.asarray(rng.standard_normal((STAGES, *w.shape)) / 4) for w in one]
    x, direction = (jnp.asarray(rng.standard_normal((PARTS, 1, LENGTH, WIDTH))) for _ in range(2))

    def alone(weights, x):
        for s in range(STAGES):
            x = jax.vmap(functools.partial(apply, [w[s] for w in weights]))(x)
        return x

    def slopes(run):
        loss = lambda *arrays: (run(*arrays) * direction).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(weights, x)

    def spread(weights, x):
        out = pipeline(weights, shard_sequence(x, parallel, axis=2), parallel)
        return unshard_sequence(out, parallel, axis=2)

    exact = slopes(alone)
    with jax.set_mesh(make_mesh((STAGES, 2, 2), ("stage", *AXES))):
        found = slopes(spread)
    jax.tree.map(close, found, jax.device_get(exact))


@pytest.mark.full
@pytest.mark.parametrize("method", ["tree", "ring"])
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
    for name, slope in dense_vjp(plain, np.asarray(direction), np.zeros(energy.shape)).items():
        close(gradients[name], slope, name)


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
    x = jnp.sin(jnp.arange(64.0)).reshape(2, 8, 2, 2)
    with jax.set_mesh(make_mesh((2, 4), ("stage", "device"))):
        found = gradient_of_stages("ring")(x)
    wanted = jax.grad(lambda x: jnp.sin(ea.attention(x, x, x)).sum())(x)
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_limits_of_jax():
    """What docs/guide.md says that JAX cannot differentiate: if this fails, newer JAX can, and the page may say so."""
    with jax.set_mesh(make_mesh((2, 4), ("stage", "device"))):
        with pytest.raises(ValueError, match="(?i)manual"):
            gradient_of_stages("tree").lower(jnp.ones((2, 8, 1, 2)))
