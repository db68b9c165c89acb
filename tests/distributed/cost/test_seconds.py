"""What a collective lasts and sends, beside what its kind of network says, written out."""

import pytest

from energy_attn.distributed import cost
from energy_attn.distributed.internal import network as model

LATENCY, BANDWIDTH, SIZE = 3.0, 2.0, 16


def network(*devices, torus=False, all_reduce="tree", **options):
    links = tuple(cost.Link(n, LATENCY, BANDWIDTH, torus=torus) for n in devices)
    return cost.Topology("test", links, all_reduce, **options)


@pytest.mark.parametrize(("distance", "hops"), [(1, 1), (3, 3), (5, 3), (7, 1), (9, 1)])
def test_a_message(distance, hops):
    """A torus that is crossed the long way round; a switch that is taken for one."""
    transfer = model.Transfer("collective-permute", SIZE, (0,), distance=distance)
    assert model.seconds(transfer, network(8, torus=True)) == hops * (LATENCY + SIZE / BANDWIDTH)
    assert model.seconds(transfer, network(8)) == LATENCY + SIZE / BANDWIDTH
    taken = model.seconds(transfer, network(8, launch=0.5, overhead=0.25))
    assert taken == 0.5 + LATENCY + 0.25 + SIZE / BANDWIDTH


def test_a_message_over_two_networks():
    """The slow one of two that are crossed at once, whose card one device has for itself."""
    slow = cost.Link(2, 10.0, 0.5, sharing=4)
    found = cost.Topology("test", (slow, cost.Link(4, LATENCY, BANDWIDTH)))
    transfer = model.Transfer("collective-permute", SIZE, (0, 1))
    assert model.seconds(transfer, found) == 10 + SIZE / (0.5 * 4)


def test_sums_and_gathers():
    """Hops or bytes of another algorithm than the platform's: two trees, one ring, or axis by axis."""
    summed, gathered = (model.Transfer(x, SIZE, (0,)) for x in ("all-reduce", "all-gather"))
    assert model.seconds(summed, network(8)) == 2 * 3 * LATENCY + 2 * SIZE / BANDWIDTH
    ring = 7 * LATENCY + 7 / 8 * SIZE / BANDWIDTH
    assert model.seconds(summed, network(8, all_reduce="ring")) == 2 * ring
    levels = network(8, torus=True, all_reduce="levels")
    assert model.seconds(summed, levels) == 2 * (4 * LATENCY + 7 / 8 * SIZE / BANDWIDTH)
    assert model.seconds(gathered, levels) == 4 * LATENCY + 7 * SIZE / BANDWIDTH
    # two of gloo's that send to each other take turns
    two = LATENCY + SIZE / BANDWIDTH
    assert model.seconds(gathered, network(2, all_reduce="ring")) == two + SIZE / BANDWIDTH


def test_an_exchange():
    """Parts for all others that travel further than a quarter of a torus, or wait for none."""
    transfer = model.Transfer("all-to-all", SIZE, (0,))
    crossing = 7 / 8 * SIZE / BANDWIDTH
    assert model.seconds(transfer, network(8)) == LATENCY + crossing
    assert model.seconds(transfer, network(8, torus=True)) == 4 * LATENCY + 2 * crossing
    late = model.seconds(transfer, network(8, overhead=0.25))
    assert late == LATENCY + 0.25 + crossing + 6 * 0.25


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("all-reduce", 7 / 4),
        ("all-gather", 7),
        ("reduce-scatter", 7 / 8),
        ("all-to-all", 7 / 8),
        ("collective-permute", 1),
    ],
)
def test_bytes(kind, part):
    """What one of eight devices puts on links: of a sum twice the share that is not its own."""
    transfer = model.Transfer(kind, SIZE, (0, 1), count=3)
    assert model.sent(transfer, network(2, 4, all_reduce="ring")) == 3 * part * SIZE
