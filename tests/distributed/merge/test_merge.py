"""`merge_across` and `logsumexp_across`: states folded over mesh axes are the states folded in one place."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import collectives, logsumexp_across, make_mesh, merge_across
from energy_attn.kernels import AttentionState, CovarianceState, merge_all
from tests.support.compare import close
from tests.support.meshes import merges_for, mesh_of, parallel_of
from tests.support.selection import few, few_rows

ROWS, WIDTH = (2, 3), 4
CASES = ("full", "empty shards", "empty rows", "up", "down", "junk")


# First each merge.
FIRST = [
    ("8", "allreduce"),
    ("8", "gather"),
    ("2x4", "butterfly"),
    ("2x4", "hierarchical"),
    ("2x4", "halving"),
    ("2x4", "ring"),
    ("2x4 explicit", "auto"),
]
OTHERS = [("8", "butterfly"), ("8", "halving"), ("8", "ring"), ("2x4", "allreduce")]


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
    return AttentionState(np.asarray(out, dtype), lse)


def folds(kind, fold):
    """A compiled program for a fold over all axes of the mesh, and its pullback."""
    axes = parallel_of(kind).axes
    spread = jax.shard_map(
        lambda parts: fold(jax.tree.map(lambda x: x[0], parts), axes),
        in_specs=P(axes),
        out_specs=P(),
    )

    @jax.jit
    def run(parts, cotangent):
        merged, pull = jax.vjp(spread, parts)
        return merged, pull(cotangent)[0]

    return run


def found_by(kind, fold, cases, cotangent):
    """What `fold` and its pullback make of the cases, with one program."""
    with jax.set_mesh(mesh_of(kind)):
        run, sharding = folds(kind, fold), P(parallel_of(kind).axes)
        found = {case: run(jax.device_put(x, sharding), cotangent) for case, x in cases.items()}
        return jax.device_get(found)


def weights_of(lse):
    """Each part's share of its row, and the energy of all; no share where all are empty."""
    exact = scipy.special.logsumexp(lse, axis=0)
    return np.exp(lse - np.where(np.isfinite(exact), exact, 0)), exact


@pytest.mark.parametrize(
    ("kind", "merge"),
    [
        *(pytest.param(*row, marks=pytest.mark.smoke) for row in FIRST),
        *(pytest.param(*row, marks=pytest.mark.full) for row in OTHERS),
    ],
)
def test_folds_and_gradients(kind, merge):
    """A fold across devices that differs from the fold in one place: a weight, a maximum, an empty shard, a gradient.

    Values against float64 logsumexp, gradients against those of its formula; all finite.
    """
    rng = np.random.default_rng(1)
    cotangent = AttentionState(*(rng.standard_normal(s) for s in ((*ROWS, WIDTH), ROWS)))
    cases = {case: parts(case) for case in CASES}
    fold = functools.partial(merge_across, merge=merge)
    found = found_by(kind, fold, cases, cotangent)
    for case, (merged, pulled) in found.items():
        given = cases[case]
        lse = np.where(np.isfinite(given.lse), given.lse, -np.inf)
        out = np.where(np.isfinite(lse)[..., None], given.out, 0)
        weight, energy = weights_of(lse)
        whole = np.einsum("i...,i...h->...h", weight, out)
        along = ((out - whole) * cotangent.out).sum(-1) + cotangent.lse
        close(merged, AttentionState(whole, energy), case)
        close(pulled, (weight[..., None] * cotangent.out, weight * along), case)
    assert np.isneginf(found["empty rows"][0].lse).sum() == 2


@pytest.mark.parametrize(("kind", "merge"), few_rows([("2x4", "hierarchical"), *FIRST, *OTHERS]))
def test_energies(kind, merge):
    """States whose output has no width: an exchange of empty arrays, or the gradient of another fold."""
    cotangent = np.random.default_rng(1).standard_normal(ROWS)
    cases = {case: parts(case).lse for case in ("empty rows", "up")}
    fold = functools.partial(logsumexp_across, merge=merge)
    for case, found in found_by(kind, fold, cases, cotangent).items():
        weight, energy = weights_of(cases[case])
        close(found, (energy, weight * cotangent), case)


ROUNDS = {1: 0, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3, 7: 3, 8: 3}
SIZES = [(1,), (3,), (5,), (6,), (7,), (2, 3), (3, 2), (2, 2, 2)]
# What the other merges do does not depend on the number.
COUNTING = ("butterfly", "halving", "hierarchical")


@pytest.mark.parametrize("sizes", few(SIZES, (2, 3)), ids=str)
def test_any_number_of_devices(sizes):
    """Numbers that are no powers of two, which an exchange by pairs leaves out; replicas that differ in a bit.

    A butterfly over p devices takes ⌈log2 p⌉ rounds along each axis. All derivatives need no communication at all.
    """
    devices, axes = math.prod(sizes), ("a", "b", "c")[: len(sizes)]
    given = jax.tree.map(lambda x: x[:devices], parts("empty shards"))
    weight, energy = weights_of(given.lse)
    exact = np.einsum("i...,i...h->...h", weight, given.out), energy
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(sizes), axes)

    def fold(merge, out, lse):
        return merge_across(AttentionState(out[0], lse[0]), axes, merge)

    def slope(given):
        spread = functools.partial(fold, "butterfly")
        merged = jax.shard_map(spread, in_specs=P(axes), out_specs=P())(*given)
        return (merged.out**2).sum() + jnp.where(jnp.isfinite(merged.lse), merged.lse, 0).sum()

    with jax.set_mesh(mesh):
        for merge in (x for x in merges_for(len(sizes)) if x in COUNTING):
            each = jax.shard_map(
                lambda *x, merge=merge: jax.tree.map(lambda y: y[None], fold(merge, *x)),
                in_specs=P(axes),
                out_specs=P(axes),
            )
            compiled = jax.jit(each).lower(*given).compile()
            out, lse = jax.device_get(compiled(*given))
            assert (out == out[:1]).all() and (lse == lse[:1]).all(), merge
            close((out[0], lse[0]), exact, merge)
            if merge == "butterfly":
                found = [(c.kind, c.bytes) for c in collectives(compiled)]
        back = jax.jit(jax.grad(slope)).lower(given).compile()
    assert {kind for kind, _ in found} <= {"collective-permute"}
    assert len(found) == sum(ROUNDS[size] for size in sizes)
    assert [(c.kind, c.bytes) for c in collectives(back)] == found


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


@pytest.mark.parametrize("merge", ["halving", "hierarchical"])
def test_equal_on_all_devices(merge):
    """A share that a device keeps, rounded in another way than the one that it sends: by one bit, on some devices."""
    rng, axes = np.random.default_rng(0), ("node", "device")
    for shape, rows, width in (((2, 4), (24,), 7), ((4, 2), (2, 3, 4), 3)):
        out, lse = rng.standard_normal((8, *rows, width)), 3 * rng.standard_normal((8, *rows))

        def fold(*parts):
            state = AttentionState(*(x[0] for x in parts))
            return [x[None] for x in merge_across(state, axes, merge)]

        with jax.set_mesh(make_mesh(shape, axes)):
            run = jax.shard_map(fold, in_specs=P(axes), out_specs=P(axes), check_vma=False)
            found = [np.asarray(x) for x in jax.jit(run)(out, lse)]
        assert all((x == x[0]).all() for x in found), shape


@pytest.mark.parametrize(
    ("dtype", "merge"),
    few_rows([("bfloat16", "allreduce"), ("bfloat16", "butterfly"), ("float16", "gather")], 2),
)
def test_narrow_outputs(dtype, merge):
    """Sums in the dtype of `out`: eight bfloat16 shards would err by 0.16 where float32 errs by a rounding."""
    given = parts("full", dtype)
    given = given._replace(lse=given.lse.astype(np.float32))
    with jax.set_mesh(mesh_of("8")):
        spread = jax.shard_map(
            lambda out, lse: merge_across(AttentionState(out[0], lse[0]), "device", merge),
            in_specs=P("device"),
            out_specs=P(),
        )
        merged = jax.device_get(jax.jit(spread)(*given))
    assert merged.out.dtype == dtype and merged.lse.dtype == np.float32
    out, lse = (np.asarray(x, np.float64) for x in given)
    weight, energy = weights_of(lse)
    close(merged.lse, energy, tolerance=1e-6)
    exact = np.einsum("i...,i...h->...h", weight, out)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        merged.out.astype(np.float64), exact, rtol=0, atol=eps * np.abs(exact).max()
    )


def covariances(devices, empty=()) -> CovarianceState:
    """A state of each device; those in `empty` hold no keys."""
    rng = np.random.default_rng(devices)
    root = rng.normal(size=(devices, 2, 3, 3))
    out, lse = rng.normal(size=(devices, 2, 3)), rng.normal(size=(devices, 2))
    lse[list(empty)] = -np.inf
    held = np.isfinite(lse)[..., None]
    covariance = (root @ root.swapaxes(-1, -2)) * held[..., None]
    return CovarianceState(covariance, out * held, lse)


def across(merge, axes, parts):
    folded = jax.shard_map(
        lambda state: merge_across(jax.tree.map(lambda x: x[0], state), axes, merge),
        in_specs=P(axes),
        out_specs=P(),
    )
    return folded(parts)


@pytest.mark.parametrize(("merge", "shape"), few_rows([("butterfly", (3, 2)), ("gather", (2, 4))]))
def test_covariances(merge, shape):
    """A fold over devices that differs from the fold on one, or a derivative, in either mode and of second order."""
    axes, devices = ("x", "y")[: len(shape)], math.prod(shape)
    parts = covariances(devices, empty=[1])
    rng = np.random.default_rng(0)
    change = jax.tree.map(lambda x: rng.normal(size=x.shape), parts)
    weights = jax.tree.map(lambda x: rng.normal(size=x.shape[1:]), parts)

    others = merge == "gather"

    def both(fold):
        @jax.jit
        def run(parts, change):
            found, moved = jax.jvp(fold, (parts,), (change,))

            def total(parts):
                pairs = zip(fold(parts), weights, strict=True)
                return sum((x * y).sum() for x, y in pairs)

            def along(parts):
                return jax.jvp(total, (parts,), (change,))[1]

            slope, bent = jax.jvp(jax.grad(total), (parts,), (change,))
            derivatives = {"value": found, "jvp": moved, "vjp": slope, "jvp of vjp": bent}
            return derivatives | ({"vjp of jvp": jax.grad(along)(parts)} if others else {})

        return run(parts, change)

    with jax.set_mesh(Mesh(np.array(jax.devices()[:devices]).reshape(shape), axes)):
        found = both(functools.partial(across, merge, axes))
    close(found, both(merge_all), tolerance=1e-12)


def test_sums_of_covariances_are_refused(unchecked):
    """A merge strategy that would need the mean of all keys before it has it."""
    with jax.set_mesh(Mesh(np.array(jax.devices()), ("x",))):
        with pytest.raises(
            ValueError, match="merge: wanted 'gather', 'butterfly' or 'auto' for .* got 'allreduce'"
        ):
            across("allreduce", ("x",), covariances(8))
