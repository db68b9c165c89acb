"""Runs a program with tags, and returns the values of the tags after the program's results."""

# Tags occur inside the programs of `jit`, `scan` and other primitives, which do not return the tags' values. Each of
# these programs is run again, with the values as additional results.

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from energy_attn.kernels.internal import jaxprs

from ..functional._tag import tag_p


class Recorded(eqx.Module):
    """The values of one tag."""

    values: PyTree[Array]
    name: str = eqx.field(static=True)
    # where the leading axes of the values are from: "scan", "vmap" or "device"
    axes: tuple[str, ...] = eqx.field(static=True)

    def behind(self, axis: str) -> "Recorded":
        return Recorded(self.values, self.name, (axis, *self.axes))


Results = tuple[list[Any], list[Recorded]]
Run = Callable[..., Results]


class RecordLevel(NamedTuple):
    level: int  # of the recorded tags
    others_stay: bool = True  # whether tags of other levels stay in the program


def traced(
    function: Callable[..., Any], *args: Array
) -> tuple[ClosedJaxpr, Callable[[list[Any]], Any]]:
    """Traces a function of arrays; returns the program, and a map from its outputs to the result of the function."""
    program, types, rest = eqx.filter_make_jaxpr(function)(*args)
    form = jax.tree.structure(types)
    return program, lambda results: eqx.combine(jax.tree.unflatten(form, results), rest)


def lift(program: ClosedJaxpr, args: Sequence[Any], level: RecordLevel) -> Results:
    """Runs a program; returns its results and the values of its tags of one level, in order.

    Raises `NotImplementedError` for a tag inside a loop of unknown length, which cannot return its values.
    """
    recorded: list[Recorded] = []

    def rule(equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
        with equation.ctx.manager:
            results, more = _run_one(equation, inputs, level)
        recorded.extend(more)
        return results

    results = jaxprs.interpret(program.jaxpr, program.consts, args, rule, calls=frozenset())
    return results, recorded


def _run_one(equation: JaxprEqn, args: list[Any], level: RecordLevel) -> Results:
    primitive, params = equation.primitive, equation.params
    if primitive is tag_p and params["level"] == level.level:
        query, *values = args
        return [query], [Recorded(params["tree"].unflatten(values), params["name"], params["axes"])]
    if primitive is tag_p and not level.others_stay:
        return args[:1], []
    inner = jaxprs.programs(equation)
    inside = [
        x.params["name"]
        for program in inner
        for x in jaxprs.equations(program)
        if x.primitive is tag_p and x.params["level"] == level.level
    ]
    if not inside or (primitive.name in jaxprs.REMAT and params["differentiated"]):
        # Nothing to record; or a recomputation in the backward pass, which the forward pass has recorded.
        return jaxprs.bind(equation, args), []
    rule = _RULES.get(primitive.name)
    if rule is None:
        raise NotImplementedError(
            f"record: wanted energies inside what runs a known number of times, as jit, vmap, scan and "
            f"checkpoint do, got {inside[0]!r} inside {primitive.name!r}"
        )
    if rule is _custom:  # the function is run for its tags alone
        level = level._replace(others_stay=False)
    return rule(equation, args, *(_runner(jaxprs.closed(program), level) for program in inner))


def _runner(program: ClosedJaxpr, level: RecordLevel) -> Run:
    return lambda *args: lift(program, args, level)


def _jit(equation: JaxprEqn, args: list[Any], run: Any) -> Results:
    params = equation.params
    run.__name__ = params["name"]
    into, out = (
        tuple(x if isinstance(x, Sharding) else None for x in params[f"{side}_shardings"])
        for side in ("in", "out")
    )
    options: dict[str, Any] = {}
    if any(x is not None for x in (*into, *out)):
        options = {"in_shardings": into, "out_shardings": (list(out), None)}
    return jax.jit(run, **options)(*args)


def _call(equation: JaxprEqn, args: list[Any], run: Run) -> Results:
    return run(*args)


def _custom(equation: JaxprEqn, args: list[Any], run: Run) -> Results:
    # The results keep their custom rule. The recorded values have the derivative of the function itself;
    # the compiler merges the two identical computations.
    return jaxprs.bind(equation, args), run(*args)[1]


def _remat(equation: JaxprEqn, args: list[Any], run: Run) -> Results:
    options = {name: equation.params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(run, **options)(*args)


def _scan(equation: JaxprEqn, args: list[Any], run: Run) -> Results:
    params = equation.params
    # Constants come first, then carries, then arrays with an axis of steps. JAX's versions count them in different
    # parameters (https://github.com/jax-ml/jax/pull/39005); the types of the body tell them apart in all versions.
    inner = params["jaxpr"].jaxpr
    carried = len(equation.outvars) - _with_steps(equation.outvars, inner.outvars)
    fixed = len(args) - _with_steps(equation.invars, inner.invars) - carried
    consts, init, xs = args[:fixed], args[fixed : fixed + carried], args[fixed + carried :]

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], Results]:
        results, recorded = run(*consts, *carry, *x)
        return results[:carried], (results[carried:], recorded)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (results, recorded) = jax.lax.scan(step, init, xs, **options)
    return [*carry, *results], [x.behind("scan") for x in recorded]


def _with_steps(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """The number of variables of a loop that have an axis of steps."""
    pairs = zip(outside, inside, strict=True)
    return sum(x.aval.ndim != y.aval.ndim for x, y in pairs)


def _cond(equation: JaxprEqn, args: list[Any], *branches: Run) -> Results:
    index, *operands = args
    each = [jax.eval_shape(run, *operands)[1] for run in branches]

    def chosen(number: int, *operands: Any) -> Results:
        results, recorded = branches[number](*operands)
        others = [jax.tree.map(_missing, x) for x in each]
        return results, [x for i, y in enumerate(others) for x in (recorded if i == number else y)]

    functions = [functools.partial(chosen, i) for i in range(len(branches))]
    return jax.lax.switch(jnp.asarray(index, jnp.int32), functions, *operands)


def _missing(x: jax.ShapeDtypeStruct) -> Array:
    """NaN in place of the values of a branch that was not taken."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise NotImplementedError(
            f"record: wanted floating values of what runs in a branch of lax.cond, "
            f"as NaN says that it did not run; got {x.dtype}"
        )
    return jnp.full(x.shape, jnp.nan, x.dtype)


def _shard_map(equation: JaxprEqn, args: list[Any], run: Run) -> Results:
    params, mesh = equation.params, equation.params["mesh"]
    # versions of JAX name the parameter differently (`_shard_map_typecheck` in jax/_src/shard_map.py)
    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    names = tuple(x for x in mesh.axis_names if x in manual)

    def local(*args: Any) -> Results:
        results, recorded = run(*args)
        return results, jax.tree.map(lambda x: x[None], recorded)

    results, recorded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=params["in_specs"],
        out_specs=(list(params["out_specs"]), PartitionSpec(names)),
        axis_names=set(names),
        check_vma=params["check_vma"],
    )(*args)
    return results, [x.behind("device") for x in recorded]


# By the names of JAX's primitives; some differ between versions of JAX.
_RULES: dict[str, Callable[..., Results]] = {
    "jit": _jit,
    "pjit": _jit,
    "core_call": _call,
    "closed_call": _call,
    "custom_jvp_call": _custom,
    "custom_vjp_call": _custom,
    **dict.fromkeys(jaxprs.REMAT, _remat),
    "scan": _scan,
    "cond": _cond,
    "shard_map": _shard_map,
}
