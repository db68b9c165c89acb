"""What a policy of `jax.checkpoint` keeps of a call, by its names: no attention is computed twice."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import jaxprs
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.programs import instructions

KEPT = jax.checkpoint_policies.save_only_these_names(*ea.CHECKPOINT_NAMES)
FORWARDS = "_forward", "_with_rest"


def forwards(f, *args) -> int:
    """How many kernels for the state of attention a program has."""
    names = collections.Counter(
        x.params["method"].__name__
        for x in jaxprs.equations(jax.make_jaxpr(f)(*args))
        if x.primitive.name == "attention_kernel"
    )
    return sum(names[x] for x in FORWARDS)


def gradient(attend, policy):
    def layer(x, weights):
        return jnp.sin(attend(jnp.tanh(x @ weights))).sum()

    return jax.grad(jax.checkpoint(layer, policy=policy), argnums=(0, 1))


def arrays():
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(x), jnp.float32) for x in ((1, 576, 8, 4), (4, 4))]


# On one device by energy and output, and by each way to go through the keys of a mesh.
@pytest.mark.parametrize(
    "method", [pytest.param(None, marks=pytest.mark.smoke), "tree", "ring", "ulysses", "gather"]
)
def test_one_forward(method):
    """A second forward in the backward: of the state, of what rounding took from it, or on a mesh of a merge."""
    parallel = None if method is None else SequenceParallel("device", method)
    args = arrays()

    def attend(x):
        out, energy = ea.attention(x, x, x, is_causal=True, parallel=parallel, return_energy=True)
        return out + energy[..., None]

    with jax.set_mesh(mesh_of("8")):
        kept, none, everything = (
            gradient(attend, policy)
            for policy in (
                KEPT,
                jax.checkpoint_policies.nothing_saveable,
                jax.checkpoint_policies.everything_saveable,
            )
        )
        assert forwards(kept, *args) == forwards(everything, *args) < forwards(none, *args)
        # one after the other: two programs that meet in collectives can wait for each other's threads
        found = jax.device_get(jax.jit(kept)(*args))
        close(found, jax.jit(everything)(*args), tolerance=1e-6)


def test_no_second_merge():
    """The reductions of a merge over devices, once more in the backward."""
    parallel = SequenceParallel("device", "tree", merge="allreduce", queries_sharded=False)

    def attend(x):
        return ea.attention(x, x, x, parallel=parallel)

    def maxima(policy):
        program = jax.make_jaxpr(gradient(attend, policy))(*arrays())
        return sum(x.primitive.name == "pmax" for x in jaxprs.equations(program))

    with jax.set_mesh(mesh_of("8")):
        policies = jax.checkpoint_policies
        found = maxima(KEPT)
        assert found == maxima(policies.everything_saveable) < maxima(policies.nothing_saveable)


def test_few_keys():
    """The product of weights and values computed again, where JAX differentiates the kernel."""

    def products(policy):
        def layer(*x):
            return jnp.sin(ea.attention(*map(jnp.tanh, x))).sum()

        both = jax.value_and_grad(jax.checkpoint(layer, policy=policy), (0, 1, 2))
        args = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 16, 4, 8)))
        found = instructions(jax.jit(both).lower(*args).compile())
        return sum(count for (_, name), count in found.items() if name == "dot")

    # of scores and of the output, once more of scores, and four of the backward
    assert products(KEPT) == 7
    assert products(jax.checkpoint_policies.nothing_saveable) == 8


def test_memory():
    """A policy that keeps more than the state: scores, or what comes before and after."""
    x, weights = jnp.ones((1, 256, 8, 4)), jnp.ones((4, 4))

    def stack(policy):
        def layer(x, _):
            return jnp.sin(ea.attention(*[jnp.tanh(x @ weights)] * 3)), None

        def run(x):
            return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, length=16)[0].sum()

        return jax.jit(jax.grad(run)).lower(x).compile().memory_analysis().temp_size_in_bytes

    more = stack(KEPT) - stack(jax.checkpoint_policies.nothing_saveable)
    state = 16 * 256 * 8 * (4 + 2) * x.dtype.itemsize  # out, lse and what rounding took
    assert more < 1.5 * state
