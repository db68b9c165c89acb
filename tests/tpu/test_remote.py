"""The butterfly in one TPU kernel, compiled for real chips: one kernel, its barrier, and where it is XLA's instead."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import collectives, merge_across, tree_attention
from energy_attn.kernels import AttentionState
from tests.support.selection import few
from tests.support.spawn import spawn
from tests.support.tpu import ALONE

AXES = ("node", "device")
pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("user_settings")]

PODS = {  # topology, slices, devices used, the mesh's last axis
    "v4": ("v4:2x2x4", 1, None, 8),
    "v5p": ("v5p:4x4x8", 1, None, 8),
    "v6e": ("v6e:4x4", 1, None, 4),
    "tpu7x": ("tpu7x:2x2x2", 1, None, 8),
    "v5e": ("v5e:4x4", 1, None, 4),
    "slices": ("v6e:4x4", 2, None, 16),
    "half of each slice": ("v6e:4x4", 2, slice(8, 24), 16),
    "twelve": ("v6e:4x4", 1, slice(12), 12),
}


@functools.cache
def pod(name):
    topology, slices, used, last = PODS[name]
    more = {"num_slices": slices} if slices > 1 else {}
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **more).devices
    return Mesh(np.array(found)[used or slice(None)].reshape(-1, last), AXES)


def program(name, f, *arrays):
    """`f` compiled for a pod, with arrays of (shape, spec), and how many kernels it runs."""
    mesh = pod(name)
    given = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in arrays
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(f).lower(*given).compile()
    return compiled, str(compiled.as_text()).count('custom_call_target="tpu_custom_call"')


def decoding(axes=AXES):
    # attention by XLA's operations, so that the kernels counted are those of the butterfly
    attend = functools.partial(tree_attention, axis_name=axes, merge="remote")
    return jax.shard_map(
        functools.partial(attend, implementation="blockwise"),
        in_specs=(P(), P(None, axes), P(None, axes)),
        out_specs=P(),
    )


@pytest.mark.parametrize("name", few(["v4", "v5p", "v6e", "tpu7x"], "v5p"))
def test_one_kernel(name):
    """A collective of XLA's beside the kernel, or more than one kernel, for decoding on a whole slice and on a part."""
    keys = ((1, 16 * pod(name).size, 8, 128), P(None, AXES))
    for axes in (AXES, ("device",)):
        arrays = ((1, 1, 8, 128), P()), (keys[0], P(None, axes)), (keys[0], P(None, axes))
        compiled, kernels = program(name, decoding(axes), *arrays)
        assert kernels == 1 and not collectives(compiled)

    def batched(out, lse):
        folded = jax.vmap(lambda *x: merge_across(AttentionState(*x), AXES, "remote"), (1, 0))
        return folded(out[0], lse[0])

    spread = jax.shard_map(batched, in_specs=P(AXES), out_specs=P())
    rows = pod(name).size, 4, 16
    compiled, kernels = program(name, spread, ((rows[0], 16, 4, 128), P(AXES)), (rows, P(AXES)))
    assert kernels == 1 and not collectives(compiled)


@pytest.mark.parametrize("name", ["v5e", "slices", "half of each slice", "twelve"])
def test_where_chips_do_not_reach_each_other(name):
    """A copy to a chip of another slice, or to one that no route leads to: lost, or come to another chip."""
    keys = ((1, 16 * pod(name).size, 8, 128), P(None, AXES))
    compiled, kernels = program(name, decoding(), ((1, 1, 8, 128), P()), keys, keys)
    assert kernels == 0 and {c.kind for c in collectives(compiled)} == {"collective-permute"}


def test_the_same_function_for_other_devices():
    """A choice that is remembered for a mesh of the same shape, whose devices are others."""
    fold = jax.shard_map(
        lambda out, lse: merge_across(AttentionState(out[0], lse[0]), "device", "remote"),
        in_specs=P(AXES),
        out_specs=P("node"),
    )
    jitted = jax.jit(lambda out, lse: fold(out, lse))
    devices = pod("slices").devices
    found = []
    for used in (devices[1], devices.reshape(-1)[8:24], devices[0], devices.reshape(-1)[8:24]):
        mesh = Mesh(used.reshape(1, 16), AXES)
        sharding = NamedSharding(mesh, P(AXES))
        shapes = (16, 24, 128), (16, 24)
        given = [jax.ShapeDtypeStruct(x, jnp.float32, sharding=sharding) for x in shapes]
        with jax.set_mesh(mesh):
            found.append("tpu_custom_call" in jitted.lower(*given).as_text())
    assert found == [True, False, True, False]


def test_a_mesh_that_xla_splits():
    """A kernel on a mesh of which some axes are XLA's: an error of the compiler's, in place of a program."""
    fold = jax.shard_map(
        lambda out, lse: merge_across(AttentionState(out, lse), "device", "remote"),
        in_specs=P("device"),
        out_specs=P(),
        axis_names={"device"},
    )
    given = ((64, 128), P("device")), ((64,), P("device"))
    compiled, kernels = program("v6e", fold, *given)
    assert kernels == 0 and len(collectives(compiled)) > 0


LOOP = """
import jax, jax.numpy as jnp, numpy as np, sys
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from energy_attn.distributed import merge_across
from energy_attn.kernels import AttentionState

devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices
mesh = Mesh(np.array(devices), ("d",))

def fold(state, _=None):
    merged = merge_across(state, "d", "remote")
    return AttentionState(*(lax.pcast(x, "d", to="varying") for x in merged)), None

def run(out, lse):
    state, _ = fold(AttentionState(out[0], lse[0]))
    return lax.scan(fold, state, None, length=3)[0]

with jax.set_mesh(mesh):
    given = [
        jax.ShapeDtypeStruct(x, jnp.float32, sharding=NamedSharding(mesh, P("d")))
        for x in ((len(devices), 16, 128), (len(devices), 16))
    ]
    jax.jit(jax.shard_map(run, in_specs=P("d"), out_specs=P("d"))).lower(*given).compile()
print(len(devices))
"""


@pytest.mark.parametrize(
    "topology", few(["v4:2x2x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x2"], "v6e:4x4")
)
def test_the_barrier_in_front(topology, tmp_path):
    """A call that begins while another device is still in the one before: what it sends would overwrite what is read.

    XLA's own code for the kernel, also called in a loop, has the barrier of all devices before the first copy.
    """
    said = spawn(
        "-c",
        LOOP,
        topology,
        JAX_PLATFORMS="cpu",
        LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={tmp_path} --xla_jf_dump_llo_text=true",
        **ALONE,
    )
    others = int(said) - 1
    kernels = list(tmp_path.glob("*butterfly*-original.txt"))
    assert kernels
    for kernel in kernels:
        text = kernel.read_text()
        waits = text.index("/* global-barrier-wait */")
        assert f" {others} " in text[:waits].rsplit("\n", 1)[-1]  # one device waits for all others
        assert waits < text.index("vmem-to-vmem")
