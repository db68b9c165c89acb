"""What XLA:GPU makes of decoding over sixteen nodes of eight H200, compiled ahead of time, without GPU or driver.

Needs jax-cuda12-plugin and nvidia-cuda-nvcc-cu12 (`make test-cuda`). Programs are read, never run.
"""

import re

import pytest
from jax.sharding import Mesh

from energy_attn.distributed import collectives, cost, methods, sharded_attention
from tests.support.cuda import nodes
from tests.support.programs import (
    by_kind,
    check_documents,
    decoding,
    payload,
    shape_of,
    shards,
    trained,
    waits,
)

NODES = cost.topology("dgx_h100", (8,), nodes=16)
# XLA:GPU copies and pads a shard before its products unless its length is a multiple of about 1024.
KEYS = (640 * 1024, 5120 * 1024)
pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("user_settings")]


def compiled(f, keys, **options):
    """Decoding on all nodes: one query, and that many keys in total."""
    return decoding(nodes(16, 8), f, keys, **options)


def predicted(method, merge, keys):
    return by_kind(cost.transfers(method, merge, shape_of(keys), NODES))


@pytest.mark.toolkits
@pytest.mark.parametrize(("merge", "most"), [("allreduce", 2), ("gather", 1), ("butterfly", 7)])
def test_decode(merge, most):
    """More collectives than the merge has steps, bytes that the cost model lacks or that grow with keys, memory."""
    short, long = (compiled(sharded_attention, keys, method=methods.Tree(merge)) for keys in KEYS)
    assert len(collectives(long)) <= most
    assert payload(long) == predicted("tree", merge, KEYS[1])
    assert payload(short) == payload(long)
    assert (
        shards(long, KEYS[1], 128) <= 1.02
    )  # scores and weights of 16 rows are 1.2% of so many keys


@pytest.mark.full
@pytest.mark.parametrize("method", ["ring", "gather", "tree"])
def test_a_window_sends_its_halo(method):
    """Keys that no query sees, in a program for GPUs, forward and backward, by any method that sends keys."""
    program = trained(mesh_of_a_node(), method, window=(511, 0), layout="contiguous")
    shape = cost.Shape(1, 16384, 16384, 32, 8, 128, queries_sharded=True, window=(511, 0))
    topology = cost.topology("dgx_h100", (8,))
    transfers = cost.transfers("ring", "keys", shape, topology, gradient=True)
    assert payload(program) == by_kind(transfers)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:parallel. under a causal mask")
def test_documents_send_what_they_share():
    """Keys of documents that end before a shard begins."""
    check_documents(mesh_of_a_node())


def mesh_of_a_node():
    return Mesh(nodes(1, 8).devices.ravel(), ("device",))


def test_hierarchical():
    """All rows between nodes instead of a share. XLA:GPU may narrow the last gather by itself."""
    found = payload(compiled(sharded_attention, KEYS[1], method=methods.Tree("hierarchical")))
    wanted = predicted("tree", "hierarchical", KEYS[1])
    assert found.pop("all-gather") <= wanted.pop("all-gather")
    assert found == wanted


def test_sums_are_wide():
    """Numerators sent in bfloat16."""
    found = collectives(compiled(sharded_attention, KEYS[1], method=methods.Tree("allreduce")))
    assert {dtype for c in found for dtype in c.dtypes} == {"f32"}


def test_ring():
    """A ring that makes a hop too many, or sends positions that are not compared."""
    program = compiled(
        sharded_attention, KEYS[0], method=methods.Ring("keys"), queries_sharded=False
    )
    assert payload(program) == predicted("ring", "keys", KEYS[0])


def test_a_ring_sends_while_it_computes():
    """A transfer beside which no attention is computed; keys and values, or their gradients, sent one by one."""
    program = trained(nodes(1, 8))
    assert not waits(program.as_text())
    around = [c for c in collectives(program) if c.count > 1]
    assert [len(c.shapes) for c in around] == [2, 4]


def test_a_gather_sends_while_it_computes():
    """A piece of keys, or of gradients on their way home, that is waited for before the products beside it.

    Nothing is beside the first piece and the last gradients; in the backward's loop the gather waits, not the scatter.
    """
    text = trained(nodes(1, 8), "gather").as_text()
    for kind, waiting in (("all-gather", 2), ("reduce-scatter", 1)):
        # JAX 0.12 leaves those that wait without a start and an end of their own
        assert len(re.findall(rf" {kind}(-start)?\(", text)) == 3
        assert len(waits(text, kind)) <= waiting
