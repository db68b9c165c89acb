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
