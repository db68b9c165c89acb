"""Prefix trees: beams packed and unpacked, and trees of other shapes, against sets of prefixes and walks in Python."""

import functools
import heapq
import inspect
from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.prefix_tree import PrefixTree, accept_greedy, grow, verify
from tests.support.compare import same
from tests.support.complaints import ANYTHING, complains, outcome
from tests.support.meshes import mesh_of
from tests.support.selection import few
from tests.support.tries import pack_by_tries

B, M, C = 2, 4, 3
FULL, CUT, ROOMY = M * C, 5, M * C + 3


def line(parent, slot):
    """The slots from the root to `slot`."""
    path = []
    while slot >= 0:
        path.insert(0, slot)
        slot = int(parent[slot])
    return path


def prefixes(rows, lengths):
    """The distinct prefixes of one beam, in order of first occurrence."""
    found = []
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        for c in range(length):
            if tuple(row[: c + 1]) not in found:
                found.append(tuple(row[: c + 1]))
    return found


def check_tree_of(tree, b):
    """The invariants of row `b` of any tree."""
    tokens, mask, depth, parent, unpacker = (np.asarray(x[b]) for x in tree[:5])
    size, slots = int(tree.size[b]), len(tokens)
    assert (parent < np.arange(slots)).all() and (parent >= -1).all()
    seen = np.eye(slots, dtype=bool)
    for slot in range(size):
        seen[slot, line(parent, slot)] = True
        assert depth[slot] == len(line(parent, slot)) - 1
    np.testing.assert_array_equal(mask, seen)
    assert (parent[size:] == -1).all() and (depth[size:] == 0).all()
    assert unpacker.max(initial=-1) < size and unpacker.min(initial=0) >= -1
    for path in unpacker:
        path = path[path >= 0].tolist()
        if path:
            assert path == line(parent, path[-1])


@jax.jit
def packed(beam, lengths):
    options = {"lengths": lengths, "pad_token": 7}
    trees = [PrefixTree.from_beam(beam, capacity=n, **options) for n in (None, CUT, ROOMY)]
    return *trees, [tree.unpack(tree.tokens) for tree in trees]


BEAMS = hnp.arrays(np.int32, (B, M, C), elements=st.integers(0, 2))
WHOLE = st.just(np.full((B, M), C, np.int32))
LENGTHS = hnp.arrays(np.int32, (B, M), elements=st.integers(0, C)) | WHOLE
many = settings(max_examples=50)  # all of one compiled program


@pytest.mark.smoke
@many
@hypothesis.given(BEAMS, LENGTHS)
def test_laws(beam, lengths):
    """A token under another's prefix, a prefix held twice or not at all, a slot that no descendant sees."""
    full, cut, roomy, unpacked = jax.device_get(packed(beam, lengths))
    for tree, back in zip((full, cut, roomy), unpacked, strict=True):
        for b in range(B):
            check_tree_of(tree, b)
            distinct = prefixes(beam[b], lengths[b])
            size, tokens = int(tree.size[b]), np.asarray(tree.tokens[b])
            kept = distinct[: len(tokens)]
            assert size == len(kept)
            spelled = [tuple(tokens[line(tree.parent[b], n)]) for n in range(size)]
            assert spelled == kept
            assert (tokens[size:] == 7).all()
            for m, c in np.ndindex(M, C):
                prefix = tuple(beam[b, m, : c + 1])
                there = c < lengths[b, m] and prefix in kept
                assert tree.unpacker[b, m, c] == (kept.index(prefix) if there else -1)
                assert back[b, m, c] == (beam[b, m, c] if there else 0)


@pytest.mark.parametrize("dtype", few(["uint8", "int16", "uint32", "int64"], "uint8"))
def test_dtypes(dtype):
    """Tokens that leave in another dtype than they came in, or that wrap around in a narrower one."""
    top = int(jnp.iinfo(dtype).max)
    beam = jnp.asarray(np.asarray([[[top, 0], [top, 1]]], dtype))
    tree = PrefixTree.from_beam(beam, pad_token=top)
    assert tree.tokens.dtype == dtype and tree.tokens.tolist() == [[top, 0, 1, top]]
    assert {x.dtype.name for x in (*tree[2:],)} == {"int32"} and tree.mask.dtype == bool
    lengths = jnp.asarray(np.asarray([[2, 1]], dtype))
    assert PrefixTree.from_beam(beam, lengths=lengths).size.tolist() == [2]


def test_unpack_anything():
    """Logits, states and flags of nodes; zeros, not another node's, where a candidate has no node."""
    beam = np.array([[[1, 2, 3], [1, 2, 4]], [[5, 5, 5], [6, 6, 6]]])
    lengths = jnp.asarray([[3, 3], [2, 3]])
    tree = PrefixTree.from_beam(jnp.asarray(beam), capacity=4, lengths=lengths)
    slots = [[[0, 1, 2], [0, 1, 3]], [[0, 1, -1], [2, 3, -1]]]
    assert tree.unpacker.tolist() == slots
    rng = np.random.default_rng(0)
    for x in (rng.standard_normal((2, 4, 2, 3)), rng.random((2, 4)) < 0.5):
        padded = np.concatenate([x, np.zeros_like(x[:, :1])], 1)  # -1 finds the zeros
        want = np.stack([padded[b][np.array(slots[b])] for b in range(2)])
        np.testing.assert_array_equal(jax.jit(PrefixTree.unpack)(tree, jnp.asarray(x)), want)


def test_one_program():
    """Values read while tracing, or shapes that depend on them: a host sync, or a compilation per beam."""
    function = jax.jit(partial(PrefixTree.from_beam, capacity=6))
    rng = np.random.default_rng(1)
    for _ in range(3):
        beam, lengths = rng.integers(0, 3, (B, M, C)), rng.integers(0, C, (B, M))
        tree = function(jnp.asarray(beam), lengths=jnp.asarray(lengths))
    assert function._cache_size() == 1
    assert [x.shape for x in tree] == [(B, 6), (B, 6, 6), (B, 6), (B, 6), (B, M, C), (B,)]
    program = function.lower(jnp.asarray(beam), lengths=jnp.asarray(lengths)).as_text()
    assert "callback" not in program and "custom_call" not in program


@pytest.mark.parametrize("kind", few(["8", "8 explicit"], "8 explicit"))
def test_on_a_mesh(kind):
    """Gathers whose sharding explicit axes cannot infer; beams whose batch is sharded."""
    rng = np.random.default_rng(2)
    beam = rng.integers(0, 2, (8, M, C))
    want = pack_by_tries(jnp.asarray(beam))
    mesh = mesh_of(kind)
    spec = P("device") if kind == "8" else P()

    @jax.jit
    def run(beam):
        tree = PrefixTree.from_beam(beam)
        return tree, tree.unpack(tree.tokens)

    with jax.set_mesh(mesh):
        tree, back = run(jax.device_put(jnp.asarray(beam), NamedSharding(mesh, spec)))
    for x, y in zip(tree, want, strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(back, beam)


def test_no_rows_of_a_batch():
    """An empty batch, which has no largest and no smallest."""
    beam = jnp.asarray(np.zeros((0, M, C), np.int32))
    logits = jnp.asarray(np.zeros((0, FULL, 2)))

    def empty(*unpacker):
        sizes = (0, FULL), (0, FULL, FULL), (0, FULL), (0, FULL), unpacker, (0,)
        kinds = [np.int32, bool, *[np.int32] * 4]
        return PrefixTree(*(jnp.asarray(np.zeros(*x)) for x in zip(sizes, kinds, strict=True)))

    def shapes(function, *args, **options):  # of arrays that have values, which are looked at
        found = jax.eval_shape(lambda: function(*args, **options))
        return [x.shape for x in jax.tree.leaves(found)]

    packed, nodes = empty(0, M, C), empty(0, FULL, C)
    sizes = [x.shape for x in packed]
    assert shapes(PrefixTree.from_beam, beam) == [x.shape for x in pack_by_tries(beam)] == sizes
    assert shapes(PrefixTree.unpack, packed, packed.tokens) == [(0, M, C)]
    made = shapes(PrefixTree.from_parents, packed.tokens, packed.parent, C)
    assert made == shapes(grow, nodes, logits, count=3) == [x.shape for x in nodes]
    assert shapes(accept_greedy, nodes, logits)[0] == (0, C)


@pytest.mark.full
def test_work_grows_no_faster_than_the_product():
    """Work or memory that grows faster than B M² C at a fixed capacity: a comparison of all pairs of entries."""

    def costs(rows, levels):
        beam = jax.ShapeDtypeStruct((4, rows, levels), jnp.int32)
        program = jax.jit(partial(PrefixTree.from_beam, capacity=32)).lower(beam).compile()
        return program.cost_analysis()["flops"], program.memory_analysis().temp_size_in_bytes

    small, wide, long = costs(32, 8), costs(64, 8), costs(32, 16)
    assert wide[0] < 4.4 * small[0] and long[0] < 2.2 * small[0]
    assert max(wide[1], long[1]) < 8 * (4 * 64 * 64 * 8)  # of bytes


# Trees of other shapes.


@functools.partial(jax.jit, static_argnames="depth")
def from_parents(tokens, parent, size, depth):
    return PrefixTree.from_parents(tokens, parent, depth, size)


def test_a_long_chain():
    """A program that grows with the depth, whose compilation does not end."""
    slots = jnp.arange(300, dtype=jnp.int32)[None]
    tree = PrefixTree.from_parents(slots + 5, slots - 1, 300)
    same(tree.depth, slots)
    same(tree.mask[0], np.tri(300, dtype=bool))
    same(PrefixTree.from_beam(slots[:, None]), pack_by_tries(slots[:, None]))


SLOTS = 7


@many
@hypothesis.given(st.data())
def test_from_parents(data):
    """Lost ancestors, and nodes in unused slots."""
    parent = np.array([[data.draw(st.integers(-1, n - 1)) for n in range(SLOTS)] for _ in range(B)])
    size = np.array([data.draw(st.integers(0, SLOTS)) for _ in range(B)])
    tokens = np.arange(1, 1 + B * SLOTS).reshape(B, SLOTS)
    tree = jax.device_get(from_parents(tokens, parent, size, SLOTS))
    for b in range(B):
        check_tree_of(tree, b)
        for n in range(SLOTS):
            used = n < size[b]
            path = line(parent[b], n) if used else []
            assert tree.tokens[b, n] == (tokens[b, n] if used else 0)
            assert tree.parent[b, n] == (parent[b, n] if used else -1)
            assert tree.unpacker[b, n].tolist() == path + [-1] * (SLOTS - len(path))


def test_token_tree():
    """A rank of another position, parents looked up among later choices, and roots of another row."""
    choices = [(1, 0), (0,), (2,), (0, 1, 1), (1,), (0, 1), (0, 0)]
    root = np.array([90, 91])
    candidates = np.arange(2 * 3 * 3).reshape(2, 3, 3)

    @jax.jit
    def run(root, candidates):
        return PrefixTree.from_choices(choices, root, candidates), PrefixTree.from_choices(
            [], root, candidates[:, :0, :0]
        )

    tree, alone = jax.device_get(run(root, candidates))
    order = [(), (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 1)]
    assert tree.size.tolist() == [8, 8] and tree.unpacker.shape == (2, 8, 4)
    for b in range(2):
        check_tree_of(tree, b)
        for n, path in enumerate(order):
            token = candidates[b, len(path) - 1, path[-1]] if path else root[b]
            assert tree.tokens[b, n] == token
            assert tree.parent[b, n] == (order.index(path[:-1]) if path else -1)
    assert alone.tokens.tolist() == [[90], [91]] and alone.unpacker.shape == (2, 1, 1)


GROWN, VOCABULARY, DEEP = 12, 5, 3
growing = jax.jit(grow, static_argnames="count")


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def best_first(nodes, log_p, count, slots, deep):
    """`nodes` `[(token, parent, score, depth)]` of one row with the best `count` added, by a heap of all candidates."""
    there = {(parent, token) for token, parent, _, _ in nodes}
    heap = [
        (-(score + log_p[n, token]), n, token)
        for n, (_, _, score, depth) in enumerate(nodes)
        for token in range(log_p.shape[-1])
        if depth < deep - 1 and (n, token) not in there and log_p[n, token] > -np.inf
    ]
    heapq.heapify(heap)
    nodes = list(nodes)
    for _ in range(min(count, slots - len(nodes), len(heap))):
        score, n, token = heapq.heappop(heap)
        nodes.append((token, n, -score, nodes[n][3] + 1))
    return nodes


@pytest.mark.parametrize("ties", [False, True], ids=["random", "ties"])
def test_grow(ties):
    """Nodes added twice, at the wrong score, too deep or beyond the slots; ties in another order than slot, token."""
    rng = np.random.default_rng(4)
    slots = np.zeros((B, GROWN), int)
    rows = map(jnp.asarray, (slots + 2, slots - 1))
    tree = PrefixTree.from_parents(*rows, DEEP, jnp.asarray([1, 1]))
    nodes = [[(2, -1, 0.0, 0)] for _ in range(B)]
    for _ in range(6):
        logits = rng.standard_normal((B, GROWN, VOCABULARY)) * 2
        if ties:  # all scores of a depth are equal, but for what cannot be
            logits = np.zeros_like(logits)
            logits[:, ::2, 1] = -np.inf
        log_p = log_softmax(logits)
        if not ties:  # scores are of the logits given now
            nodes = [rescored(row, p) for row, p in zip(nodes, log_p, strict=True)]
        tree = jax.device_get(growing(tree, logits, count=3))
        nodes = [best_first(row, p, 3, GROWN, DEEP) for row, p in zip(nodes, log_p, strict=True)]
        for b in range(B):
            check_tree_of(tree, b)
            size = int(tree.size[b])
            found = zip(tree.tokens[b, :size].tolist(), tree.parent[b, :size].tolist(), strict=True)
            assert list(found) == [node[:2] for node in nodes[b]]
    assert tree.size.tolist() == [GROWN, GROWN]
    assert int(tree.depth.max()) == DEEP - 1


def rescored(nodes, log_p):
    """Nodes with the scores that these log-probabilities give them."""
    found = []
    for token, parent, _, depth in nodes:
        score = 0.0 if parent < 0 else found[parent][2] + log_p[parent, token]
        found.append((token, parent, score, depth))
    return found


def test_grow_to_the_end():
    """More nodes than possible: two tokens and two levels have three."""
    slots = np.zeros((1, 6), int)
    tree = PrefixTree.from_parents(*map(jnp.asarray, (slots, slots - 1)), 2, jnp.asarray([1]))
    logits = np.zeros((1, 6, 2), jnp.bfloat16)
    tree = growing(tree, logits, count=5)
    assert tree.size.tolist() == [3] and tree.tokens.tolist() == [[0, 0, 1, 0, 0, 0]]
    same(growing(tree, logits, count=5), tree)


BEAM, NODES = np.zeros((2, 3, 4), np.int32), np.zeros((2, 5), np.int32)
HUGE = jax.ShapeDtypeStruct((1, 2**16, 2**15), jnp.int32)
PACK = (
    ({"beam": BEAM.astype("float32")}, TypeError, "beam", "float32[2,3,4]", "integer"),
    ({"beam": BEAM[0]}, ValueError, "beam", "int32[3,4]", "(B, M, C)"),
    ({"beam": BEAM[:, :0]}, ValueError, "beam", "int32[2,0,4]", "candidates"),
    ({"beam": BEAM[..., :0]}, ValueError, "beam", "int32[2,3,0]", "tokens"),
    ({"lengths": [1]}, TypeError, "lengths", "list [1]", "array"),
    ({"lengths": BEAM[..., 0, 0]}, ValueError, "lengths", "int32[2]", "(2, 3)"),
    ({"lengths": BEAM[..., 0] + 5}, ValueError, "lengths", "5 at [0, 0]", "from 0 to 4"),
    ({"capacity": 0}, ValueError, "capacity", "0", "at least 1"),
    ({"capacity": 2.0}, TypeError, "capacity", "float 2.0", "integer"),
    ({"pad_token": 0.5}, TypeError, "pad_token", "float 0.5", "integer"),
    ({"pad_token": 2**31}, ValueError, "pad_token", str(2**31), "int32"),
)
PARENTS = (
    ({"tokens": NODES[0]}, ValueError, "tokens", "int32[5]", "(B, L)"),
    ({"tokens": NODES[:, :0]}, ValueError, "tokens", "int32[2,0]", "at least 1 slot"),
    ({"parent": NODES[:, :4]}, ValueError, "parent", "int32[2,4]", "(2, 5)"),
    ({"parent": NODES - 2}, ValueError, "parent", "-2 for slot 0 of row 0", "before the child"),
    ({"parent": NODES}, ValueError, "parent", "0 for slot 0 of row 0", "before the child"),
    ({"depth": 0}, ValueError, "depth", "0", "at least 1"),
    ({"depth": 10**4}, ValueError, "depth", "10000", "at most the 5 slots of tokens"),
    ({"depth": 2}, ValueError, "parent", "3 to slot 2 of row 0", "depth = 2"),
    ({"size": NODES[:, 0] + 6}, ValueError, "size", "6 at [0]", "from 0 to 5"),
    ({"size": NODES}, ValueError, "size", "int32[2,5]", "(2)"),
)
CHOSEN = {"choices": [(0,)], "root": NODES[:, 0], "candidates": BEAM[:, :2, :3]}
CHOICES = (
    ({"choices": 3}, TypeError, "choices", "int 3", "sequence"),
    ({"choices": [0, 1]}, TypeError, "choices", "int 0", "tuples of ranks"),
    ({"choices": [(0.5,)]}, TypeError, "choices", "float 0.5", "integer"),
    ({"choices": [()]}, ValueError, "choices", "()", "1 to 2 ranks"),
    ({"choices": [(3,)]}, ValueError, "choices", "(3,)", "ranks below 3"),
    ({"choices": [(0,), (0, 0), (0, 0, 0)]}, ValueError, "choices", "(0, 0, 0)", "1 to 2 ranks"),
    ({"choices": [(0,), (1, 0)]}, ValueError, "choices", "(1, 0)", "(1,), the parent"),
    ({"choices": [(0,), (1,), (0,)]}, ValueError, "choices", "(0,) twice", "once"),
    ({"root": NODES}, ValueError, "root", "int32[2,5]", "(B)"),
    ({"candidates": BEAM[:1]}, ValueError, "candidates", "int32[1,3,4]", "(2, D, R)"),
    ({"candidates": BEAM.astype("int16")}, TypeError, "candidates", "int16", "root, int32"),
)
LOGITS = np.zeros((2, 5, 3), np.float32)
CHAIN = np.arange(-1, 4, dtype=np.int32)[None].repeat(2, 0)
GROW = (
    ({"tree": None}, TypeError, "tree", "None", "PrefixTree"),
    (
        {"tree": lambda: PrefixTree.from_beam(jnp.asarray(BEAM), capacity=5)},
        *(ValueError, "tree.unpacker", "int32[2,3,4]", "(2, 5, C)"),
    ),
    ({"logits": LOGITS[:, 1:]}, ValueError, "logits", "float32[2,4,3]", "(2, 5, V)"),
    ({"logits": LOGITS[..., :0]}, ValueError, "logits", "float32[2,5,0]", "at least 1"),
    ({"count": 0}, ValueError, "count", "0", "at least 1"),
    ({"count": None}, TypeError, "count", "None", "integer"),
)


def chain():
    """A tree of one path, of JAX's arrays."""
    depth = np.arange(5, dtype=np.int32)
    path = np.where(depth[:, None] >= depth, depth, -1)
    rows = NODES, np.tri(5, dtype=bool), depth, depth - 1, path, np.int32(5)
    return PrefixTree(NODES, *(np.stack([x, x]) for x in rows[1:]))


def given(arguments):
    """Arguments that wait: arrays as those of JAX, and functions of none called."""
    return {name: as_given(x) for name, x in arguments.items()}


def as_given(x):
    x = x() if inspect.isfunction(x) else x
    return jax.tree.map(lambda y: jnp.asarray(y) if isinstance(y, np.ndarray) else y, x)


@pytest.mark.usefixtures("unchecked", "user_settings")
@pytest.mark.parametrize(
    ("function", "valid", "wrong"),
    [
        (PrefixTree.from_beam, {"beam": BEAM}, PACK),
        (PrefixTree.from_parents, {"tokens": NODES, "parent": CHAIN, "depth": 5}, PARENTS),
        (PrefixTree.from_choices, CHOSEN, CHOICES),
        (grow, {"tree": chain, "logits": LOGITS, "count": 1}, GROW),
    ],
    ids=["pack", "parents", "choices", "grow"],
)
def test_bad_input(function, valid, wrong):
    """Wrong dtypes, ranks, lengths, capacities and parents: errors by the argument's name, before compilation."""
    for change, *told in wrong:
        complains(partial(function, **given(valid | change)), *told)


@pytest.mark.usefixtures("unchecked", "user_settings")
def test_more_bad_input():
    """More entries than int32 counts, which would wrap around; fields of a tree that do not match."""
    with pytest.raises(ValueError, match=r"^beam: wanted M \* C that int32 .* got int32\[1,6553"):
        jax.eval_shape(PrefixTree.from_beam, HUGE)
    tree = as_given(chain)
    for change, error, name, got, wanted in (
        ({"parent": NODES + 4}, ValueError, "tree.parent", "4 for slot 0 of row 0", "before the"),
        ({"parent": NODES[:1]}, ValueError, "tree.parent", "int32[1,5]", "(2, 5)"),
        ({"mask": NODES}, TypeError, "tree.mask", "int32[2,5]", "boolean"),
        ({"mask": np.asarray(tree.mask[0])}, ValueError, "tree.mask", "bool[5,5]", "(2, 5, 5)"),
        ({"tokens": NODES > 0}, TypeError, "tree.tokens", "bool[2,5]", "integer"),
        ({"depth": None}, TypeError, "tree.depth", "None", "array"),
        ({"size": NODES}, ValueError, "tree.size", "int32[2,5]", "(2)"),
        ({"unpacker": NODES}, ValueError, "tree.unpacker", "int32[2,5]", "(2, M, C)"),
        ({"unpacker": BEAM + 5}, ValueError, "tree.unpacker", "5 at [0, 0, 0]", "from -1 to 4"),
        ({"size": NODES[:, 0] + 6}, ValueError, "tree.size", "6 at [0]", "from 0 to 5"),
    ):
        wrong = tree._replace(**given(change))
        complains(partial(PrefixTree.unpack, wrong, tree.tokens), error, name, got, wanted)
    few_nodes, one_row = as_given([NODES[:, 1:], NODES[0]])
    complains(partial(tree.unpack, few_nodes), ValueError, "x", "int32[2,4]", "(2, 5)")
    complains(partial(tree.unpack, [1]), TypeError, "x", "list", "array")
    complains(partial(tree.unpack, one_row), ValueError, "x", "int32[", "(2, 5)")
    # what is traced cannot be judged, but it can be packed
    beam = jnp.asarray(BEAM)
    run = jax.jit(lambda lengths: PrefixTree.from_beam(beam, lengths=lengths).size)
    sizes = run(BEAM[..., 0] + 9)
    assert sizes.tolist() == [4, 4]


def unpack(tree, x):
    return PrefixTree.unpack(tree, x)


FUZZED = {
    PrefixTree.from_beam: {"beam": BEAM},
    unpack: {"tree": chain, "x": NODES},
    PrefixTree.from_parents: {"tokens": NODES, "parent": CHAIN, "depth": 5},
    PrefixTree.from_choices: CHOSEN,
    grow: {"tree": chain, "logits": LOGITS, "count": 1},
    accept_greedy: {"tree": chain, "logits": LOGITS},
    verify: {"tree": chain, "logits": LOGITS, "temperature": 0.5, "key": lambda: jax.random.key(0)},
}


@pytest.mark.usefixtures("unchecked", "user_settings")
@pytest.mark.parametrize(
    "function", few(list(FUZZED), PrefixTree.from_beam, unpack, verify), ids=lambda f: f.__name__
)
@hypothesis.given(data=st.data())
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_anything_else(function, data):
    """Every other failure: an AttributeError, an IndexError, or XLA's own message."""
    names = set(inspect.signature(function).parameters)
    name = data.draw(st.sampled_from(sorted(names)))
    arguments = {**given(FUZZED[function]), name: data.draw(ANYTHING)}
    # the arguments have values; what is computed from them is traced alone
    outcome(lambda **known: jax.eval_shape(lambda: function(**known)), names, arguments)
