"""What every implementation of `local_attention` must do: one class of tests, run for each name in the registry.

Values and gradients are compared with the dense NumPy judge (`support/reference.py`), within a small multiple of what
naive attention in the same dtype errs (`support/naive.py`), over the list in `support/problems.py`. An implementation
declines a problem with NotImplementedError; `TRAITS` states which, and tests of the others are not generated.
"""

import contextlib
import functools
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import AttentionState, KernelCall, implementations, local_attention
from energy_attn.kernels.internal import check_call_of
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.naive import assert_all_close, expected, select
from tests.support.problems import (
    BLOCKS,
    HEADS,
    LARGE,
    PROBLEMS,
    call_of,
    cast,
    cotangents,
    lse_dtype,
    tangents,
)
from tests.support.reference import dense, dense_hvp, dense_jvp, dense_vjp
from tests.support.selection import few, few_rows
from tests.support.traits import (
    EVERY,
    RUNNABLE,
    SECOND,
    SMALL,
    TRAITS,
    arrays_of,
    attend,
    check,
    exactest,
    kernel_of,
    state_and_gradients,
    takes,
)

# Compiling dominates: in low precision and of second derivatives a few that go through every path.
LOW = {
    "bfloat16": (
        *("plain", "everything", "predicates", "positions_causal", "multi_query", "shift_up"),
        "mask",
    ),
    "float32": ("everything", "positions_causal", "shift_up", "decode_source"),
    "float16": ("everything", "multi_query", "decode_source"),
}
LOW_FIRST = [
    ("pallas_gpu", "bfloat16", "plain"),
    ("pallas_tpu", "bfloat16", "multi_query"),
    ("blockwise", "bfloat16", "shift_up"),
    ("decode", "float16", "multi_query"),
]
# Each path of a kernel, and each kind of problem, by one kernel or another: those of `make test`. The first of each
# kernel runs on the newest JAX as well. What other tests here run of interpreted kernels is not run by this one too.
FIRST = {
    "blockwise": "decode_source bias_rows ragged_queries no_queries shift_down",
    "reference": "causal_more_queries bias_infinite mask_nothing rule_documents positions_causal bias_heads",
    "decode": "everything no_keys segments ragged window mask_heads value_narrower bias_keys multi_query one_key "
    "window_diagonal decode_few positions positions_window bias_scalar scale mask_keys value_wider "
    "rule_positions",
    "decode_cpu": "decode_cache causal_more_keys one_of_each",
}
FIRST_BLOCKS = {
    "pallas_gpu": "blocks_predicates",
    "pallas_tpu": "blocks_edges",
    "blockwise": "blocks_everything blocks_window",
}
FIRST_HEADS = {"decode_cpu": "heads_8_8"}
# other kernels have no blocks
FIRST_LARGE = {"pallas_gpu": "", "pallas_tpu": "large", "blockwise": ""}
FIRST_FORWARD = {"pallas_gpu": "positions_causal", "blockwise": "everything"}
FIRST_UNBATCHED = {"blockwise": "everything"}


def problems(names, first, implementations=RUNNABLE, dtype=None):
    """Runs a test for each implementation, and each problem (by name, or in a dictionary) that it takes in a dtype.

    `make test` runs those that are `first` of an implementation, and the others take turns.
    """
    found = names.values() if isinstance(names, dict) else [PROBLEMS[name] for name in names]
    pairs = [
        pytest.param(
            implementation,
            problem,
            id=f"{implementation}-{problem}",
            marks=_marks(problem.name, first.get(implementation, "").split(), names is PROBLEMS),
        )
        for implementation in implementations
        for problem in found
        if takes(implementation, problem.name, dtype)
        and (names is not PROBLEMS or problem.name in TRAITS[implementation].judged)
    ]
    return pytest.mark.parametrize(("implementation", "problem"), pairs)


def _marks(name: str, first: list[str], smoke: bool):
    if name not in first:
        return pytest.mark.full
    return pytest.mark.smoke if smoke and name == first[0] else ()


def each_that_takes(name: str, dtype: str | None = None, first=("blockwise",)):
    """Runs a test for each implementation that takes the problem of the test, those but the first in their turn."""
    chosen = few([x for x in RUNNABLE if takes(x, name, dtype)], *first)
    return pytest.mark.parametrize("implementation", chosen)


def near(implementation) -> float:
    """To the last bits of float64, or most of float32, relative to the largest entry."""
    return {"float64": 1e-9, "float32": 3e-5}[exactest(implementation).name]


@functools.cache
def call_by_shapes(name: str, dtype: str) -> KernelCall:
    """The call of a problem, with operands that are shapes."""
    problem, calls = EVERY[name], []
    arrays = {n: jax.ShapeDtypeStruct(x.shape, dtype) for n, x in problem.arrays.items()}

    def operands(arrays):
        calls.append(call_of(**arrays, **problem.options))
        return calls[0].operands

    return KernelCall(jax.eval_shape(operands, arrays), calls[0].settings)


def paired(state, cotangent):
    """`<dout, out> + <dlse, lse>`."""
    return sum((x * d).sum() for x, d in zip(state, cotangent, strict=True))


def pulled(f, x, cotangent):
    return jax.vjp(f, x)[1](cotangent)[0]


def pushed(f, x, direction):
    return jax.jvp(f, (x,), (direction,))[1]


# From a function, where, along what and the cotangents of its state: the Hessian of `paired` times the
# direction; in forward mode twice, its product with the direction on both sides.
SECOND_ORDER = {
    "reverse over reverse": lambda f, x, d, c: pulled(lambda x: pulled(f, x, c), x, d),
    "forward over reverse": lambda f, x, d, c: pushed(lambda x: pulled(f, x, c), x, d),
    "reverse over forward": lambda f, x, d, c: pulled(lambda x: pushed(f, x, d), x, c),
    "forward over forward": lambda f, x, d, c: paired(pushed(lambda x: pushed(f, x, d), x, d), c),
}


# Second derivatives are those of the blockwise kernel, whichever saved the state.
SECOND_FIRST = [
    ("blockwise", "positions_causal", "reverse over reverse"),
    ("decode", "decode_source", "forward over reverse"),
    ("decode", "decode_source", "reverse over forward"),
    ("blockwise", "decode_source", "forward over forward"),
]
SECOND_CASES = [
    pytest.param(x, PROBLEMS[name], mode, marks=() if row in SECOND_FIRST else pytest.mark.full)
    for row in itertools.product(RUNNABLE, SECOND, SECOND_ORDER)
    for x, name, mode in [row]
    if takes(x, name)
]


def as_jax(arrays: dict, implementation: str) -> dict:
    return {name: array(x, exactest(implementation)) for name, x in arrays.items()}


each = pytest.mark.parametrize("implementation", RUNNABLE)


class TestEveryImplementation:
    @each
    def test_what_it_takes(self, implementation):
        """An implementation that declines what it should take, or takes what no test has it compute."""
        kernel = kernel_of(implementation)
        exact = TRAITS[implementation].dtypes[0]
        cases = [(name, exact) for name in EVERY]
        cases += [("plain", dtype) for dtype in TRAITS["reference"].dtypes]
        for name, dtype in cases:
            taken = takes(implementation, name, dtype)
            with contextlib.nullcontext() if taken else pytest.raises(NotImplementedError):
                check_call_of(kernel, call_by_shapes(name, dtype))

    @problems(PROBLEMS, FIRST)
    def test_exactest(self, implementation, problem):
        """Any slip in a mask, a head's group, a cotangent or an edge case, to the last bits of the best dtype.

        And a reduction whose order changes from call to call: results must repeat to the bit.
        """
        check(implementation, problem, exactest(implementation))

    @problems(HEADS, FIRST_HEADS, dtype="float32")
    def test_heads(self, implementation, problem):
        """Rows of several heads in one block that are told apart wrongly, in the shapes of real models."""
        check(implementation, problem, jnp.float32)

    @pytest.mark.parametrize(
        ("implementation", "dtype", "name"),
        few_rows(
            sorted(
                (
                    (x, d, name)
                    for x in RUNNABLE
                    for d in LOW
                    for name in LOW[d]
                    if takes(x, name, d)
                ),
                key=lambda row: row not in LOW_FIRST,
            ),
            len(LOW_FIRST),
        ),
    )
    def test_low_precision(self, implementation, dtype, name):
        """Accumulation in, or rounding to, a narrow dtype where naive attention keeps float32; lse above all."""
        check(implementation, PROBLEMS[name], jnp.dtype(dtype))

    @problems(BLOCKS, FIRST_BLOCKS, SMALL)
    def test_many_blocks(self, implementation, problem):
        """Statistics lost between blocks, a block skipped that can meet, a bias block added at the wrong place."""
        check(SMALL[implementation], problem, exactest(implementation))

    @problems(LARGE, FIRST_LARGE, FIRST_LARGE, dtype="float32")
    def test_real_blocks(self, implementation, problem):
        """The same with the default block sizes."""
        check(implementation, problem, jnp.float32, cotangents_of=("both",))

    @each_that_takes("bias_keys")
    def test_one_output_in_one_array(self, implementation):
        """A backward that counts on all cotangents and all arguments being there (symbolic zeros, constants)."""
        problem = PROBLEMS["bias_keys"]
        arrays = arrays_of(implementation, problem)
        dout, dlse = cotangents(problem, exactest(implementation))
        fields = {"query": "lse", "value": "lse", "bias": "out"}

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
            what = f"{implementation}, gradient of {fields[name]} in {name}"
            close(gradient, exact[name], what, near(implementation))

    @problems(SECOND, FIRST_FORWARD)
    def test_forward_mode(self, implementation, problem):
        """`jax.jvp` and `jax.linearize` that return zeros or NaN instead of the derivative or an error."""
        arrays, direction = arrays_of(implementation, problem), tangents(problem)
        exact = dense_jvp(problem, direction)

        def both(arrays, direction):
            function = functools.partial(attend, problem=problem, implementation=implementation)
            linear = jax.linearize(function, arrays)[1](direction)
            return pushed(function, arrays, direction), linear

        for state in jax.jit(both)(arrays, as_jax(direction, implementation)):
            close(state, exact, f"{implementation}, {problem}", near(implementation))

    @pytest.mark.parametrize(("implementation", "problem", "mode"), SECOND_CASES, ids=str)
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
        close(product, exact, what, near(implementation))

    @each_that_takes("positions_causal", first=("pallas_gpu",))
    def test_vmap(self, implementation):
        """A batching rule that pairs up the wrong axes, or block skipping that goes wrong when batched."""
        first, dtype = PROBLEMS["positions_causal"], exactest(implementation)
        arrays, given = arrays_of(implementation, first), cotangents(first, dtype)
        each = [first, replace(first, query=2 * first.query)]
        each[1] = replace(each[1], key_positions=first.key_positions[:, ::-1])

        def gradients(query, positions):
            problem = replace(first, key_positions=positions)
            state, back = jax.vjp(
                lambda a: attend(a, problem, implementation), arrays | {"query": query}
            )
            return state, back(AttentionState(*given))[0]

        queries = array(np.stack([x.query for x in each]), dtype)
        positions = array(np.stack([x.key_positions for x in each]))
        together = jax.jit(jax.vmap(gradients))(queries, positions)
        for i, one in enumerate(each):
            exact = dense(one), dense_vjp(one, *map(np.asarray, given))
            found = jax.tree.map(lambda x, i=i: np.asarray(x)[i], together)
            close(found, exact, f"{implementation}, {i}", near(implementation))

    @problems(["everything", "positions_causal"], FIRST_UNBATCHED)
    def test_unbatched(self, implementation, problem):
        """Unbatched input treated as a batch of T, or lengths and positions of another row used."""
        first = {n: np.asarray(x)[0] for n, x in arrays_of(implementation, problem).items()}
        given = {n: _row(n, option) for n, option in problem.options.items()}
        single = jax.jit(lambda a: local_attention(**a, **given, implementation=implementation))(
            first
        )
        exact = tuple(x[0] for x in dense(problem))
        close(single, exact, f"{implementation}, {problem}", near(implementation))

    @each_that_takes("positions_causal")
    def test_eager(self, implementation):
        """Something decided by whether values are known, or an array kept from one trace to the next."""
        problem, dtype = PROBLEMS["positions_causal"], exactest(implementation)
        run = state_and_gradients(implementation, problem).__wrapped__
        given = arrays_of(implementation, problem), *cotangents(problem, dtype)
        assert_all_close(run(*given), problem, dtype, "both", label=f"{implementation}, eager")
        with jax.disable_jit():  # in which a kernel called itself
            found = run(*given)
        assert_all_close(found, problem, dtype, "both", label=f"{implementation}, without jit")

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
        slope = np.sum(problem.query * exact["query"]) / 0.7
        close(run(arrays, array(0.7)), slope, "scale", near(implementation))

    @each_that_takes("bias_heads", "bfloat16")
    def test_bias_in_another_dtype(self, implementation):
        """A float32 bias beside bfloat16 operands rounded to bfloat16, or its gradient."""
        problem = PROBLEMS["bias_heads"]
        arrays = arrays_of(implementation, problem, jnp.bfloat16)
        _, rounded = cast(problem, jnp.bfloat16)
        rounded = replace(rounded, bias=problem.bias.astype(np.float32).astype(np.float64))
        arrays["bias"] = array(problem.bias, jnp.float32)
        dout, dlse = select("lse", *cotangents(problem, jnp.bfloat16))
        found = state_and_gradients(implementation, problem)(arrays, dout, dlse)
        assert found["bias"].dtype == jnp.float32
        exact = dense_vjp(rounded, *(np.asarray(x, np.float64) for x in (dout, dlse)))["bias"]
        found = found["lse"], found["bias"]
        close(found, (dense(rounded)[1], exact), implementation, tolerance=1e-5)

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
        close(state, dense(problem), implementation, near(implementation))


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


@pytest.mark.parametrize(
    "name", few(["plain", "primes", "no_keys", "decode_source"], "plain", "no_keys")
)
def test_default_implementation(name):
    """A choice that ends in an error, or in an implementation that is wrong for the problem."""
    problem = PROBLEMS[name]
    check_default = state_and_gradients(None, problem)
    found = check_default(cast(problem, jnp.float64)[0], *cotangents(problem, jnp.float64))
    assert_all_close(found, problem, jnp.float64, "both", label="default")


@pytest.mark.parametrize("scale", few([-30.0, 0.0], -30.0))
def test_scales_that_are_not_positive(scale):
    """A maximum of products where it is that of scores; a hidden key whose score is minus infinity times the scale."""
    problem = replace(PROBLEMS["causal"], name=f"causal_{scale}", scale=scale)
    check("blockwise", problem, jnp.float32, cotangents_of=("both",))
