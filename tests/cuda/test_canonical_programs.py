"""The canonical kernels, compiled for GPUs that are not there: a tile is the same program in all calls."""

import functools
import re

import jax
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

from energy_attn import attention
from energy_attn.kernels import AttentionState, local_attention, scores
from energy_attn.kernels.internal import candidates
from tests.support.cuda import allocated, entries, nodes
from tests.support.reproducible_programs import (
    gradients_over_a_mesh,
    sent_in_nodes,
    step_over_a_cache,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("user_settings")]
CALLS = (2, 200, 1000), (1, 1, 7777)  # batch, queries, keys, which are folded in parts
WHOLE = (2, 4000, 1000)  # not in parts, for its many tiles of queries
PRODUCT = re.compile(r"\bw?g?mma|fma\.rn\.f32")
FOLDS = {"softmax", "to_queries", "tangent"}
KERNELS = {f"{name}_{what}" for name in FOLDS for what in ("leaves", "parts")} | {"to_keys"}


def derivatives(query, key, value, score=None):
    """The state of causal attention, its gradients and a tangent."""
    _, gpu, _ = candidates(None, reproducible=True)
    run = functools.partial(local_attention, is_causal=True, score=score, implementation=gpu)
    state, back = jax.vjp(run, query, key, value)
    moved = jax.jvp(run, (query, key, value), (query, key, value))
    return state, back(AttentionState(state.out, state.lse)), moved


def compiled(run, capability, dtype, batch, queries, keys, folder):
    """A program for a GPU of a compute capability, whose code XLA writes to a folder."""
    sharding = SingleDeviceSharding(nodes(1, 1, capability).devices.item())
    arrays = [
        jax.ShapeDtypeStruct((batch, length, heads, 64), dtype, sharding=sharding)
        for length, heads in ((queries, 4), (keys, 2), (keys, 2))
    ]
    options = {"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx"}
    return jax.jit(run).lower(*arrays).compile(options)


def of_a_block(entry):
    """The code of the inner loop of most products, over the blocks of a leaf, with registers by order."""
    lines = [re.sub(r"\s*//.*", "", x) for x in entry.splitlines()]
    places = {x.split(":")[0]: at for at, x in enumerate(lines) if x.startswith("$L")}
    jumps = ((at, re.search(r"bra(?:\.uni)?\s+(\$\w+)", x)) for at, x in enumerate(lines))
    loops = [(places[x[1]], at) for at, x in jumps if x and places[x[1]] < at]
    inner = [x for x in loops if not any(x[0] <= y[0] and y[1] < x[1] for y in loops)]
    text = max(("\n".join(lines[a:b]) for a, b in inner), key=lambda x: len(PRODUCT.findall(x)))
    names = {}

    def named(x):
        return x[1] + str(names.setdefault(x[0], len(names)))

    return re.sub(r"(%[a-z]+)\d+", named, re.sub(r"\$L\w+", "", text))


def soft_cap_and_slopes():
    return scores.Compose(scores.SoftCap(20.0), scores.ALiBi(num_heads=4))


@pytest.mark.parametrize(
    ("capability", "dtype", "score"),
    [
        ((8, 0), "bfloat16", None),
        ((9, 0), "bfloat16", None),
        ((9, 0), "float32", None),
        ((9, 0), "bfloat16", soft_cap_and_slopes),
    ],
)
def test_a_tile_is_one_program(capability, dtype, score, tmp_path):
    """A constant in a kernel, an offset among them, that depends on the lengths of a call."""
    texts = []
    run = functools.partial(derivatives, score=score and score())
    for number, call in enumerate((*CALLS, WHOLE)):
        (folder := tmp_path / str(number)).mkdir()
        compiled(run, capability, dtype, *call, folder)
        texts.append(dict(entries(folder, r"attention_canonical_(\w+)")))
    *in_parts, whole = texts
    assert in_parts[0].keys() == KERNELS
    assert in_parts[0] == in_parts[1]
    assert whole.keys() == FOLDS | {"to_keys"}
    assert whole["to_keys"] == in_parts[0]["to_keys"]
    for name in FOLDS:
        block = of_a_block(whole[name])
        assert block == of_a_block(in_parts[0][f"{name}_leaves"])
        assert len(PRODUCT.findall(block)) > 100


def test_registers(tmp_path):
    """Tiles of 16 bits whose blocks do not fit into the registers of their threads."""
    run = functools.partial(attention, is_causal=True, reproducible=True)
    compiled(run, (9, 0), "bfloat16", *CALLS[0], tmp_path)
    spilled = {name: size for file in tmp_path.glob("*.ptx") for name, size, _ in allocated(file)}
    kernels = "attention_canonical_softmax_leaves", "attention_canonical_softmax_parts"
    assert [spilled[name] for name in kernels] == ["0", "0"]


def test_over_a_mesh():
    """Keys that a step over a cache sends or copies, or more nodes than blocks; a gradient that devices add up."""
    mesh = Mesh(nodes(1, 4).devices.reshape(-1), ("device",))
    for blocks in (1, 4):
        program = step_over_a_cache(mesh, blocks)
        assert sent_in_nodes(program) == pytest.approx(blocks, rel=0.01)
        memory = program.memory_analysis()
        assert memory.temp_size_in_bytes < memory.argument_size_in_bytes / 4
    assert gradients_over_a_mesh(mesh) == {("all-gather", True), ("all-reduce", False)}
