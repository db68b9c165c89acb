"""What every implementation of `local_attention` must do: one class of tests, run for each name in the registry.

Values and gradients are compared with the dense NumPy judge (`support/reference.py`), within a small multiple of what
naive attention in the same dtype errs (`support/naive.py`), over the list in `support/problems.py`. An implementation
declines a problem with NotImplementedError; `TRAITS` states which, and tests of the others are not generated.
"""

import contextlib
import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import AttentionState, implementations, local_attention
from energy_attn.kernels.call import _arguments
from energy_attn.kernels.call._kernel import check_call_of
from energy_attn.kernels.dispatch import _registry
from energy_attn.kernels.masks._structure import sided
from energy_attn.kernels.xla import _blocks
from energy_attn.kernels.xla._grid import BLOCK_SIZES
from tests.support.naive import assert_all_close, expected
from tests.support.problems import (
    BLOCKS,
    HEADS,
    LARGE,
    PROBLEMS,
    Problem,
    cast,
    cotangents,
    lse_dtype,
    tangents,
)
from tests.support.reference import (
    dense,
    dense_covariance,
    dense_hvp,
    dense_jvp,
    dense_vjp,
    visible,
)
from tests.support.selection import few
from tests.support.traits import (
    EVERY,
    RUNNABLE,
    SECOND,
    SMALL,
    SMALL_BLOCKS,
    TRAITS,
    arrays_of,
    attend,
    check,
    exactest,
    of_any_rows,
    state_and_gradients,
    takes,
)

# Compiling dominates: in low precision and of second derivatives a few that go through every path.
LOW = {
    "bfloat16": (
        *(
            "plain",
            "everything",
            "predicates",
            "positions_causal",
            "multi_query",
            "shift_up",
            "mask",
        ),
    ),
    "float32": ("everything", "positions_causal", "shift_up", "decode_source"),
    "float16": ("everything", "multi_query", "decode_source"),
}


def problems(names, implementations=RUNNABLE, dtype=None):
    """Runs a test for each implementation, and each problem (by name, or in a dictionary) that it takes in a dtype."""
    found = names.values() if isinstance(names, dict) else [PROBLEMS[name] for name in names]
    pairs = [
        pytest.param(implementation, problem, id=f"{implementation}-{problem}")
        for implementation in implementations
        for problem in found
        if takes(implementation, problem.name, dtype)
        and (names is not PROBLEMS or problem.name in TRAITS[implementation].judged)
    ]
    return pytest.mark.parametrize(("implementation", "problem"), pairs)


def each_that_takes(name: str, dtype: str | None = None):
    """Runs a test for each implementation that takes the problem of the test."""
    chosen = [x for x in RUNNABLE if takes(x, name, dtype)]
    chosen = few(chosen, "blockwise", "pallas_gpu")  # one of XLA's operations, one of our own
    return pytest.mark.parametrize("implementation", chosen)


def gradient_of(problem: Problem, implementation: str):
    """The gradient of `<dout, out> + <dlse, lse>` as a function of the arrays."""
    cotangent = AttentionState(*cotangents(problem, exactest(implementation)))

    def gradient(arrays):
        return jax.vjp(lambda arrays: attend(arrays, problem, implementation), arrays)[1](
            cotangent
        )[0]

    return gradient


def paired(state, cotangent):
    """`<dout, out> + <dlse, lse>`."""
    return sum((x * d).sum() for x, d in zip(state, cotangent, strict=True))


# From a function, where, along what and the cotangents of its state: the Hessian of `paired` times the
# direction; in forward mode twice, its product with the direction on both sides.
SECOND_ORDER = {
    "reverse over reverse": lambda f, x, d, c: jax.vjp(lambda x: jax.vjp(f, x)[1](c)[0], x)[1](d)[
        0
    ],
    "forward over reverse": lambda f, x, d, c: jax.jvp(
        lambda x: jax.vjp(f, x)[1](c)[0], (x,), (d,)
    )[1],
    "reverse over forward": lambda f, x, d, c: jax.grad(
        lambda x: paired(jax.jvp(f, (x,), (d,))[1], c)
    )(x),
    "forward over forward": lambda f, x, d, c: paired(
        jax.jvp(lambda x: jax.jvp(f, (x,), (d,))[1], (x,), (d,))[1], c
    ),
}


def close(actual, exact, what):
    """To the last bits of float64, or most of float32, relative to the largest entry."""
    actual = np.asarray(actual)
    tolerance = {"float64": 1e-9, "float32": 3e-5}[actual.dtype.name]
    exact = np.asarray(exact, np.float64)
    assert actual.shape == exact.shape, what
    scale = np.max(np.abs(exact), initial=1.0, where=np.isfinite(exact))
    np.testing.assert_allclose(actual, exact, rtol=0, atol=tolerance * scale, err_msg=what)


def as_jax(arrays: dict, implementation: str) -> dict:
    return {name: jnp.asarray(array, exactest(implementation)) for name, array in arrays.items()}


each = pytest.mark.parametrize("implementation", RUNNABLE)


class TestEveryImplementation:
    @each
    def test_what_it_takes(self, implementation):
        """An implementation that declines what it should take, or takes what no test has it compute."""
        kernel = _registry._REGISTRY[implementation]
        exact = TRAITS[implementation].dtypes[0]
        cases = [(name, exact) for name in EVERY]
        cases += [("plain", dtype) for dtype in TRAITS["reference"].dtypes]
        for name, dtype in cases:
            problem = EVERY[name]
            call = _arguments.check_call(**cast(problem, dtype)[0], **problem.options)
            with (
                contextlib.nullcontext()
                if takes(implementation, name, dtype)
                else pytest.raises(NotImplementedError)
            ):
                check_call_of(kernel, call.operands, call.settings)

    @pytest.mark.product
    @problems(PROBLEMS)
    def test_exactest(self, implementation, problem):
        """Any slip in a mask, a head's group, a cotangent or an edge case, to the last bits of the best dtype."""
        check(implementation, problem, exactest(implementation))

    @pytest.mark.product
    @problems(HEADS, dtype="float32")
    def test_heads(self, implementation, problem):
        """Rows of several heads in one block that are told apart wrongly, in the shapes of real models."""
        check(implementation, problem, jnp.float32)

    @pytest.mark.product
    @pytest.mark.parametrize(
        ("implementation", "dtype", "name"),
        [(x, d, name) for x in RUNNABLE for d in LOW for name in LOW[d] if takes(x, name, d)],
    )
    def test_low_precision(self, implementation, dtype, name):
        """Accumulation in, or rounding to, a narrow dtype where naive attention keeps float32; lse above all."""
        check(implementation, PROBLEMS[name], jnp.dtype(dtype))

    @pytest.mark.product
    @problems(BLOCKS, SMALL)
    def test_many_blocks(self, implementation, problem):
        """Statistics lost between blocks, a block skipped that can meet, a bias block added at the wrong place."""
        check(SMALL[implementation], problem, exactest(implementation))

    @pytest.mark.product
    @problems(LARGE, dtype="float32")
    def test_real_blocks(self, implementation, problem):
        """The same with the default block sizes."""
        check(implementation, problem, jnp.float32)

    @each_that_takes("bias_keys")
    def test_one_output_in_one_array(self, implementation):
        """A backward that counts on all cotangents and all arguments being there (symbolic zeros, constants)."""
        problem = PROBLEMS["bias_keys"]
        arrays = arrays_of(implementation, problem)
        dout, dlse = cotangents(problem, exactest(implementation))
        fields = {"query": "lse", "key": "out", "value": "lse", "source": "out", "bias": "lse"}

        def total(field, cotangent):
            def function(array, name):
                state = attend(arrays | {name: array}, problem, implementation)
                return (cotangent * getattr(state, field)).sum()

            return function

        totals = {"out": total("out", dout), "lse": total("lse", dlse)}
        alone = jax.jit(
            lambda arrays: {n: jax.grad(totals[f])(arrays[n], n) for n, f in fields.items()}
        )
        for name, gradient in alone(arrays).items():
            exact, _, _ = expected(problem, exactest(implementation), fields[name])
            close(gradient, exact[name], f"{implementation}, gradient of {fields[name]} in {name}")

    @pytest.mark.product
    @problems(SECOND)
    def test_forward_mode(self, implementation, problem):
        """`jax.jvp` and `jax.linearize` that return zeros or NaN instead of the derivative or an error."""
        arrays, direction = arrays_of(implementation, problem), tangents(problem)
        dout, dlse = dense_jvp(problem, direction)

        def both(arrays, direction):
            function = functools.partial(attend, problem=problem, implementation=implementation)
            pushed = jax.jvp(function, (arrays,), (direction,))[1]
            linear = jax.linearize(function, arrays)[1](direction)
            return pushed, linear

        for state in jax.jit(both)(arrays, as_jax(direction, implementation)):
            close(state.out, dout, f"{implementation}, {problem}, tangent of out")
            close(state.lse, dlse, f"{implementation}, {problem}, tangent of lse")

    @pytest.mark.product
    @pytest.mark.parametrize("mode", SECOND_ORDER)
    @problems(SECOND)
    def test_second_order(self, implementation, problem, mode):
        """Zero or wrong second derivatives, where the saved state is taken for a constant of the first ones."""
        arrays, direction = arrays_of(implementation, problem), tangents(problem)
        dout, dlse = cotangents(problem, exactest(implementation))
        function = functools.partial(attend, problem=problem, implementation=implementation)
        product = jax.jit(functools.partial(SECOND_ORDER[mode], function))(
            arrays, as_jax(direction, implementation), AttentionState(dout, dlse)
        )
        exact = dense_hvp(problem, np.asarray(dout), np.asarray(dlse), direction)
        if mode == "forward over forward":
            exact = sum((exact[name] * direction[name]).sum() for name in exact)
        what = f"{implementation}, {problem}, {mode}"
        jax.tree.map(lambda found, exact: close(found, exact, what), product, exact)

    @pytest.mark.product
    @pytest.mark.parametrize(
        ("implementation", "mode"),
        [
            *(
                (x, mode)
                for x in RUNNABLE
                for mode in ("reverse over reverse", "forward over reverse")
            ),
        ],
    )
    def test_hessian_in_source_is_covariance(self, implementation, mode):
        """∇²F that is not the covariance of the values: the library's first identity, by the users' own call."""
        problem = PROBLEMS["window_causal"]
        arrays = arrays_of(implementation, problem)

        def energy(source, rest):
            return attend(rest | {"source": source}, problem, of_any_rows(implementation)).lse.sum()

        outer = jax.jacfwd if mode == "forward over reverse" else jax.jacrev
        source = arrays.pop("source")
        hessian = np.asarray(jax.jit(outer(jax.jacrev(energy)))(source, arrays))
        diagonal = np.einsum("btnvbtnw->btnvw", hessian)
        close(diagonal, dense_covariance(problem), f"{implementation}, {mode}")
        np.testing.assert_allclose(
            np.abs(hessian).sum(), np.abs(diagonal).sum(), err_msg="rows mix"
        )

    @each_that_takes("positions_causal")
    def test_vmap(self, implementation):
        """A batching rule that pairs up the wrong axes, or block skipping that goes wrong when batched."""
        first = PROBLEMS["positions_causal"]
        arrays = arrays_of(implementation, first)
        positions = jnp.asarray([first.key_positions, first.key_positions[:, ::-1]])
        queries = jnp.asarray([first.query, 2 * first.query], exactest(implementation))

        def gradients(query, positions):
            problem = replace(first, key_positions=positions)
            state, back = jax.vjp(
                lambda a: attend(a, problem, implementation), arrays | {"query": query}
            )
            return state, back(AttentionState(*cotangents(first, exactest(implementation))))[0]

        jit = functools.partial(jax.jit)
        together = jit(jax.vmap(gradients))(queries, positions)
        shared = jit(jax.vmap(gradients, in_axes=(None, 0)))(queries[0], positions)
        alone = jit(gradients)
        one_by_one = [alone(q, p) for q, p in zip(queries, positions, strict=True)]
        shared_one_by_one = [alone(queries[0], p) for p in positions]
        for batched, loop in ((together, one_by_one), (shared, shared_one_by_one)):
            stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *loop)
            jax.tree.map(lambda a, b: close(a, b, implementation), batched, stacked)

    @pytest.mark.product
    @problems(["everything", "positions_causal"])
    def test_unbatched(self, implementation, problem):
        """Unbatched input treated as a batch of T, or lengths and positions of another row used."""
        arrays = arrays_of(implementation, problem)
        first = {n: a if n == "bias" else a[0] for n, a in arrays.items()}
        if "bias" in first:
            first["bias"] = arrays["bias"][0]
        given = {n: _row(n, option) for n, option in problem.options.items()}
        batched = jax.jit(lambda a: attend(a, problem, implementation))(arrays)
        single = jax.jit(lambda a: local_attention(**a, **given, implementation=implementation))(
            first
        )
        assert single.out.ndim == 3 and single.lse.ndim == 2
        close(single.out, batched.out[0], f"{implementation}, out of {problem}")
        close(single.lse, batched.lse[0], f"{implementation}, lse of {problem}")

    @each_that_takes("positions_causal")
    def test_jit_and_eager_agree(self, implementation):
        """Something decided at trace time from values, or an array kept from one trace to the next."""
        problem = PROBLEMS["positions_causal"]
        arrays = arrays_of(implementation, problem)
        given = cotangents(problem, exactest(implementation))
        run = state_and_gradients(implementation, problem)
        compiled, eager = run(arrays, *given), run.__wrapped__(arrays, *given)
        jax.tree.map(lambda a, b: close(a, b, implementation), compiled, eager)

    @each_that_takes("positions_causal", "float32")
    def test_deterministic(self, implementation):
        """A reduction whose order changes from call to call: results must repeat to the bit."""
        problem = PROBLEMS["positions_causal"]
        arrays = arrays_of(implementation, problem, jnp.float32)
        given = cotangents(problem, jnp.float32)
        run = state_and_gradients(implementation, problem)
        once, twice = run(arrays, *given), run(arrays, *given)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), once, twice)

    @pytest.mark.parametrize(
        ("implementation", "dtype"),
        [(x, d) for x in RUNNABLE for d in TRAITS[x].dtypes if takes(x, "decode_source")],
    )
    def test_dtypes(self, implementation, dtype):
        """lse in bfloat16: merging eight shards then errs by 0.16. It is float32, or float64 beside float64."""
        problem = PROBLEMS["decode_source"]
        arrays = arrays_of(implementation, problem, dtype)
        state = jax.eval_shape(lambda arrays: attend(arrays, problem, implementation), arrays)
        assert state.out.dtype == jnp.dtype(dtype) and state.lse.dtype == lse_dtype(dtype)

    @pytest.mark.product
    @problems(["decode_cache", "ragged", "mask"])
    def test_hidden_keys_do_not_matter(self, implementation, problem):
        """What a hidden key holds (a stale cache slot, padding) leaking into outputs or gradients."""
        arrays = arrays_of(implementation, problem)
        if problem.name == "mask":  # of every head and query, that is
            keep = np.ones_like(visible(problem).any(axis=(1, 2)))
            keep[:, 3] = False
            problem = replace(problem, mask=problem.mask & keep[:, None, None, :])
        unseen = jnp.asarray(~visible(problem).any(axis=(1, 2)))[..., None, None]
        assert unseen.any()
        stale = arrays | {n: jnp.where(unseen, 1e5, arrays[n]) for n in ("key", "value")}
        given = cotangents(problem, exactest(implementation))
        run = state_and_gradients(implementation, problem)
        jax.tree.map(np.testing.assert_array_equal, run(arrays, *given), run(stale, *given))

    @each_that_takes("bias_keys")
    def test_gradient_in_scale(self, implementation):
        """A scale that is an array, say a learned temperature, rounded to the operands' dtype or given no gradient."""
        problem = replace(PROBLEMS["bias_keys"], scale=0.7)
        arrays = arrays_of(implementation, problem)
        cotangent = AttentionState(*cotangents(problem, exactest(implementation)))
        options = {n: option for n, option in problem.options.items() if n != "scale"}

        @jax.jit
        def run(arrays, scale):
            return jax.vjp(
                lambda s: local_attention(
                    **arrays, **options, scale=s, implementation=implementation
                ),
                scale,
            )[1](cotangent)[0]

        # Scores depend on scale·q alone, so that scale ∂L/∂scale = q·∂L/∂q.
        exact, _, _ = expected(problem, exactest(implementation), "both")
        close(run(arrays, jnp.asarray(0.7)), np.sum(problem.query * exact["query"]) / 0.7, "scale")

    @each_that_takes("bias_heads", "bfloat16")
    def test_bias_in_another_dtype(self, implementation):
        """A float32 bias beside bfloat16 operands rounded to bfloat16, or its gradient."""
        problem = PROBLEMS["bias_heads"]
        arrays = arrays_of(implementation, problem, jnp.bfloat16)
        _, rounded = cast(problem, jnp.bfloat16)
        rounded = replace(rounded, bias=problem.bias.astype(np.float32).astype(np.float64))
        arrays["bias"] = jnp.asarray(problem.bias, jnp.float32)
        dout, dlse = cotangents(problem, jnp.bfloat16)
        found = state_and_gradients(implementation, problem)(arrays, 0 * dout, dlse)
        assert found["bias"].dtype == jnp.float32
        _, exact = dense(rounded)
        np.testing.assert_allclose(found["lse"], exact, rtol=0, atol=1e-5)
        exact = dense_vjp(rounded, np.zeros(dout.shape), np.asarray(dlse, np.float64))["bias"]
        np.testing.assert_allclose(found["bias"], exact, rtol=0, atol=1e-5)

    @each_that_takes("ragged")
    def test_lengths_may_be_traced(self, implementation):
        """Lengths and positions read as Python numbers: a decode loop would recompile for every token, or fail."""
        problem = PROBLEMS["ragged"]
        arrays = arrays_of(implementation, problem)

        @jax.jit
        def run(arrays, lengths):
            traced = replace(problem, key_value_seq_lengths=lengths)
            return attend(arrays, traced, implementation)

        state = run(arrays, jnp.asarray(problem.key_value_seq_lengths))
        exact = jax.jit(lambda a: attend(a, problem, implementation))(arrays)
        close(state.out, exact.out, implementation)
        close(state.lse, exact.lse, implementation)


def _row(name, option):
    """Row 0 of an option of a batched call, as an unbatched call takes it."""
    if name.endswith(("lengths", "positions", "segment_ids")):
        return option[0]
    return option[0] if name == "mask" else option


def test_every_implementation_states_what_it_accepts():
    """A new implementation that nobody holds to anything, or that the table for users leaves out."""
    assert set(TRAITS) == set(implementations())
    rows = re.findall(r"^ *\| `(\w+)` \|", implementations.__doc__, re.MULTILINE)
    assert tuple(rows) == implementations()


@pytest.mark.parametrize("name", ["plain", "primes", "no_keys", "decode_source"])
def test_default_implementation(name):
    """A choice that ends in an error, or in an implementation that is wrong for the problem."""
    problem = PROBLEMS[name]
    check_default = state_and_gradients(None, problem)
    found = check_default(cast(problem, jnp.float64)[0], *cotangents(problem, jnp.float64))
    assert_all_close(found, problem, jnp.float64, "both", label="default")


@pytest.mark.parametrize("problem", BLOCKS.values(), ids=str)
def test_small_blocks_make_many(problem):
    """Problems of `test_many_blocks` that are of one block, and say nothing."""
    arrays, _ = cast(problem, jnp.float64)
    operands = _arguments.check_call(**arrays, **problem.options).operands
    grid = _blocks.grid(operands, sided(), SMALL_BLOCKS)
    assert grid.query_blocks >= 3 and grid.key_blocks >= 3


def test_large_problems_exceed_a_block():
    """The real blocks grown beyond the large problems: `test_real_blocks` would then test a single one."""
    for problem in LARGE.values():
        operands = _arguments.check_call(
            **cast(problem, jnp.float32)[0], **problem.options
        ).operands
        grid = _blocks.grid(operands, sided(), BLOCK_SIZES)
        assert grid.query_blocks > 1 and grid.key_blocks > 1


@pytest.mark.parametrize("scale", [-30.0, 0.0])
def test_scales_that_are_not_positive(scale):
    """A maximum of products where it is that of scores; a hidden key whose score is minus infinity times the scale."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 11, 2, 8), jnp.float32)

    def run(implementation):
        def state(*arrays):
            options = {"is_causal": True, "scale": scale, "implementation": implementation}
            return local_attention(*arrays, **options)

        found, back = jax.vjp(state, query, key, value)
        return found, back(found)

    found, wanted = map(jax.tree.leaves, map(run, ("blockwise", "reference")))
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
