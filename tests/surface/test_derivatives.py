"""Every public function in both modes, by every argument: a derivative that differences confirm, or an error.

`differentiable.py` lists the functions. A zero counts as wrong unless the list says why it is one.
"""

import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import check_structure
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from tests.support.compare import close
from tests.support.selection import few
from tests.surface.differentiable import CASES, WITHOUT, Case, drawn, rows

ROOT = Path(__file__).resolve().parents[2]
# The public ways to a state, and what is made of states by a rule of its own.
QUICK = [
    *"attention free_energy local_attention states Gibbs statistics conjugate gamma".split(),
    *("of keys", "saddle_attention", "shifted_energy", "penalties", "Llama"),
]
# One of each kind of rule: what else is public is made of these.
RULES = """free_energy attention scores sparse local_attention Gibbs conjugate saddle_attention retrieve
    KVCache tree_decode states folds ring_attention gather_attention layouts""".split()


@pytest.fixture
def case(name: str) -> Iterator[Case]:
    """The case of that name, on its mesh."""
    with CASES[name].setting():
        yield CASES[name]


def floating(tree: Any) -> bool:
    return all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(tree))


def projection(case: Case, fixed: dict[str, Any]) -> Any:
    """The function of the other arrays, as one number: its results with random weights, infinities without any."""

    def total(moving: dict[str, Any]) -> jax.Array:
        rng = np.random.default_rng(0)
        found = [x for x in jax.tree.leaves(case.call(**moving, **fixed)) if floating(x)]
        weighted = (rng.standard_normal(x.shape) * jnp.where(jnp.isfinite(x), x, 0) for x in found)
        return sum(x.astype(jnp.float64).sum() for x in weighted)

    return total


def split(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that have derivatives, integers among them, and the others."""
    moving = {name: x for name, x in case.arrays.items() if name not in case.refused}
    return moving, {name: case.arrays[name] for name in case.refused}


def direction_like(tree: Any, seed: int) -> Any:
    """A random direction; for integers none, of type float0 as JAX wants."""
    rng = np.random.default_rng(seed)

    def one(x: jax.Array) -> Any:
        if floating(x):
            return jnp.asarray(rng.standard_normal(x.shape))
        return np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree.map(one, tree)


def along(tree: Any, step: Any, direction: Any) -> Any:
    return jax.tree.map(lambda x, d: x + step * d if floating(x) else x, tree, direction)


def inner(cotangent: Any, direction: Any) -> Any:
    pairs = zip(jax.tree.leaves(cotangent), jax.tree.leaves(direction), strict=True)
    found = [(x, d) for x, d in pairs if d.dtype != jax.dtypes.float0]
    assert all(x.dtype == d.dtype for x, d in found)
    return sum(((x * d).sum() for x, d in found), jnp.zeros(()))


def difference(function: Any, step: float) -> float:
    """The derivative of a function of one number at zero, by central differences of fourth order."""
    near, far = ((function(h) - function(-h)) / (2 * h) for h in (step, 2 * step))
    return float((4 * near - far) / 3)


def public() -> Iterator[tuple[str, Any]]:
    """Every public name; of classes the methods of floating arrays too."""
    for module, name in check_structure.exports(ROOT):
        thing = getattr(importlib.import_module(module), name)
        if inspect.ismodule(thing) or name.startswith("Abstract"):
            continue
        name = f"{module}.{name}".removeprefix("energy_attn.")
        yield name, thing
        for method in dir(thing) if inspect.isclass(thing) else ():
            found = getattr(thing, method)
            listed = method == "__call__" or not method.startswith("_")
            if listed and inspect.isfunction(found) and (wanted(found) or returned(found)):
                yield f"{name}.{method}", found


def floats(annotation: object) -> bool:
    return "Float[" in str(annotation)


def returned(function: Any) -> bool:
    """Whether the result is of floating arrays, itself or as a field."""
    result = inspect.signature(function).return_annotation
    return floats(result) or bool(re.search("State|Solution|Moments|Gibbs|Measure", str(result)))


def wanted(function: Any) -> set[str]:
    """The parameters of a function that are floating arrays, among its options too."""
    found = set()
    for name, parameter in inspect.signature(function).parameters.items():
        if typing.get_origin(parameter.annotation) is typing.Unpack:
            (options,) = typing.get_args(parameter.annotation)
            found |= {x for x, kind in options.__annotations__.items() if floats(kind)}
        elif floats(parameter.annotation):
            found.add(name)
    return found


def test_nothing_public_is_left_out():
    """A public function, or an argument of one, that no case differentiates and no reason excuses."""
    given: dict[str, set[str]] = {}
    for case in CASES.values():
        for name in case.covers.split():
            given.setdefault(name, set()).update(case.arrays)
    excused = [name for names in WITHOUT.values() for name in names.split()]
    alone = {name for name in excused if not name.endswith(".")}
    modules = tuple(name for name in excused if name.endswith("."))
    found = dict(public())
    of_modules = {x for x in found if x.startswith(modules)}
    assert found.keys() - given.keys() - alone - of_modules == set()
    classes = {name: x for name, x in found.items() if inspect.isclass(x)}
    for name in (given.keys() | alone) - found.keys():  # other methods, which are still there
        parent, _, method = name.rpartition(".")
        assert hasattr(classes[parent], method), name
    assert given.keys() & alone == set()
    for name, thing in found.items():
        if name.startswith(modules):
            assert not inspect.isfunction(thing) or not wanted(thing), name
        elif name in given and not inspect.isclass(thing):
            assert wanted(thing) <= given[name], name


@pytest.mark.parametrize("name", few(list(CASES), *QUICK))
def test_first_order(case):
    """A derivative that is wrong, or silently zero, in either mode; or another in forward mode."""
    moving, fixed = split(case)
    integers = {x: a for x, a in moving.items() if not floating(a)}
    moving = {x: a for x, a in moving.items() if x not in integers}
    still = direction_like(integers, 0)
    total = projection(case, fixed)

    @jax.jit
    def run(moving: Any, directions: Any) -> Any:
        both = moving | integers
        value, slope = jax.jvp(total, (both,), (directions | still,))
        gradient = jax.grad(total, allow_int=True)(both)
        for argument in integers:
            for x in jax.tree.leaves(gradient[argument]):
                assert x.dtype == jax.dtypes.float0
        return value, slope, {x: inner(gradient[x], directions[x]) for x in moving}

    rest = jax.tree.map(jnp.zeros_like, moving)
    for number, argument in enumerate(moving):
        only = rest | {argument: direction_like(moving[argument], number + 1)}
        _, slope, gradients = run(moving, only)
        wanted = difference(lambda h, only=only: run(along(moving, h, only), rest)[0], 1e-3)
        if argument in case.zero:
            assert slope == gradients[argument] == 0, argument
            close(0.0, np.float64(wanted), argument, 1e-7)
            continue
        assert abs(wanted) > 1e-6, f"{argument}: a derivative of zero is not listed"
        close(slope, np.float64(wanted), f"{argument}, forward mode", 1e-7)
        close(gradients[argument], np.float64(wanted), f"{argument}, reverse mode", 1e-7)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused])
def test_refused(case):
    """A derivative of what has none that is zero, or an error that does not say which argument and what to do."""
    for argument, says in case.refused.items():
        fixed = {x: a for x, a in case.arrays.items() if x != argument}
        total, given = projection(case, fixed), {argument: case.arrays[argument]}
        with pytest.raises(TypeError, match=says):
            jax.grad(total)(given)
        with pytest.raises(TypeError, match=says):
            jax.jvp(total, (given,), (given,))


@pytest.mark.parametrize(
    "name", few([*RULES, "record", "Llama", "penalties"], "free_energy", "penalties")
)
def test_second_order(case):
    """One of the four compositions of both modes that is another than the others, or than differences."""
    moving, fixed = split(case)
    fixed |= {x: a for x, a in moving.items() if not floating(a)}
    moving = {x: a for x, a in moving.items() if x not in fixed}
    total = projection(case, fixed)
    first, second = (direction_like(moving, seed) for seed in (1, 2))

    def slope(x: Any) -> Any:
        return jax.jvp(total, (x,), (first,))[1]

    @jax.jit
    def run(x: Any) -> Any:
        gradient = jax.grad(total)
        found = {
            "forward over reverse": inner(jax.jvp(gradient, (x,), (second,))[1], first),
            "reverse over reverse": inner(jax.vjp(gradient, x)[1](first)[0], second),
            "reverse over forward": inner(jax.grad(slope)(x), second),
            "forward over forward": jax.jvp(slope, (x,), (second,))[1],
        }
        return slope(x), found

    wanted = difference(lambda h: run(along(moving, h, second))[0], 1e-3)
    assert abs(wanted) > 1e-6
    for what, found in run(moving)[1].items():
        close(found, np.float64(wanted), what, case.tolerance)


@pytest.mark.full
@pytest.mark.parametrize("name", RULES)
def test_each_argument_alone(case):
    """A rule that is right only where all arguments move, or that loses the one that does."""
    left = case.zero | case.refused
    moving = {x: a for x, a in case.arrays.items() if floating(a) and x not in left}
    for number, argument in enumerate(moving):
        others = {x: a for x, a in case.arrays.items() if x != argument}
        total, given = projection(case, others), {argument: moving[argument]}
        direction = {argument: direction_like(moving[argument], number + 1)}
        forward = jax.jit(lambda x, d, f=total: jax.jvp(f, (x,), (d,))[1])(given, direction)
        backward = inner(jax.jit(jax.grad(total))(given), direction)
        np.testing.assert_allclose(forward, backward, rtol=1e-9, atol=1e-11, err_msg=argument)


@pytest.mark.full
def test_third_order():
    """Compositions of three derivatives of attention, each of which meets the rules of the rules."""
    arrays = {name: jnp.asarray(x) for name, x in (rows() | drawn(1, cotangent=(3, 2, 2))).items()}
    cotangent = arrays.pop("cotangent")
    first, second, third = (direction_like(arrays, seed) for seed in (1, 2, 3))

    def total(x: Any) -> Any:
        out, energy = ea.attention(**x, return_energy=True)
        return (jnp.sin(out) * cotangent).sum() + jnp.tanh(energy).sum()

    def slope(function: Any, direction: Any) -> Any:
        return lambda x: jax.jvp(function, (x,), (direction,))[1]

    twice = slope(slope(total, first), second)

    @jax.jit
    def run(x: Any) -> Any:
        hessian = lambda x: inner(jax.grad(slope(total, first))(x), second)  # noqa: E731
        return twice(x), {
            "three forward": slope(twice, third)(x),
            "reverse over two forward": inner(jax.grad(twice)(x), third),
            "forward over reverse over forward": slope(hessian, third)(x),
            "reverse over reverse over forward": inner(jax.grad(hessian)(x), third),
        }

    wanted = difference(lambda h: run(along(arrays, h, third))[0], 1e-3)
    assert abs(wanted) > 1e-3
    for what, found in run(arrays)[1].items():
        close(found, np.float64(wanted), what, 1e-7)


@pytest.mark.full
@pytest.mark.parametrize("name", ["conjugate", "retrieve", "map", "free_energy"])
def test_in_a_loop(case):
    """A rule that JAX loses in a loop that is differentiated twice, and with it the derivative of an iteration."""
    moving, fixed = split(case)
    fixed |= {x: a for x, a in moving.items() if not floating(a)}
    moving = {x: a for x, a in moving.items() if x not in fixed}
    total = projection(case, fixed)
    first, second = (direction_like(moving, seed) for seed in (1, 2))

    def looped(x: Any) -> Any:
        return jax.lax.scan(lambda _, x: (None, total(x)), None, jax.tree.map(lambda x: x[None], x))

    def along(function: Any, x: Any) -> Any:
        gradient = jax.grad(function)
        back = inner(jax.vjp(gradient, x)[1](first)[0], second)
        return jnp.stack([back, inner(jax.jvp(gradient, (x,), (second,))[1], first)])

    found, wanted = jax.jit(lambda x: (along(lambda x: looped(x)[1].sum(), x), along(total, x)))(
        moving
    )
    assert np.abs(wanted).min() > 1e-6
    close(found, np.asarray(wanted), "over reverse, by both modes", 1e-9)


def test_taylor_mode():
    """JAX's own error about a tracer, where the reference implementation or nested tangents would do."""
    from jax.experimental.jet import jet

    arrays = tuple(map(jnp.asarray, list(rows().values())[:3]))
    series = tuple([x, jnp.zeros_like(x)] for x in arrays)

    def attention(*arrays: Any, **options: Any) -> Any:
        return ea.attention(*arrays, is_causal=True, **options)

    for function in (
        attention,
        lambda *arrays: ea.free_energy(*arrays),
        lambda *arrays: ea.FreeEnergy().at(*arrays).entropy(),
    ):
        with pytest.raises(NotImplementedError, match=r"implementation: wanted .* jax.jvp"):
            jet(function, arrays, series)

    def plain(*arrays: Any) -> Any:
        return attention(*arrays, implementation="reference")

    def slope(*x: Any) -> Any:
        return jax.jvp(plain, x, arrays)[1]

    _, (first, second) = jet(plain, arrays, series)
    np.testing.assert_allclose(first, slope(*arrays), atol=1e-12)
    np.testing.assert_allclose(second, jax.jvp(slope, arrays, arrays)[1], atol=1e-12)
