"""Solvers as values: equal, hashable, without leaves, compiled once; and which of them a function declines."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import energy_attn as ea
from energy_attn.kernels.autodiff._function import _apply
from energy_attn.solvers import Extragradient, FixedPoint, Mirror, Newton, Optax, Optimistic
from tests.support.complaints import a, complains
from tests.support.selection import few_rows

SGD = optax.sgd(0.1)
KINDS: list[Any] = [Newton, Mirror, Extragradient, Optimistic, FixedPoint]
ALL = [*(kind() for kind in KINDS), Optax(SGD)]
ITERATIVE = {
    "conjugate": lambda F, **options: F.conjugate(a(5, 1, 2), **options),
    "rate": lambda F, **options: F.rate(a(5, 1, 2), **options),
    "map": ea.Gibbs.map,
    "saddle_attention": ea.bayes.saddle_attention,
    "retrieve": lambda F, **options: ea.hopfield.retrieve(
        F.parts[0].query, F.parts[0].key, **options
    ),
}


def ask(name, **options):
    """The answer of an iterative function, of five rows and keys."""
    drawn = np.random.default_rng(0).standard_normal((3, 5, 1, 2))
    return ITERATIVE[name](ea.FreeEnergy().at(*jnp.asarray(drawn, "float32")), **options)


KNOWN = {
    "conjugate": {Newton, Optax},
    "rate": {Newton, Optax},
    "map": {Newton, Mirror, Optax},
    "saddle_attention": {Extragradient, Optimistic, Newton},
    "retrieve": {FixedPoint},
}


@pytest.mark.parametrize("solver", ALL, ids=lambda solver: type(solver).__name__)
def test_under_jit(solver):
    """A solver with leaves, that an argument of jit loses, or for which a program is traced twice."""
    traced = []

    def f(solver, x):
        traced.append(solver)
        return x + solver.max_steps

    leaves, tree = jax.tree.flatten(solver)
    assert leaves == [] and jax.tree.unflatten(tree, leaves) == solver
    again = Optax(SGD) if isinstance(solver, Optax) else type(solver)()
    for program in (jax.jit(f), jax.jit(f, static_argnums=0)):
        traced.clear()
        for one in (solver, again):
            assert program(one, jnp.float32(1)) == 1 + solver.max_steps
        assert traced == [solver]


def test_equal_solvers_share_a_program():
    """A compilation for each call that writes its solver anew, or one program for two numbers of steps."""
    paths, programs = [], []
    for steps in (3, 3, 7):
        solution = ask("conjugate", solver=Newton(max_steps=steps), regulariser=1.0, throw=False)
        paths.append(solution.stats["path"].shape[0])
        programs.append(_apply._cache_size())
    assert paths == [4, 4, 8]
    assert programs[0] == programs[1] < programs[2]


@pytest.mark.parametrize(
    ("name", "solver"),
    few_rows(
        [
            pytest.param("saddle_attention", Extragradient, marks=pytest.mark.smoke),
            ("retrieve", FixedPoint),
            ("conjugate", Newton),
            ("map", Mirror),
        ],
        2,
    ),
)
def test_tolerance_is_that_of_the_solver(name, solver):
    """A tolerance that does not reach the iteration: of the source, the point, the saddle or the state."""
    options = {"regulariser": 1.0} if name == "conjugate" else {}

    @jax.jit
    def both():
        return [ask(name, solver=solver(tolerance=x), **options) for x in (0.1, 1e-5)]

    loose, tight = both()
    assert loose.converged.all() and tight.converged.all()
    assert (loose.stats["steps"] < tight.stats["steps"]).any()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ITERATIVE)
def test_unknown_solvers_are_declined(name):
    """A solver that is ignored, or fails inside; names and optimisers without a word about what to write instead."""
    others = [x for x in ALL if type(x) not in KNOWN[name]]
    for other in (*others, None, "newton", SGD, Newton):
        for kind in KNOWN[name]:
            wanted = f"energy_attn.solvers.{kind.__name__}(...)"
            got = "str 'newton'" if other == "newton" else type(other).__name__
            complains(lambda other=other: ask(name, solver=other), TypeError, "solver", got, wanted)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", [*KINDS, lambda **fields: Optax(SGD, **fields)])
def test_bad_fields(kind):
    """A solver that is made of nonsense and fails when it is used, or does not."""
    for field, x, error, got, wanted in (
        ("max_steps", 0, ValueError, "0", "at least 1"),
        ("max_steps", None, TypeError, "None", "integer"),
        ("max_steps", 2.0, TypeError, "float 2.0", "integer"),
        ("tolerance", -1.0, ValueError, "-1.0", "at least 0"),
        ("tolerance", "small", TypeError, "'small'", "real number"),
        ("tolerance", float("nan"), ValueError, "nan", "finite"),
    ):
        complains(lambda field=field, x=x: kind(**{field: x}), error, field, got, wanted)


@pytest.mark.usefixtures("unchecked")
def test_bad_step_sizes_and_optimisers():
    """A step size of zero, or of the wrong type; something that is no optimiser."""
    for kind in (Extragradient, Optimistic):
        complains(lambda kind=kind: kind(0.0), ValueError, "step_size", "0.0", "above 0")
        complains(lambda kind=kind: kind("a"), TypeError, "step_size", "'a'", "real number")
    complains(lambda: Optimistic(None), TypeError, "step_size", "None", "real number")
    complains(lambda: Optax("adam"), TypeError, "optimiser", "'adam'", "GradientTransformation")


def test_a_subclass_has_fields_of_its_own():
    """A field that only a subclass knows, checked as a number."""

    @dataclasses.dataclass(frozen=True)
    class Named(Newton):
        label: str = "mine"

    assert (Named().label, Named(max_steps=3).max_steps) == ("mine", 3)
    complains(lambda: Named(tolerance=-1.0), ValueError, "tolerance", "-1.0", "at least 0")
