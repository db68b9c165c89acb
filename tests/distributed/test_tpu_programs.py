"""What XLA:TPU makes of decoding over whole pods, compiled ahead of time: no TPU is needed, only libtpu.

Programs are compiled for the paper's sizes (16 heads of 128, bfloat16, 640k and 5.12M keys) and read, never run.
"""

import collections
import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import collectives, cost, ring_attention, tree_attention
from energy_attn.kernels import AttentionState, local_attention, merge

# So that libtpu looks for no TPU and no metadata server, keeps no logs, and loads into several processes.
os.environ.update(
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_LOG_DIR="disabled",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)
AXES = ("node", "device")
SHARDED = P(None, AXES)
PODS = {
    "v5p": (("v5p:4x4x8", {}), (16, 8), cost.tpu("v5p", (16, 8))),
    "v5e": (("v5e:16x16", {}), (16, 16), cost.tpu("v5e", (16, 16))),
    "v6e": (("v6e:4x4", {}), (4, 4), cost.tpu("v6e", (4, 4))),
    "slices": (("v5p:2x2x2", {"num_slices": 16}), (16, 8), cost.tpu("v5p", (8,), slices=16)),
}
HEADS, WIDTH = 16, 128
# Large shards: 328 MB of keys and values per chip, on v5e half of that.
KEYS = {"v5p": 5_120_000, "v5e": 5_120_000, "v6e": 640_000, "slices": 5_120_000}
pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("user_settings")]


def shape_of(keys):
    return cost.Shape(1, 1, keys, HEADS, HEADS, WIDTH)


REPLICATED = P()


@functools.cache
def compiled(pod, f, keys, out_specs=REPLICATED, donate=(), **options):
    """Decoding on a pod: one query, and so many keys in all."""
    (name, slices), sizes, _ = PODS[pod]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **slices).devices
    mesh = Mesh(np.array(devices).reshape(sizes), AXES)
    arrays = [
        jax.ShapeDtypeStruct((1, n, HEADS, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for n, spec in ((1, P()), (keys, SHARDED), (keys, SHARDED))
    ]
    run = jax.shard_map(
        functools.partial(f, axis_name=AXES, **options),
        mesh=mesh,
        in_specs=(P(), SHARDED, SHARDED),
        out_specs=out_specs,
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        return jax.jit(run, donate_argnums=donate).lower(*arrays).compile()


def shards(program, pod):
    """All memory that a program holds on a device, in shards of the pod's keys and values."""
    used = program.memory_analysis()
    total = used.argument_size_in_bytes + used.temp_size_in_bytes + used.output_size_in_bytes
    shard = 2 * KEYS[pod] // math.prod(PODS[pod][1]) * HEADS * WIDTH * 2
    return (total - used.alias_size_in_bytes) / shard


def payload(program):
    """Bytes by kind of collective, all runs together."""
    found = collections.Counter()
    for c in collectives(program):
        found[c.kind] += c.bytes * c.count
    return found


def predicted(method, merge, pod, **options):
    found = collections.Counter()
    for t in cost.transfers(method, merge, shape_of(KEYS[pod]), PODS[pod][2], **options):
        found[t.kind] += t.bytes * t.count
    return found


@pytest.mark.parametrize("pod", ["v5p", "v5e", "v6e"])
def test_allreduce(pod):
    """More than two collectives, sums narrowed to bfloat16 on their way, bytes that grow with keys, scratch memory."""
    program = compiled(pod, tree_attention, KEYS[pod], merge="allreduce")
    found = collectives(program)
    assert [c.kind for c in found] == ["all-reduce"] * 2
    assert {dtype for c in found for dtype in c.dtypes} == {"f32"}
    assert payload(program) == predicted("tree", "allreduce", pod)
    assert shards(program, pod) <= 1.01


@pytest.mark.parametrize("merge", ["allreduce", "gather"])
def test_a_tangent_is_one_reduction(merge):
    """Forward mode that sends more than R (H + 1) numbers beside the attention's, or sums them in bfloat16."""

    def along(query, key, value, axis_name):
        def state(*arrays):
            return tree_attention(*arrays, axis_name=axis_name, merge=merge)

        return jax.jvp(state, (query, key, value), (query, key, value))

    program = compiled("v6e", along, KEYS["v6e"])
    sums = [c for c in collectives(program) if c.kind == "all-reduce"]
    assert {dtype for c in sums for dtype in c.dtypes} == {"f32"}
    assert payload(program) == predicted("tree", merge, "v6e", tangent=True)


def test_the_tangent_of_a_ring():
    """Directions of keys that go around more than once, or as anything but permutes of their own dtype."""

    def along(query, key, value, axis_name):
        def state(*arrays):
            return ring_attention(
                *arrays, axis_name=axis_name, rotate="keys", queries_sharded=False
            )

        return jax.jvp(state, (query, key, value), (query, key, value))

    program = compiled("v6e", along, KEYS["v6e"], SHARDED)
    assert payload(program) == predicted("ring", "keys", "v6e", tangent=True)


def test_a_ring_sends_while_it_computes():
    """A transfer that begins after the attention beside it, or that is waited for before."""
    text = compiled("v6e", ring_attention, 640_000, SHARDED, rotate="keys").as_text()
    bodies = [part for part in text.split("\n\n") if "collective-permute-start(" in part]
    body = max(bodies, key=len)
    lines = body.split("\n")
    start = min(i for i, line in enumerate(lines) if "collective-permute-start(" in line)
    done = max(i for i, line in enumerate(lines) if "collective-permute-done(" in line)
    between = "\n".join(lines[start:done])
    assert "convolution" in between or "fusion(" in between or "while(" in between


def test_payload_does_not_grow_with_keys():
    """Something that grows with the context, eight times as long."""
    short, long = (
        payload(compiled("v5p", tree_attention, keys, merge="allreduce"))
        for keys in (640_000, 5_120_000)
    )
    assert short == long


@pytest.mark.parametrize("pod", ["v5p", "v5e", "v6e"])
def test_gather(pod):
    """A gather that sends more than the states, or in more than one collective."""
    program = compiled(pod, tree_attention, KEYS[pod], merge="gather")
    assert len(collectives(program)) == 1
    assert payload(program) == predicted("tree", "gather", pod)
    assert shards(program, pod) <= 1.02  # the states of all devices, in float32, are a part of it


def test_auto_knows_the_platform():
    """A compilation for TPUs whose `merge="auto"` chooses for the machine that it runs on."""
    chosen = cost.choose_merge(shape_of(640_000), PODS["v6e"][2])
    program = compiled("v6e", tree_attention, 640_000, merge="auto")
    assert payload(program) == predicted("tree", chosen, "v6e")


@pytest.mark.parametrize("pod", ["v6e", "slices"])
@pytest.mark.parametrize("merge", ["butterfly", "hierarchical"])
def test_exchanges(merge, pod):
    """An exchange that XLA:TPU repeats, widens or leaves out; on slices too, where it takes others apart."""
    program = compiled(pod, tree_attention, KEYS[pod], merge=merge)
    found = payload(program)
    if merge == "hierarchical":  # the energies' last gather, of few numbers, is a sum with zeros
        found["all-gather"] += found.pop("all-reduce", 0) // PODS[pod][1][-1]
    assert found == predicted("tree", merge, pod)
    assert shards(program, pod) <= 1.011


def test_slices_leave_little_to_the_slow_network():
    """Sums ordered by hand, axis by axis: each chip then sends all of it between slices, and not its share."""

    def by_hand(query, key, value, axis_name):
        state = local_attention(query, key, value)
        top = lax.pmax(lax.pmax(state.lse, "device"), "node")
        part = jnp.exp(state.lse - top)
        sums = (state.out.astype(part.dtype) * part[..., None], part)
        above, below = lax.psum(lax.psum(sums, "device"), "node")
        return above / below[..., None]

    def between_slices(program):
        return sum(c.bytes for c in collectives(program) if c.across_slices)

    ours = between_slices(compiled("slices", tree_attention, 640_000, merge="allreduce"))
    assert 4 * ours < between_slices(compiled("slices", by_hand, 640_000))
    gathered = compiled("slices", tree_attention, 640_000, merge="gather")
    state = predicted("tree", "gather", "slices")["all-gather"]
    assert between_slices(gathered) == state
    assert payload(gathered) == {"all-gather": (1 + 16) * state}


def test_the_sum_that_is_narrowed():
    """XLA:TPU no longer sends a sum of widened numbers narrow: then `merge_across` may be simpler than it is."""

    def widened(query, key, value, axis_name):
        return lax.psum(query.astype(jnp.float32), axis_name)

    sent = {d for c in collectives(compiled("v6e", widened, 640_000)) for d in c.dtypes}
    assert sent == {"bf16"}


def test_memory_of_rings():
    """Equation 29 is a ring that waits for each transfer; one that does not holds a shard more, as the model says."""

    def waiting(query, key, value, axis_name):
        devices = lax.axis_size(axis_name)
        pairs = [(i, (i + 1) % devices) for i in range(devices)]

        def step(carry, _):
            state, held = carry
            state = merge(state, local_attention(query, *held))
            state, held = lax.optimization_barrier((state, held))
            return (state, lax.ppermute(held, axis_name, pairs)), None

        empty = AttentionState(
            jnp.zeros((1, 1, HEADS, WIDTH), query.dtype), jnp.full((1, 1, HEADS), -jnp.inf)
        )
        (state, held), _ = lax.scan(step, (empty, (key, value)), None, length=devices)
        return state, *held

    tree = shards(compiled("v6e", tree_attention, 640_000, merge="allreduce"), "v6e")
    donated = compiled("v6e", waiting, 640_000, (P(), SHARDED, SHARDED), (1, 2))
    assert shards(donated, "v6e") / tree == pytest.approx(2, abs=0.01)
    ours = compiled("v6e", ring_attention, 640_000, rotate="keys", queries_sharded=False)
    assert payload(ours) == predicted("ring", "keys", "v6e")
    ways = ("ring", "keys"), ("tree", "allreduce")
    most, least = (cost.memory(*way, shape_of(640_000), PODS["v6e"][2]) for way in ways)
    assert shards(ours, "v6e") / tree == pytest.approx(most / least, abs=0.01)
