"""States folded over mesh axes are the states folded in one place: `merge_across` and `logsumexp_across`."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import collectives, logsumexp_across, merge_across
from energy_attn.kernels import AttentionState, merge_all
from tests.support.meshes import batches_psum, close, merges_for, mesh_of, parallel_of
from tests.support.selection import few

ROWS, WIDTH = (2, 3), 4
CASES = ("full", "empty shards", "empty rows", "up", "down", "junk")


def parts(case, dtype=np.float64) -> AttentionState:
    """Eight states `[8, *ROWS, WIDTH]`. Row (0, 0) and others have shards without keys; in "empty rows" all of them."""
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal((8, *ROWS, WIDTH)), 3 * rng.standard_normal((8, *ROWS))
    lse += {"up": 1e4, "down": -1e4}.get(case, 0)
    if case != "full":
        lse[[1, 7]] = -np.inf  # the last device holds nothing, as when keys are few
        lse[:7, 0, 0] = -np.inf
        lse[7, 0, 0] = 0.5
        out = np.where(np.isinf(lse)[..., None], 0, out)
    if case == "empty rows":
        lse[:, 1, 1:] = -np.inf
        out[:, 1, 1:] = 0
    if case == "junk":  # beside an energy of no keys
        out[1], lse[2, 1], out[2, 1] = np.nan, -np.inf, np.inf
    return AttentionState(jnp.asarray(out, dtype), jnp.asarray(lse))


def folds(kind, merge):
    """A compiled program for both folds over all axes of the mesh, and their pullbacks."""
    axes = parallel_of(kind).axes

    def spread(f):
        return jax.shard_map(
            lambda parts: f(jax.tree.map(lambda x: x[0], parts)),
            in_specs=P(axes),
            out_specs=P(),
        )

    state = spread(functools.partial(merge_across, axis_name=axes, merge=merge))
    energy = spread(functools.partial(logsumexp_across, axis_name=axes, merge=merge))

    @jax.jit
    def run(parts, cotangent):
        merged, pull_state = jax.vjp(state, parts)
        total, pull_energy = jax.vjp(energy, parts.lse)
        return merged, total, pull_state(cotangent)[0], pull_energy(cotangent.lse)[0]

    return run


@pytest.mark.parametrize(
    ("kind", "merge"),
    [
        ("8", "allreduce"),
        ("8", "gather"),
        ("8", "butterfly"),
        ("2x4", "allreduce"),
        ("2x4", "butterfly"),
        ("2x4", "hierarchical"),
        ("2x4", "ring"),
        ("8", "remote"),
        ("2x4 explicit", "auto"),
    ],
)
def test_folds_and_gradients(kind, merge):
    """A fold across devices that differs from the fold in one place: a weight, a maximum, an empty shard, a gradient.

    Values against float64 logsumexp, gradients against the softmax weights and `merge_all`'s; all finite.
    """
    rng = np.random.default_rng(1)
    cotangent = AttentionState(
        *(jnp.asarray(rng.standard_normal(s)) for s in ((*ROWS, WIDTH), ROWS))
    )
    alone = jax.jit(lambda parts, cotangent: jax.vjp(merge_all, parts)[1](cotangent)[0])
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        run, sharding = folds(kind, merge), NamedSharding(mesh, P(parallel_of(kind).axes))
        given = {case: jax.device_put(parts(case), sharding) for case in CASES}
        found = {case: run(given[case], cotangent) for case in CASES}
        found = jax.device_get(found)
    cotangent = jax.device_get(cotangent)
    for case, (merged, total, pulled, pulled_lse) in found.items():
        given = parts(case)
        lse = np.where(np.isfinite(given.lse), given.lse, -np.inf)
        out = np.where(np.isfinite(lse)[..., None], given.out, 0)
        exact = scipy.special.logsumexp(lse, axis=0)
        weight = np.exp(lse - np.where(np.isfinite(exact), exact, 0))
        close(merged.lse, exact, case)
        close(total, exact, case)
        close(merged.out, np.einsum("i...,i...h->...h", weight, out), case)
        close(pulled_lse, weight * cotangent.lse, case)
        close(pulled.out, weight[..., None] * cotangent.out, case)
        expected = jax.device_get(alone(given, cotangent))
        close(pulled.out, expected.out, case)
        close(pulled.lse, expected.lse, case)
        for gradient in (pulled.out, pulled.lse, pulled_lse):
            assert np.isfinite(gradient).all(), case
    assert np.isneginf(found["empty rows"][1]).sum() == 2


ROUNDS = {1: 0, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3, 7: 3, 8: 3}


# The others run the same code as these.
SIZES = [(1,), (3,), (5,), (6,), (7,), (2, 3), (3, 2), (2, 2, 2)]


@pytest.mark.parametrize("sizes", few(SIZES, (2, 3)), ids=str)
def test_any_number_of_devices(sizes):
    """Numbers that are no powers of two, which an exchange by pairs leaves out; replicas that differ in a bit.

    A butterfly over p devices takes ⌈log2 p⌉ rounds along each axis. All derivatives need no communication at all.
    """
    devices, axes = math.prod(sizes), ("a", "b", "c")[: len(sizes)]
    given = jax.tree.map(lambda x: x[:devices], parts("empty shards"))
    exact = merge_all(given)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(sizes), axes)
    for merge in merges_for(len(sizes)):

        def fold(out, lse, merge=merge):
            return merge_across(AttentionState(out[0], lse[0]), axes, merge)

        def slope(given, fold=fold):
            merged = jax.shard_map(fold, in_specs=P(axes), out_specs=P())(*given)
            return (merged.out**2).sum() + jnp.where(jnp.isfinite(merged.lse), merged.lse, 0).sum()

        with jax.set_mesh(mesh):
            each = jax.shard_map(
                lambda *x, fold=fold: jax.tree.map(lambda y: y[None], fold(*x)),
                in_specs=P(axes),
                out_specs=P(axes),
            )
            compiled = jax.jit(each).lower(*given).compile()
            out, lse = jax.device_get(compiled(*given))
            back = jax.jit(jax.grad(slope)).lower(given).compile()
        assert (out == out[:1]).all() and (lse == lse[:1]).all(), merge
        close(out[0], exact.out, merge)
        close(lse[0], exact.lse, merge)
        found = collectives(compiled)
        assert [(c.kind, c.bytes) for c in collectives(back)] == [
            (c.kind, c.bytes) for c in found
        ], merge
        if merge in ("butterfly", "remote"):  # the kernel is for TPUs
            assert {c.kind for c in found} <= {"collective-permute"}
            assert len(found) == sum(ROUNDS[size] for size in sizes)
        if merge == "gather" and devices > 1:
            assert [c.kind for c in found] == ["all-gather"]


def test_a_ring_of_any_length_is_one_loop():
    """A permute of its own for each step: at 256 devices two megabytes of text for one fold."""

    def text(devices):
        mesh = AbstractMesh((devices,), ("device",))
        rows = NamedSharding(mesh, P("device"))
        given = [
            jax.ShapeDtypeStruct((devices, *shape), jnp.float32, sharding=rows)
            for shape in ((*ROWS, WIDTH), ROWS)
        ]

        def fold(out, lse):
            return merge_across(AttentionState(out[0], lse[0]), "device", "ring")

        spread = jax.shard_map(fold, mesh=mesh, in_specs=P("device"), out_specs=P())
        return jax.jit(spread).trace(*given).lower(lowering_platforms=("cpu",)).as_text()

    # a list of all devices is on one line
    assert text(64).count("\n") == text(32).count("\n")


def test_forward_mode():
    """A derivative of a fold that is another in forward mode: the rule is written for it and transposed by JAX."""
    given = parts("empty shards")
    rng = np.random.default_rng(3)
    change = AttentionState(*(jnp.asarray(rng.standard_normal(x.shape)) for x in given))
    _, exact = jax.jvp(merge_all, (given,), (change,))
    with jax.set_mesh(mesh_of("2x4")):
        for merge in ("gather", "hierarchical"):
            fold = jax.shard_map(
                lambda out, lse, merge=merge: merge_across(
                    AttentionState(out[0], lse[0]), ("node", "device"), merge
                ),
                in_specs=P(("node", "device")),
                out_specs=P(),
            )
            _, found = jax.jit(lambda x, dx, fold=fold: jax.jvp(fold, tuple(x), tuple(dx)))(
                given, change
            )
            jax.tree.map(close, AttentionState(*found), exact)


def test_halving_is_equal_on_all_devices():
    """A share that a device keeps, rounded in another way than the one that it sends: by one bit, on some devices."""
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal((8, 24, 7)), 3 * rng.standard_normal((8, 24))
    with jax.set_mesh(mesh_of("2x4")):
        axes = parallel_of("2x4").axes

        def fold(*parts):
            state = AttentionState(*(x[0] for x in parts))
            return [x[None] for x in merge_across(state, axes, "halving")]

        run = jax.shard_map(fold, in_specs=P(axes), out_specs=P(axes), check_vma=False)
        found = [np.asarray(x) for x in jax.jit(run)(out, lse)]
    assert all((x == x[0]).all() for x in found)


def test_axes_one_by_one():
    """A fold over one axis that reaches over the other, or a result that depends on the order of folding."""
    state = parts("empty shards")

    def f(state):
        state = AttentionState(state.out[0], state.lse[0])
        within = merge_across(state, "device")
        by_steps = merge_across(within, "node")
        other_way = merge_across(merge_across(state, "node"), "device")
        return jax.tree.map(lambda x: x[None], within), by_steps, other_way

    with jax.set_mesh(mesh_of("2x4")):
        within, *both = jax.jit(
            jax.shard_map(f, in_specs=P(("node", "device")), out_specs=(P("node"), P(), P()))
        )(state)
    for node in range(2):
        half = jax.tree.map(lambda x: x[4 * node : 4 * node + 4], state)  # noqa: B023
        close(within.out[node], merge_all(half).out)
        close(within.lse[node], merge_all(half).lse)
    for found in both:
        jax.tree.map(close, found, merge_all(state))


@pytest.mark.parametrize(
    ("dtype", "merge"),
    [("bfloat16", "allreduce"), ("bfloat16", "butterfly"), ("float16", "gather")],
)
def test_narrow_outputs(dtype, merge):
    """Sums in the dtype of `out`: eight bfloat16 shards would err by 0.16 where float32 errs by a rounding."""
    given = parts("full", dtype)
    given = given._replace(lse=given.lse.astype(jnp.float32))
    with jax.set_mesh(mesh_of("8")):
        spread = jax.shard_map(
            lambda out, lse: merge_across(AttentionState(out[0], lse[0]), "device", merge),
            in_specs=P("device"),
            out_specs=P(),
        )
        merged = jax.device_get(jax.jit(spread)(*given))
    assert merged.out.dtype == dtype and merged.lse.dtype == np.float32
    exact = merge_all(jax.tree.map(lambda x: x.astype(jnp.float64), given))
    np.testing.assert_allclose(merged.lse, exact.lse, rtol=1e-6)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        merged.out.astype(np.float64), exact.out, rtol=0, atol=eps * np.abs(exact.out).max()
    )


@batches_psum
def test_second_derivative():
    """A maximum that is differentiated, or held constant where it must not be: the Hessian of F in the parts' energies.

    `∂²F/∂F_i∂F_j = w_i (δ_ij − w_j)`, in forward over reverse mode.
    """
    lse = jnp.asarray(np.random.default_rng(2).standard_normal(8)).at[3].set(-jnp.inf)
    with jax.set_mesh(mesh_of("8")):
        energy = jax.shard_map(
            lambda x: logsumexp_across(x[0], "device", "butterfly"),
            in_specs=P("device"),
            out_specs=P(),
        )
        hessian = jax.jit(jax.hessian(energy))(lse)
    weight = scipy.special.softmax(np.asarray(lse))
    close(hessian, np.diag(weight) - np.outer(weight, weight))
