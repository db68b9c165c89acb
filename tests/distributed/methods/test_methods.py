"""Every method with queries sharded as keys are, in every layout: one attention, whatever moves.

By `parallel=` (and so through the energy and its custom rule) and inside the user's own `jax.shard_map`.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn import masks
from energy_attn.distributed import (
    SequenceParallel,
    collectives,
    make_mesh,
    methods,
    shard_sequence,
    unshard_sequence,
)
from energy_attn.distributed.internal import sharding_plan
from energy_attn.kernels import local_attention
from tests.support.compare import close
from tests.support.masks import RULES
from tests.support.meshes import (
    AXES,
    COLUMNS,
    DECODE,
    EMPTY,
    GROUPED,
    INSIDE,
    MERGES,
    METHODS,
    ODD,
    POSITIONED,
    ROWS,
    SELF,
    check,
    in_order,
    in_parts,
    inside,
    judge,
    laid_out,
    mesh_of,
    on_host,
    square,
    state_and_gradients,
    with_gradients,
)
from tests.support.problems import Problem, _make, cast
from tests.support.reference import dense, dense_vjp
from tests.support.selection import few, few_rows, pairwise

FEW = square("self few", 3)
NO_KEYS = replace(
    DECODE,
    name="no keys",
    key=DECODE.key[:, :0],
    value=DECODE.value[:, :0],
    bias=DECODE.bias[..., :0],
    mask=DECODE.mask[..., :0],
    key_value_seq_lengths=None,
    key_segment_ids=DECODE.key_segment_ids[:, :0],
)
# First each method, but the hybrid, which is met in parts below, and each layout. No keys are sharded over nothing,
# whatever the method.
FIRST = [
    ("ring", "zigzag", SELF),
    ("tree", "striped", SELF),
    ("ulysses", "contiguous", FEW),
    ("gather", "striped", SELF),
]
OTHERS = [
    ("tree", "contiguous", NO_KEYS),
    ("hybrid", "zigzag", GROUPED),
    *((method, "contiguous", x) for method in METHODS for x in (SELF, GROUPED, ODD, FEW, DECODE)),
    *((method, "contiguous", EMPTY) for method in METHODS),
    *((method, layout, SELF) for method in METHODS for layout in ("striped", "zigzag")),
]
REFUSED = ("ulysses", "contiguous", GROUPED)  # see `tests/surface/test_bad_input.py`
OTHERS = [row for row in OTHERS if str(row) not in map(str, [*FIRST, REFUSED])]
SMOKE = [pytest.param(*row, marks=pytest.mark.smoke) for row in FIRST]


@pytest.mark.parametrize(("method", "layout", "problem"), [*SMOKE, *few_rows(OTHERS, 1)], ids=str)
def test_methods(method, layout, problem):
    """A hop too few, a shard seen twice, gradients that do not come home, padding that is seen.

    Every option at once: grouped heads, causal, windows, segments, ragged rows, bias, mask, source; lengths that 8 does
    not divide or that leave devices without a key; one query; rows that see nothing. And layouts: positions, lengths
    or windows that count places instead of tokens; a permutation not undone.
    """
    judge(problem, SequenceParallel(AXES, method, layout=layout))


@pytest.mark.parametrize(
    ("rows", "heads", "method"),
    [
        (1, (8, 8), "tree"),
        (4096, (8, 8), "ulysses"),
        (4096, (4, 4), "hybrid"),
        (4096, (6, 2), "ring"),
    ],
)
def test_auto_chooses(rows, heads, method):
    """`method="auto"` that means the tree whatever is asked: right, and slow, and nothing else would show it."""
    chosen = []

    def place(query, key):
        parallel = SequenceParallel(AXES, method="auto")
        chosen.append(sharding_plan(parallel, query, key, key).method.name)

    query, key = (
        jax.ShapeDtypeStruct((1, length, number, 64), jnp.bfloat16)
        for length, number in zip((rows, 4096), heads, strict=True)
    )
    with jax.set_mesh(mesh_of("2x4")):
        jax.eval_shape(place, query, key)
    assert chosen == [method]


def test_states_are_rounded_once():
    """Each device's state in 16 bits before they are folded: two numbers in five are other ones then."""
    problem = _make("rounded once", B=4, T=1, S=16, N=8, H=16)
    arrays, rounded = cast(problem, jnp.bfloat16)
    # of a kernel that does not round its weights
    options = {"parallel": SequenceParallel(AXES, "tree"), "implementation": "decode_cpu"}
    with jax.set_mesh(mesh_of("2x4")):
        out = jax.jit(functools.partial(ea.attention, **options))(
            **{name: np.asarray(x) for name, x in arrays.items()}
        )
    once = dense(rounded)[0].astype(jnp.bfloat16)
    assert (np.asarray(out) == once).mean() > 0.98


@pytest.mark.parametrize("merge", few(MERGES, "hierarchical"))
def test_merges(merge):
    """A merge strategy that is right only in the middle of its range: few keys, none, and fully masked rows.

    Zero, minus infinity and finite gradients, as everywhere. One query is not laid out: its place is its position,
    while the keys' are the layout's.
    """
    parallel = SequenceParallel(AXES, "tree", merge, layout="zigzag")
    problems = (
        DECODE,
        replace(DECODE, name="few keys", key_value_seq_lengths=np.asarray([3, 0], np.int32)),
        replace(DECODE, name="blind decode", mask=np.zeros_like(DECODE.mask)),
    )
    arrays, given = on_host(DECODE)
    run = state_and_gradients(DECODE, parallel)
    with jax.set_mesh(mesh_of("2x4")):
        for problem in problems:
            names = "mask", "key_value_seq_lengths"
            found = run(arrays, given, {name: getattr(problem, name) for name in names})
            check(found, replace(problem, name=DECODE.name))


# Of what a mesh sees of a mask, each kind with each method, and each of both in each layout: numbers, arrays of a row
# of the batch, a function and its constants, and a function in a table.
KINDS = ("longformer", "prefix_rows", "documents_function", "table")
RULE_ROWS = pairwise(METHODS, ("contiguous", "striped", "zigzag"), KINDS)


@pytest.mark.full
@pytest.mark.parametrize(("method", "layout", "rule"), RULE_ROWS)
def test_rules(method, layout, rule):
    """A mask that compares places instead of positions, or that sees the arrays of another batch entry."""
    problem = replace(_make("rule", B=2, T=16, S=16, N=8, V=3, source=True), rule=rule)
    judge(problem, SequenceParallel(AXES, method, layout=layout))


@pytest.mark.full
def test_types_say_it_for_queries():
    """Queries whose type says that they are sharded along the sequence, gathered; a result of another type."""
    mesh = mesh_of("2x4 explicit")
    problem = replace(SELF, query_seq_lengths=None, key_value_seq_lengths=None)
    arrays, _ = cast(problem, jnp.float64)
    del arrays["source"]
    problem = replace(problem, source=None)
    out, lse = dense(problem)
    with jax.set_mesh(mesh):
        for names in (ROWS + COLUMNS, COLUMNS):
            placed = {
                n: jax.device_put(x, NamedSharding(mesh, P(None, AXES) if n in names else P()))
                for n, x in arrays.items()
            }
            for parallel in (None, *(SequenceParallel(AXES, method) for method in METHODS)):
                found, energy = ea.attention(
                    **placed, **problem.options, parallel=parallel, return_energy=True
                )
                close(found, out)
                close(energy, lse)
                assert jax.typeof(found).sharding.spec == jax.typeof(placed["query"]).sharding.spec


def judged_inside(name, problem, axes=AXES):
    """Checks values and gradients of sharded arrays, inside `shard_map`, against dense attention's."""
    with jax.set_mesh(mesh_of("2x4" if axes == AXES else "8")):
        check(with_gradients(inside(name, problem, axes))(*on_host(problem)), problem)


RULED = replace(POSITIONED, name="ruled", rule="prefix_rows", is_causal=False)
INSIDE_FIRST = [("ring queries", RULED)]
INSIDE_ROWS = [
    row
    for problem in (POSITIONED, RULED)
    for row in ((name, problem) for name in INSIDE)
    if str(row) not in map(str, INSIDE_FIRST)
]


@pytest.mark.parametrize(
    ("name", "problem"), few_rows([*INSIDE_FIRST, *INSIDE_ROWS], len(INSIDE_FIRST)), ids=str
)
def test_inside_shard_map(name, problem):
    """The functions by themselves: what each wants of bias and positions, and the gradients of sharded arrays.

    A mask of a device's own positions; one that is cut as if it were a part of the sequence.
    """
    judged_inside(name, problem, "device" if name in ("tree", "ulysses") else AXES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("hybrid", marks=pytest.mark.smoke),
        pytest.param("ring keys", marks=pytest.mark.full),
        pytest.param("ring queries", marks=pytest.mark.full),
    ],
)
def test_rings_in_parts(name, monkeypatch):
    """Queries of a device in parts of one, gradients of one head at a time: cut or written at another place."""
    in_parts(monkeypatch)
    judged_inside(name, POSITIONED)


@pytest.mark.parametrize(
    "rule", few(["prefix_rows", "documents", "documents_function"], "documents_function")
)
def test_rules_of_a_sharded_batch(rule):
    """Lengths and tables of all rows beside a part of the rows, where types tell what is sharded."""
    problem = replace(_make("rule", B=2, T=16, S=16, N=4), rule=rule)
    arrays, _ = cast(problem, jnp.float64)
    with jax.set_mesh(mesh_of("2x4 explicit")):
        placed = [jax.device_put(x, P("node", "device")) for x in arrays.values()]
        given = RULES[rule].of(2)
        run = jax.jit(lambda rule, *x: ea.attention(*x, mask=rule))
        close(run(jax.device_put(given, P("node")), *placed), dense(problem)[0])
        close(ea.attention(*placed, mask=given), dense(problem)[0])


@pytest.mark.usefixtures("user_settings")
def test_a_rule_that_divides():
    """The constants in a mask's program, which JAX traces for devices' parts inside of `jax.shard_map`."""
    places = np.arange(16)
    seen = (places[:, None] // 5 == places // 5) | (places % 7 == 0)
    problem = replace(_make("divides", B=2, T=16, S=16, H=4), mask=seen[None, None])
    # of no other test, which would have found its program
    rule = masks.Function(lambda query, key: (query // 5 == key // 5) | (key % 7 == 0))

    def attend(arrays):
        return ea.attention(**arrays, mask=rule, parallel=SequenceParallel("device"))

    arrays, rounded = cast(problem, jnp.float32)
    arrays = jax.device_get(arrays)
    with jax.set_mesh(mesh_of("8")):
        jax.jit(jax.grad(lambda arrays: attend(arrays).sum())).lower(arrays)
        out = jax.jit(attend)(arrays)
    close(out, dense(rounded)[0], tolerance=1e-5)


@pytest.mark.usefixtures("user_settings")
def test_a_rule_on_another_mesh():
    """Constants in a mask's program that lie on the mesh where it was met first."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 16, 2, 4)), jnp.float32)
    rule = masks.Function(lambda query, key: query % 11 >= key % 11)
    places = np.arange(16)
    seen = places[:, None] % 11 >= places % 11
    exact = dense(Problem("rule", *[np.asarray(x, np.float64)] * 3, mask=seen[None, None]))[0]

    def run(x):
        return local_attention(x, x, x, mask=rule, implementation="pallas_gpu").out

    with jax.set_mesh(mesh_of("8 explicit")):
        jax.eval_shape(run, x)
    with jax.set_mesh(mesh_of("8")):
        np.testing.assert_allclose(jax.jit(run)(x), exact, 1e-5, 1e-5)


def test_a_rule_in_ones_own_shard_map():
    """`parallel=` inside `jax.shard_map`, whose layout tells the positions; a mask that is an argument there."""
    problem = replace(_make("rule", B=2, T=16, S=16, N=8), rule="prefix_rows")
    parallel = SequenceParallel("device", "ring", layout="zigzag")
    rows = P(None, "device")
    with jax.set_mesh(mesh_of("8")):
        arrays = cast(problem, jnp.float64)[0]
        moved = [shard_sequence(x, parallel) for x in arrays.values()]
        run = jax.shard_map(
            lambda rule, *arrays: ea.attention(*arrays, mask=rule, parallel=parallel),
            in_specs=(P(), rows, rows, rows),
            out_specs=rows,
        )
        out = unshard_sequence(jax.jit(run)(RULES["prefix_rows"].of(2), *moved), parallel)
    close(out, dense(problem)[0])


# --- a device's own keys in a backward: one half first, and one last, while other gradients come home

B, N, K, H, V, DEVICES = 2, 4, 2, 8, 6, 4


@pytest.mark.parametrize(
    ("size", "bias"),
    [
        pytest.param(3, (B, N, 3 * DEVICES, 3 * DEVICES), id="a bias of all"),
        pytest.param(1, (1, N, DEVICES, DEVICES), id="one key"),
        pytest.param(3, (1, N, 1, 3 * DEVICES), id="a bias of keys", marks=pytest.mark.full),
        pytest.param(3, (B, 1, 3 * DEVICES, 1), id="a bias of queries", marks=pytest.mark.full),
    ],
)
def test_halves_of_odd_sizes(size, bias):
    """A key that is in neither half, or in both; the bias, mask, positions or segments of the other half.

    Gradients of keys and of a bias that are added to those of other keys.
    """
    tokens = size * DEVICES
    rng = np.random.default_rng(0)
    segments = (np.arange(tokens, dtype=np.int32) // 5)[None] * np.array([[0], [1]], np.int32)
    problem = _make(
        "own keys",
        *(B, tokens, tokens, N, K, H, V),
        bias=bias,
        mask=rng.random((1, 1, tokens, tokens)) < 0.8,
        is_causal=True,
        query_segment_ids=segments,
        key_segment_ids=segments,
    )
    options = problem.options | {"parallel": SequenceParallel("device", methods.Ring("keys"))}
    run = with_gradients(lambda arrays: ea.attention(**arrays, **options, return_energy=True))
    arrays, given = on_host(problem)
    with jax.set_mesh(make_mesh((DEVICES,), ("device",), devices=jax.devices()[:DEVICES])):
        found, gradients = run(arrays, given)
    close(found, dense(problem), "state", 1e-13)
    close(gradients, dense_vjp(problem, *given), "gradient", 1e-13)


@pytest.mark.parametrize("layout", few(["contiguous", "zigzag"], "zigzag"))
def test_halves_of_a_gather(layout):
    """Pieces of both halves whose keys, biases, or gradients are put back in the order of pieces."""
    tokens = 32 * 2
    problem = _make(
        "pieces", *(B, tokens, tokens, N, K, H, V), bias=(1, N, tokens, tokens), is_causal=True
    )
    parallel = SequenceParallel("device", "gather", layout=layout)
    options = {"is_causal": True, "parallel": parallel, "return_energy": True}

    def attend(arrays):
        return in_order(
            problem, parallel, ea.attention(**laid_out(problem, parallel, arrays), **options)
        )

    arrays, given = on_host(problem)
    with jax.set_mesh(make_mesh((2,), ("device",), devices=jax.devices()[:2])):
        found, gradients = with_gradients(attend)(arrays, given)
    close(found, dense(problem), "state", 1e-13)
    close(gradients, dense_vjp(problem, *given), "gradient", 1e-13)


def test_replicas_agree_to_the_bit():
    """A ring that folds in another order on each device: arrays that JAX takes for equal would differ."""
    arrays, _ = cast(DECODE, jnp.float64)
    del arrays["source"], arrays["bias"]
    parallel = SequenceParallel("device", "ring")
    run = jax.jit(functools.partial(ea.attention, is_causal=True, parallel=parallel))
    with jax.set_mesh(mesh_of("8")):
        out = run(**arrays)
        assert len({np.asarray(s.data).tobytes() for s in out.addressable_shards}) == 1


@pytest.mark.full
def test_training_memory():
    """Scores of the whole sequence, or all keys, held by each device: less than a sixth of the dense step's."""
    mesh, length, heads, width = mesh_of("8"), 8192, 2, 32
    parallel = SequenceParallel("device", "ring", layout="zigzag")
    spread = NamedSharding(mesh, P(None, "device"))

    def step(attend, *arrays):
        return jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))(*arrays)

    ring = functools.partial(ea.attention, is_causal=True, parallel=parallel)
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    shape = (1, length, heads, width)
    sharded = [jax.ShapeDtypeStruct(shape, "float32", sharding=spread)] * 3
    alone = [jax.ShapeDtypeStruct(shape, "float32")] * 3
    with jax.set_mesh(mesh):
        compiled = jax.jit(functools.partial(step, ring)).lower(*sharded).compile()
    dense_step = jax.jit(functools.partial(step, plain)).lower(*alone).compile()
    mine, theirs = (c.memory_analysis().temp_size_in_bytes for c in (compiled, dense_step))
    assert mine < theirs / 6
    found = collectives(compiled)
    assert {c.kind for c in found} == {"collective-permute"}
    shard = 4 * length * heads * width // 8
    # keys and values 7 hops, there and on the way back; their gradients 8
    assert sum(c.count for c in found if c.bytes == shard) == 2 * (7 + 7 + 8)
