"""Products of each step of a method, counted pair by pair, and the transfers that they hide."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from energy_attn.distributed import cost, plan
from energy_attn.distributed.internal import CHIPS
from tests.support.complaints import refused
from tests.support.selection import few

LAYOUTS = "contiguous", "zigzag", "striped"
CHIP = dataclasses.replace(plan.chip("v5p"), flops=1e3, memory=1, efficiency=1.0)


def network(*sizes, bandwidth=1.0, platform="tpu"):
    links = tuple(cost.Link(size, 0.0, bandwidth) for size in sizes)
    return cost.Topology("test", links, "tree", platform=platform)


def causal(tokens, layout="contiguous", heads=8, kv_heads=8, width=2, **options):
    sizes = (1, tokens, tokens, heads, kv_heads, width)
    return cost.Shape(*sizes, causal=True, queries_sharded=True, layout=layout, **options)


def positions(layout, tokens, devices):
    """Those of each device, in runs that lie in one piece of the sequence."""
    order = np.arange(tokens)
    if layout == "contiguous":
        return [[x] for x in np.split(order, devices)]
    if layout == "striped":
        return [[order[i::devices]] for i in range(devices)]
    halves = np.split(order, 2 * devices)
    return [[halves[i], halves[-1 - i]] for i in range(devices)]


def computed(rows, columns, is_causal, window, tile):
    """Pairs in the squares of runs of queries and keys of which a pair is seen, looked at one by one."""
    count = 0
    for queries, keys in itertools.product(rows, columns):
        size = max(x for x in range(1, tile + 1) if len(queries) % x == len(keys) % x == 0)
        for i, j in itertools.product(range(0, len(queries), size), range(0, len(keys), size)):
            apart = queries[i : i + size, None] - keys[None, j : j + size]
            seen = np.ones_like(apart, bool) if not is_causal else apart >= 0
            if window is not None:
                seen &= (apart <= window[0]) & (-apart <= window[1])
            count += size * size * bool(seen.any())
    return count


def by_hand(method, shape, sizes, tile):
    """Each step of each device, with the keys that it then has, of 8 heads."""
    devices = int(np.prod(sizes))
    every = positions(shape.layout, shape.keys, devices)

    def of(rows, columns):
        return 8 * computed(rows, columns, shape.causal, shape.window, tile)

    def joined(parts):
        return [run for part in parts for run in part]

    if method == "ring":
        steps = range(devices)
        return [max(of(every[i], every[i - s]) for i in range(devices)) for s in steps]
    if method == "tree":
        return [max(of(joined(every), keys) for keys in every)]
    if method == "ulysses":
        return [of(joined(every), joined(every)) // devices]
    if method == "reproducible":
        return [max(of(queries, joined(every)) for queries in every)]
    if method == "hybrid":
        shared = sizes[-1]
        groups = [joined(every[i : i + shared]) for i in range(0, devices, shared)]
        steps = range(len(groups))
        return [
            max(of(groups[i], groups[i - s]) for i in range(len(groups))) // shared for s in steps
        ]
    size = shape.keys // devices
    count = next(n for n in range(8, 0, -1) if size % n == 0)
    halves = 2 if count > 1 and size % (2 * count) == 0 else 1
    length, found = size // (halves * count), []
    for piece in range(count):
        keys = []
        for runs, half in itertools.product(every, range(halves)):
            place, begin = 0, (half * count + piece) * length
            for run in runs:
                keys.append(run[max(0, begin - place) : max(0, begin + length - place)])
                place += len(run)
        keys = [run for run in keys if len(run)]
        found.append(max(of(rows, keys) for rows in every))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["ring", "gather", "tree", "ulysses", "hybrid", "reproducible"])
def test_pairs(method, layout):
    """A device that is not the busiest, keys of another device, a piece too many, a diagonal that is left out."""
    for tokens, tile, is_causal in ((48, 1, True), (48, 4, True), (80, 3, True), (16, 1, False)):
        sizes = (4, 2) if method == "hybrid" else (8,)
        shape = dataclasses.replace(causal(tokens, layout), causal=is_causal)
        found = plan.pairs(method, shape, network(*sizes), tile=tile)
        assert list(found) == by_hand(method, shape, sizes, tile), (tokens, tile)


@pytest.mark.parametrize("layout", few(LAYOUTS, "zigzag"))
def test_pairs_of_a_window(layout):
    """Keys before the window that are counted, or those behind a query that sees both ways."""
    for window, is_causal in (((5, 0), True), ((3, 4), False), ((40, 7), True)):
        shape = dataclasses.replace(causal(32, layout, window=window), causal=is_causal)
        for method in ("tree", "ulysses"):
            found = plan.pairs(method, shape, network(4))
            seen = dataclasses.replace(shape, window=(window[0], 0 if is_causal else window[1]))
            assert list(found) == by_hand(method, seen, (4,), 1)
    near = causal(64, layout, window=(3, 0))
    for method in ("ring", "gather"):
        found = plan.pairs(method, near, network(4))
        # of a window in an order of strides every device has some, so that all keys go around
        assert (len(found) > 1) == (layout == "striped")
        assert sum(found) >= max(plan.pairs("ulysses", near, network(4)))
        if layout != "striped":
            every = positions(layout, 64, 4)
            keys = [run for part in every for run in part]
            assert found[0] == 8 * max(computed(x, keys, True, (3, 0), 1) for x in every)


def test_who_waits():
    """A ring over contiguous shards as fast as a balanced gather; a layout that does not balance."""
    mesh = network(16)

    def work(method, layout):
        return sum(plan.pairs(method, causal(2048, layout, heads=16, kv_heads=16), mesh))

    even = work("ulysses", "contiguous")
    assert work("ring", "contiguous") / even == pytest.approx(2 - 1 / 16, rel=0.01)
    assert work("gather", "contiguous") == work("ring", "contiguous")
    assert work("ring", "zigzag") == pytest.approx(even, rel=0.01)
    assert work("ring", "striped") == pytest.approx(even, rel=0.01)
    assert work("gather", "striped") == pytest.approx(even, rel=0.02)
    # in each piece, which has keys of both of a device's halves
    assert work("gather", "zigzag") == pytest.approx(even, rel=0.01)


def test_hidden_around_a_ring():
    """Hops beside the products of another step, or more of them than there are; half of them beside the way home."""
    shape, mesh = causal(64), network(4, bandwidth=1e4)
    counts = np.array(plan.pairs("ring", shape, mesh))
    sizes = 2 * 16 * 8 * 2 * 2  # keys and values of a device, in bytes of bfloat16
    hop, products = sizes / 1e4, counts * 8 / 1e3
    positions = 3 * 64 / 1e4  # a gather of 16 positions
    time = plan.step_time("ring", "keys", shape, mesh, CHIP)
    assert time.products == pytest.approx(products.sum())
    assert time.transfers == pytest.approx(3 * hop + positions)
    assert time.exposed == pytest.approx(positions)  # of hops that are shorter than products
    slow = dataclasses.replace(mesh, links=(cost.Link(4, 0.0, 1e2),))
    hop, positions = 100 * hop, 100 * positions
    time = plan.step_time("ring", "keys", shape, slow, CHIP)
    late = np.maximum(hop - products[:3], 0).sum()
    assert 0 < late < 3 * hop and time.exposed == pytest.approx(late + positions)
    both = plan.step_time("ring", "keys", shape, slow, CHIP, gradient=True)
    assert both.products == pytest.approx(3.5 * products.sum())
    behind = np.array([0, 2, 2, 2, 2]) * hop  # gradients in float32, the last of which come home
    around = np.array([1, 1, 1, 0, 0]) * hop
    own = products[0] / 2
    halves = 2.5 * np.array([own, *products[1:], own])
    more = np.maximum(around + behind - halves, 0).sum()
    assert both.exposed == pytest.approx(time.exposed + more)
    two = plan.step_time("ring", "keys", causal(32), network(2, bandwidth=1e2), CHIP, gradient=True)
    assert 0 < two.exposed < two.transfers


def test_hidden_in_a_gather():
    """A first piece that is hidden, gathers of the backward beside products, or a TPU that hides any."""
    shape = causal(64, "striped")
    tpu = plan.step_time("gather", None, shape, network(4, bandwidth=1e4), CHIP, gradient=True)
    assert tpu.exposed == tpu.transfers > 0
    gpus = network(4, bandwidth=1e4, platform="gpu")
    ahead = plan.step_time("gather", None, shape, gpus, CHIP)
    piece = 3 * 2 * 2 * 8 * 2 * 2 / 1e4  # of two keys and values of each device, from three others
    assert ahead.exposed == pytest.approx(3 * 64 / 1e4 + piece)
    both = plan.step_time("gather", None, shape, gpus, CHIP, gradient=True)
    # the backward gathers all but the first piece again, and scatters one behind the products, in float32
    assert both.exposed == pytest.approx(ahead.exposed + 7 * piece + 2 * piece)


def test_nothing_hidden():
    """An exchange or a reduction that is taken for hidden; a hybrid whose ring is not."""
    shape, fast = causal(64), network(2, 4, bandwidth=1e6)
    ways = ("ulysses", None), ("tree", "gather"), ("ring", "queries"), ("reproducible", None)
    for method, merge in ways:
        time = plan.step_time(method, merge, shape, fast, CHIP)
        assert time.exposed == pytest.approx(time.transfers) and time.exposed > 0
    hybrid = plan.step_time("hybrid", None, shape, fast, CHIP, gradient=True)
    assert 0 < hybrid.exposed < hybrid.transfers
    assert hybrid.seconds == hybrid.products + hybrid.exposed
    alone = plan.step_time("ring", "keys", shape, network(1), CHIP)
    assert alone == (8 * sum(range(65)) * 8 / 1e3, 0, 0)


def test_one_link_of_two():
    """A ring that sends by both links of a torus axis at once."""
    shape, switch = causal(64), network(4, bandwidth=1e2)
    torus = dataclasses.replace(switch, links=(dataclasses.replace(switch.links[0], torus=True),))
    hops = 3 * 2 * 16 * 8 * 2 * 2 / 1e2
    times = [plan.step_time("ring", "keys", shape, x, CHIP).transfers for x in (switch, torus)]
    assert times[1] - times[0] == pytest.approx(hops)
    times = [plan.step_time("gather", None, shape, x, CHIP).transfers for x in (switch, torus)]
    assert times[0] == times[1]


NAME: Any = "v5p"
SHAPE, TWO = causal(32), network(2)
COMPLAINTS = {
    "ValueError shape: wanted as many queries": lambda: plan.pairs(
        "ring", dataclasses.replace(SHAPE, queries=1), TWO
    ),
    "ValueError shape: wanted a multiple of 4": lambda: plan.pairs(
        "ring", causal(30, "zigzag"), TWO
    ),
    "ValueError tile: wanted": lambda: plan.pairs("ring", SHAPE, TWO, tile=0),
    "ValueError method: wanted sharded": lambda: plan.pairs(
        "ring", dataclasses.replace(SHAPE, queries_sharded=False), TWO
    ),
    "TypeError chip: wanted a Chip": lambda: plan.step_time("ring", "keys", SHAPE, TWO, NAME),
    "ValueError gradient: .* 'tree'": lambda: plan.step_time(
        "tree", "gather", SHAPE, TWO, CHIP, gradient=True
    ),
    "ValueError name: wanted .*'h200', got str 'v9'": lambda: plan.chip("v9"),
    "ValueError flops: wanted": lambda: dataclasses.replace(CHIP, flops=0.0),
    "ValueError memory: wanted": lambda: dataclasses.replace(CHIP, memory=0),
    "ValueError efficiency: wanted": lambda: dataclasses.replace(CHIP, efficiency=1.5),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wanted", COMPLAINTS)
def test_complaints(wanted):
    """Sizes that would be counted as something else."""
    with refused(wanted):
        COMPLAINTS[wanted]()


def test_chips_have_networks():
    """A chip whose interconnect has another name, or none."""
    for name, chip in CHIPS.items():
        found = cost.topology(chip.network, (2,))
        assert name[1:] in found.name and chip.flops > 1e14 and chip.memory > 1e10
        assert plan.chip(name) == chip
        assert plan.chip(name, efficiency=1.0) == dataclasses.replace(chip, efficiency=1.0)
