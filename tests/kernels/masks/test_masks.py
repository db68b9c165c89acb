"""Masks in a call: which kernels take them, how they pass through JAX's transformations, and wrong ones.

States and gradients by every implementation are in `test_local_attention.py`, through the problems named `rule_...`.
"""

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import masks
from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.kernels import (
    AbstractJAXKernel,
    AbstractKernel,
    AttentionState,
    implementations,
    local_attention,
)
from energy_attn.kernels.internal import check_call_of, explain, tried
from tests.kernels.derivatives import check_dense
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.complaints import a, complains
from tests.support.masks import IDS, LENGTHS, RULES, UNKNOWN
from tests.support.problems import PROBLEMS, _make, call_of, cast, cotangents
from tests.support.reference import dense, dense_vjp, visible
from tests.support.selection import few
from tests.support.traits import kernel_of

IDS, LENGTHS = IDS[:2], LENGTHS[:2]
PROBLEM = _make("rules", B=2, T=9, S=9, N=2, K=1, H=4)
OURS = ("pallas_gpu", "pallas_tpu")
XLA = ("reference", "blockwise", "decode")


def check(state: AttentionState, problem):
    close(tuple(state), dense(problem), problem.name, tolerance=1e-12)


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_who_takes_what(name):
    """A vendor's kernel that ignores a mask which it does not know: a wrong answer, and fast; ours that declines it."""
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    rule = RULES[name].of(1)
    call, plain = call_of(x, x, x, mask=rule), call_of(x, x, x)
    for kernel in map(kernel_of, implementations()):
        if kernel.name in ("decode", "decode_cpu"):  # too many rows
            continue
        if not kernel.platforms or kernel.name in OURS:
            check_call_of(kernel, call)
            continue
        if kernel.name == "splash":  # what the others need is not installed everywhere
            check_call_of(kernel, plain)
        with pytest.raises(
            NotImplementedError, match=r"^mask: wanted All or Causal or Window.*, got "
        ):
            check_call_of(kernel, call)
    for platform, name in {"cuda": OURS[0], "tpu": OURS[1], "cpu": "blockwise"}.items():
        assert explain(tried(), call.settings, call.operands, platform).name == name


def test_simple_rules_are_options():
    """A mask that most kernels know in another form, and so is declined by them, or compiled again."""
    ids = jnp.asarray(IDS)[:, :9]
    rule = masks.Causal() & masks.Window(4, 7) & masks.Segments(ids) & masks.Lengths(LENGTHS)
    arrays, _ = cast(PROBLEM, jnp.float32)
    found = call_of(**arrays, mask=rule & masks.All())
    wanted = call_of(
        **arrays,
        is_causal=True,
        local_window_size=(4, 7),
        query_segment_ids=ids,
        key_segment_ids=ids,
        key_value_seq_lengths=jnp.asarray(LENGTHS),
    )
    assert found.settings == wanted.settings and found.settings.mask.window == (4, 0)
    jax.tree.map(np.testing.assert_array_equal, found.operands, wanted.operands)


def test_many():
    """Masks that can be made and not be used, as Python ends the recursion over them."""
    arrays, _ = cast(PROBLEM, jnp.float64)
    chain = masks.Causal()
    for i in range(66):
        chain = ~(chain & masks.Prefix(2)) if i % 2 else chain & ~masks.Prefix(1)
    query, key = (
        jnp.arange(n, dtype=jnp.int32) for n in (PROBLEM.query.shape[1], PROBLEM.key.shape[1])
    )
    seen = chain.visible(query[:, None], key[None])
    found, wanted = (local_attention(**arrays, mask=x) for x in (chain, seen))
    close(tuple(found), tuple(wanted))


@pytest.mark.parametrize("sides", [(None, 0), (None, 3), (3, None), (None, None), 4])
def test_windows_are_options(sides):
    """A side without a bound, which the mask takes and the option did not."""
    arrays, _ = cast(PROBLEM, jnp.float32)
    left, right = (sides, sides) if isinstance(sides, int) else sides
    found = call_of(**arrays, local_window_size=sides)
    assert found.settings == call_of(**arrays, mask=masks.Window(left, right)).settings


@pytest.mark.parametrize(
    "implementation",
    [pytest.param("blockwise", marks=pytest.mark.smoke), *few(["reference", "decode"])],
)
def test_transformations(implementation):
    """A length that is a constant of a compiled program, lost in a vmap, or given a gradient."""
    arrays, _ = cast(PROBLEM, jnp.float64)

    wanted = dataclasses.replace(PROBLEM, rule="prefix_rows")
    dout, dlse = cotangents(wanted, jnp.float64)

    def one(arrays, rule):
        return local_attention(**arrays, mask=rule, implementation=implementation)

    @jax.jit
    def twice(arrays, rules, cotangent):
        def mapped(arrays):
            return jax.vmap(jax.vmap(one), in_axes=(None, 0))(arrays, rules)

        state, back = jax.vjp(mapped, arrays)
        return state, back(cotangent)[0]

    one_of_two = AttentionState(*(np.stack([x, 0 * x]) for x in (dout, dlse)))
    for more in (1, 2):  # by the same program
        rule = masks.Causal() | masks.Prefix(LENGTHS)
        rules = jax.tree.map(lambda x, n=more: np.stack([x, x + n]), rule)
        state, gradients = twice(arrays, rules, one_of_two)
        check(jax.tree.map(lambda x: x[0], state), wanted)
        check(jax.tree.map(lambda x: x[1], state), longer(LENGTHS + more))
        close(gradients, dense_vjp(wanted, dout, dlse), tolerance=1e-12)


def longer(lengths):
    """The problem with other lengths of its prefixes."""
    q, k = np.arange(9)[:, None], np.arange(9)[None]
    seen = (k <= q) | (k < lengths[:, None, None])
    return dataclasses.replace(PROBLEM, mask=seen[:, None])


def test_one_program_for_all_lengths():
    """A prompt's length that compiles a decoder again."""
    x = array(np.ones((1, 4, 2, 8)))
    traced = []

    @jax.jit
    def run(rule):
        traced.append(rule)
        return ea.attention(x, x, x, mask=rule)

    for n in range(4):
        run(masks.Causal() | masks.Prefix(n))
    assert len(traced) == 1


@pytest.mark.product
@pytest.mark.parametrize("implementation", XLA)
@pytest.mark.parametrize("name", ["documents_function", "parity"])
def test_hidden_keys_are_not_read(implementation, name):
    """NaN times a weight of zero, of a key that a mask hides from all queries, where intervals do not tell."""
    problem = PROBLEMS[f"rule_{name}"]
    problem = dataclasses.replace(problem, query=problem.query[:, :1])
    hidden = ~visible(problem).any((1, 2))[..., None, None]
    assert hidden.any()
    arrays, _ = cast(problem, jnp.float64)
    broken = {
        n: np.where(hidden, np.nan, x) if n in ("key", "value") else x for n, x in arrays.items()
    }

    @jax.jit
    def run(arrays):
        state, back = jax.vjp(
            lambda x: local_attention(**x, **problem.options, implementation=implementation), arrays
        )
        return state, back(jax.tree.map(jnp.ones_like, state))[0]

    state, gradients = run(broken)
    check(state, problem)
    assert all(np.isfinite(x).all() for x in gradients.values())


class Mine(AbstractJAXKernel):
    """A user's kernel: the softmax as one writes it, and JAX's derivative; for one query head a key head."""

    name = "mine"
    masks = (masks.All, masks.Causal)

    def check(self, call):
        for name in ("bias", "mask", "query_segments"):
            if call.operands.named()[name] is not None:
                raise NotImplementedError(f"{name}: wanted None, got an array")

    def forward(self, call):
        operands, settings, _ = call
        query, key, value = operands.qkv
        scores = jnp.einsum("btnh,bsnh->btns", query, key) * settings.scale
        q, k = operands.tokens.query_positions, operands.tokens.key_positions
        if q is None:
            q, k = (jnp.arange(x.shape[1])[None] for x in (query, key))
        seen = (q[:, :, None] >= 0) & (k[:, None] >= 0)
        if settings.mask.constrains:
            seen &= k[:, None] <= q[:, :, None]
        scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
        return AttentionState(jnp.einsum("btns,bsnv->btnv", weights, value), lse)


@pytest.mark.parametrize("mesh", [False, True])
def test_a_kernel_of_ones_own(mesh):
    """A kernel handed over that is not the one that runs, or that has no derivative, on one device or on a mesh."""
    options = {"parallel": SequenceParallel("device", "tree")} if mesh else {}
    options |= {"implementation": Mine(), "return_energy": True, "is_causal": True}
    problem = _make("mine", B=1, T=16, S=16, N=2, is_causal=True)
    two = make_mesh((2,), ("device",), devices=jax.devices()[:2])
    with jax.set_mesh(two) if mesh else contextlib.nullcontext():
        check_dense(lambda x: ea.attention(**x, **options), problem)


def test_kernels_and_names_are_tried_in_turn():
    """A kernel that declines and ends the search, or one whose rule is not asked."""
    rule = masks.Causal() | masks.Prefix(2)
    arrays, _ = cast(PROBLEM, jnp.float64)
    with pytest.raises(NotImplementedError, match="^mask: wanted All or Causal, got Or, Prefix"):
        local_attention(**arrays, mask=rule, implementation=Mine())
    run = functools.partial(local_attention, **arrays, mask=rule)
    first = jax.jit(functools.partial(run, implementation=(Mine(), "reference")))()
    check(first, longer(np.asarray([2, 2])))
    # the reference itself is differentiated by JAX, by whatever name
    query, reference = arrays.pop("query"), kernel_of("reference")

    @jax.jit
    def along(query):
        run = functools.partial(local_attention, **arrays, implementation=reference)
        return jax.jvp(lambda query: run(query).lse, (query,), (query,))[1]

    assert np.isfinite(along(query)).all()


@dataclasses.dataclass
class Unhashable(Mine):
    size: int = 3


class Nameless(AbstractKernel):
    name = "nameless"
    check = forward = backward = Mine.forward


X = np.ones((2, 4, 1, 8))


@pytest.mark.parametrize(
    ("wrong", "error", "name", "received", "wanted"),
    [
        (Unhashable(), TypeError, "implementation", "Unhashable", "can be hashed"),
        (Nameless(), TypeError, "implementation", "Nameless", "platforms, interpreted, exported"),
        (Mine, TypeError, "implementation", "Mine", "a kernel"),
        ([Mine(), 3], TypeError, "implementation", "list", "a kernel"),
        (("mine",), ValueError, "implementation", "'mine'", "'blockwise'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_kernels(wrong, error, name, received, wanted):
    """A traceback from inside JAX for a kernel that it cannot hash, or that does not say what it is."""
    complains(lambda: local_attention(X, X, X, implementation=wrong), error, name, received, wanted)


I3 = np.ones(3, np.int32)


def by(mask, x=X):
    return lambda: ea.attention(x, x, x, mask=mask)


def closing(length):
    return ea.attention(X, X, X, mask=masks.Function(lambda query, key: key < length))


@pytest.mark.parametrize(
    ("call", "error", "name", "received", "wanted"),
    [
        (lambda: masks.Prefix(-1), ValueError, "length", "-1", "at least 0"),
        (lambda: masks.Prefix(a(2, dtype="int32") - 3), ValueError, "length", "-2", "at least 0"),
        (lambda: masks.Prefix(1.5), TypeError, "length", "float 1.5", "array"),
        (lambda: masks.Prefix(a(2)), TypeError, "length", "float32[2]", "integer"),
        (by(masks.Prefix(IDS)), ValueError, "mask.length", "int32[2,16]", "batch, 2"),
        (lambda: masks.Window(a(dtype="int32"), 0), TypeError, "left and right", "TracedW", "ints"),
        (lambda: masks.TracedWindow(-1, 0), ValueError, "left", "-1", "at least 0"),
        (lambda: masks.TracedWindow(a(), 0), TypeError, "left", "float32[]", "integer"),
        (lambda: masks.Window(-1, 0), ValueError, "left and right", "-1", "at least 0, or None"),
        (lambda: masks.Window(2, "x"), TypeError, "left and right", "str", "integer"),
        (lambda: masks.Segments(LENGTHS[0]), TypeError, "query_ids", "int32", "array"),
        (lambda: masks.Prefix(2**40), ValueError, "length", "1099511627776", "32 bits"),
        (lambda: masks.Segments(a(4)), TypeError, "query_ids", "float32[4]", "integer"),
        (lambda: masks.Spans(LENGTHS[0]), TypeError, "ids", "int32", "array"),
        (lambda: masks.Spans(a(4)), TypeError, "ids", "float32[4]", "integer"),
        (lambda: masks.Function(3), TypeError, "function", "int 3", "function"),
        (lambda: masks.Function(len, a(2)), TypeError, "parameters", "float32[2]", "no derivative"),
        (lambda: masks.Function(len, 1, batched=True), ValueError, "parameters", "scalar", "batch"),
        (lambda: masks.Causal() & a(2, dtype="bool"), TypeError, "&", "bool[2]", "mask"),
        (lambda: np.ones(2, bool) | masks.Causal(), TypeError, "|", "bool[2]", "mask"),
        (lambda: masks.Causal | masks.Prefix(3), TypeError, "|", "Causal", "mask"),
        (lambda: masks.Causal() and masks.Prefix(2), TypeError, "bool", "Causal()", "&, | or ~"),
        (lambda: masks.Causal() or masks.Prefix(2), TypeError, "bool", "Causal()", "&, | or ~"),
        (lambda: not masks.Causal(), TypeError, "bool", "Causal()", "&, | or ~"),
        (lambda: masks.And(masks.Causal(), 3), TypeError, "second", "int 3", "mask"),
        (lambda: masks.And(a(2), masks.Causal()), TypeError, "first", "float32[2]", "mask"),
        (lambda: masks.Or("x", masks.Causal()), TypeError, "first", "str 'x'", "mask"),
        (lambda: masks.Or(masks.Causal(), masks.Causal), TypeError, "second", "Causal", "mask"),
        (lambda: masks.Not(None), TypeError, "mask", "NoneType None", "mask"),
        (by(masks.Causal), TypeError, "mask", "Causal(...) makes one", "of energy_attn.masks"),
        (by(~masks.Causal() | masks.Prefix(I3)), ValueError, "mask.second.length", "[3]", "batch"),
        (by(masks.Segments(I3[:, None])), ValueError, "mask.query_ids", "int32[3,1]", "batch, 2"),
        (by(masks.Causal() & masks.Segments(I3)), ValueError, "mask.query_ids", "[1,3]", "0 to 3"),
        (by(masks.Prefix(LENGTHS), X[0]), ValueError, "mask.length", "int32[2]", "batch, 1"),
        (by(masks.Function(lambda q, k: k - q)), TypeError, "function's result", "int32", "bool"),
        (
            by(masks.Function(lambda q, k: (k < q)[0, 0])),
            ValueError,
            "function",
            "[2]",
            "(1, 3, 2)",
        ),
        (lambda: jax.jit(closing)(3), ValueError, "function", "closes over", "parameters"),
        (lambda: jax.vmap(closing)(LENGTHS), ValueError, "function", "closes over", "parameters"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_rules(call, error, name, received, wanted):
    """A mask that broadcasts over what it was not meant for, or fails where a program is lowered, far from the user."""
    complains(call, error, name, received, wanted)


def test_segments_given_twice():
    """A table of documents that replaces the ids of the tokens, or is replaced by them."""
    problem = dataclasses.replace(
        PROBLEM,
        query_segment_ids=np.arange(9)[None] // 4 + [[0], [0]],
        key_segment_ids=np.arange(9)[None] // 4 + [[0], [0]],
        rule="documents",
    )
    arrays, _ = cast(problem, jnp.float64)
    run = functools.partial(local_attention, **problem.options, implementation="blockwise")
    check(jax.jit(run)(**arrays), problem)


@pytest.mark.parametrize("ids", [[0, 3, 3, 0, 0, 1, 2, 2], [1, 1], [0, -1, 0], [5], []])
def test_ends_of_spans(ids):
    """Two images that touch in one span, or an image in two; other ends of an array that is traced."""
    size = len(ids)
    runs = [list(x) for _, x in itertools.groupby(range(size), lambda i: ids[i])]
    spans = [(x[0], x[-1]) for x in runs if ids[x[0]] > 0]
    known = masks.Spans(np.asarray(ids, np.int32))
    traced = jax.jit(masks.Spans)(jnp.asarray(ids, jnp.int32))
    tokens = np.arange(size + 2, dtype=np.int32)
    wanted = [[any(a <= q <= b and a <= k <= b for a, b in spans) for k in tokens] for q in tokens]
    for rule in (known, traced):
        found = rule.visible(jnp.asarray(tokens)[:, None], jnp.asarray(tokens)[None])
        np.testing.assert_array_equal(found, wanted)
    assert isinstance(known.first, np.ndarray)
    jax.tree.map(np.testing.assert_array_equal, known, traced)
