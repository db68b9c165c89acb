"""What the model predicts, written out. That programs send it is in `test_cost.py`, much of it `full`."""

import pytest

from energy_attn.distributed import cost

# 8 queries and 16 keys over four devices, 8 heads for 4 of keys, 2 and 3 numbers of 16 bits wide.
SHAPE = cost.Shape(1, 8, 16, 8, 4, 2, 3, "bfloat16", True, queries_sharded=True)
# Bytes of a device's queries, keys and values, and of the states of its queries; positions are of 4 bytes.
Q, K, V, STATE = 2 * 8 * 2 * 2, 4 * 4 * 2 * 2, 4 * 4 * 3 * 2, 2 * 8 * (3 + 1) * 4


def permute(size, count=1):
    return "collective-permute", size, count


def gather(size, count=1):
    return "all-gather", size, count


def exchange(*sizes):
    return [("all-to-all", size, 1) for size in sizes]


def to_all(size):
    return [("all-reduce", 2 * 8 * 4 * 4, 1), ("reduce-scatter", size, 1)]


def found(method, merge=None, sizes=(4,), platform="cpu", **options):
    links = tuple(cost.Link(n, 0, 1) for n in sizes)
    topology = cost.Topology("test", links, platform=platform)
    transfers = cost.transfers(method, merge, SHAPE, topology, **options)
    return [(t.kind, t.bytes, t.count) for t in transfers]


EXCHANGED = [gather(8), *exchange(Q, K, V), gather(16)]
BACK = exchange(STATE, 2 * Q, 2 * K, 2 * V, STATE)
TANGENTS = {
    ("tree", "allreduce"): [gather(Q), *to_all(4 * STATE), gather(2 * Q), to_all(4 * STATE)[1]],
    ("tree", "gather"): [gather(Q), *exchange(4 * STATE), gather(2 * Q), *exchange(4 * STATE)],
    ("ring", "keys"): [gather(16), *(permute(x, 3) for x in (K, K, K, V, V, V))],
    ("ring", "queries"): [gather(8), *(permute(x, 4) for x in (Q, STATE, 2 * Q, STATE))],
    ("ulysses", None): [*EXCHANGED, *BACK],
    ("gather", None): [gather(16), *(gather(x // 4, n) for x in (K, V) for n in (4, 3, 4))],
}


@pytest.mark.parametrize("way", TANGENTS, ids=str)
def test_tangents(way):
    """Directions that go around twice, or in numbers of another width than the model's; one of a maximum."""
    assert found(*way, tangent=True) == TANGENTS[way]


@pytest.mark.parametrize("merge", cost.MERGES)
def test_the_tangent_of_a_tree_is_one_sum(merge):
    """Of R (H + 1) numbers, by whatever merge, where all devices have the queries."""
    shape = cost.Shape(1, 2, 16, 8, 4, 2, 3, "bfloat16")
    plain, moved = (
        cost.transfers("tree", merge, shape, cost.topology("ethernet", (2,), nodes=2), tangent=x)
        for x in (False, True)
    )
    assert moved == (*plain, cost.Transfer("all-reduce", 2 * 8 * (3 + 1) * 4, (0, 1)))


def test_states():
    """Where `out` and `lse` are one array, in `lse`'s dtype, and where `out` keeps its own."""
    assert found("ulysses") == [*EXCHANGED, *exchange(STATE)]
    packed = 2 * 8 * (3 * 2 + 4)
    assert found("ulysses", platform="gpu") == [*EXCHANGED, *exchange(packed)]


@pytest.mark.parametrize("narrow", [False, True])
def test_gradients(narrow):
    """Gradients behind their keys in the numbers that were asked for, and home in those of the arrays."""
    options = {"gradient": True, "gradient_dtype": "bfloat16" if narrow else None}
    wide = 1 if narrow else 2
    hops = [
        x
        for size in (K, V)
        for x in (*[permute(size, 3)] * 2, permute(wide * size, 3), permute(size))
    ]
    assert found("ring", "keys", **options) == [gather(16), *hops]
    # an only hop is not repeated
    hops = [x for size in (K, V) for x in (permute(size), permute(wide * size), permute(size))]
    assert found("hybrid", sizes=(2, 2), **options) == [*EXCHANGED, *hops, *BACK]
    assert found("ulysses", **options) == [*EXCHANGED, *BACK]


@pytest.mark.parametrize(("keys", "count"), {1: 1, 7: 7, 9: 3, 32: 8}.items())
def test_pieces(keys, count):
    """Keys gathered in more pieces than there are, or in more than eight."""
    shape = cost.Shape(1, 4, 4 * keys, 2, 1, 2, dtype="float32", queries_sharded=True)
    transfers = cost.transfers("gather", None, shape, cost.topology("ethernet", nodes=4))
    assert [(t.bytes, t.count) for t in transfers] == [(keys * 8 // count, count)] * 2


def test_copies_of_keys():
    """One head of keys that all devices take, and six that four devices cannot share as they are."""
    for kv_heads, copies in ((1, 4), (6, 2)):
        shape = cost.Shape(1, 8, 16, 12, kv_heads, 2, dtype="float32", queries_sharded=True)
        transfers = cost.transfers("ulysses", None, shape, cost.topology("ethernet", nodes=4))
        keys = 4 * kv_heads * 2 * 4
        assert [t.bytes for t in transfers[1:3]] == [copies * keys] * 2
