"""Errors for wrong arguments: a ValueError or TypeError that names the argument, what was wanted and what it got.

The type checks of this suite are off here, so that mistakes get as far as they would for a user.
"""

import functools
import inspect
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn import models
from energy_attn.distributed import (
    KVCache,
    SequenceParallel,
    cost,
    logsumexp_across,
    make_mesh,
    merge_across,
    methods,
    shard_sequence,
    sharded_attention,
)
from energy_attn.functional import shifted_energy
from energy_attn.kernels import AttentionState, empty_state, local_attention, merge, merge_all
from tests.support.arrays import array
from tests.support.complaints import (
    ANYTHING,
    INF,
    NAN,
    STATE,
    B,
    H,
    K,
    N,
    S,
    T,
    V,
    a,
    complains,
    outcome,
)

pytestmark = pytest.mark.usefixtures("unchecked", "user_settings")
VALID = {"query": a(B, T, N, H), "key": a(B, S, K, H), "value": a(B, S, K, V)}
TWO = {name: a(2, *x.shape) for name, x in VALID.items()}  # two batch axes
ONE = {name: a(*x.shape[1:]) for name, x in VALID.items()}  # unbatched
X = a(5, 8)
FLAT = Mesh(np.array(jax.devices()), ("device",))
EXPLICIT = Mesh(np.array(jax.devices()), ("device",), axis_types=(AxisType.Explicit,))
SEGMENTS = {"key_segment_ids": a(B, S, dtype="int32")}
ROW_SEGMENTS = {"query_segment_ids": a(B, T, dtype="int32")}


# Arguments that all forms of attention share. The first argument changed is the one to be blamed.
SHARED = [
    # no arrays, or of a dtype that is none of ours
    ({"query": [[1.0]]}, TypeError, "list", "array"),
    ({"key": (1, 2)}, TypeError, "tuple (1, 2)", "array"),
    ({"value": jax.ShapeDtypeStruct((B, S, K, V), "float32")}, TypeError, "Shape", "array"),
    ({"query": a(B, T, N, H, dtype="complex64")}, TypeError, "complex64", "float32"),
    ({"key": a(B, S, K, H, dtype="bool")}, TypeError, "bool[2,7,2,5]", "float32"),
    ({"value": a(B, S, K, V, dtype="float8_e4m3fn")}, TypeError, "float8_e4m3fn", "float32"),
    ({"key": a(B, S, K, H, dtype="bfloat16")}, TypeError, "bfloat16", "dtype of query, float32"),
    ({"value": a(B, S, K, V, dtype="float16")}, TypeError, "float16", "dtype of query, float32"),
    # shapes
    ({"query": a(5)}, ValueError, "float32[5]", "(B, T, N, H) or (T, N, H)"),
    ({"key": a(1, B, S, K, H)}, ValueError, "float32[1,2,7,2,5]", "(2, S, K, 5)"),
    ({"key": a(3, S, K, H)}, ValueError, "float32[3,7,2,5]", "(2, S, K, 5)"),
    ({"key": a(B, S, K, H + 1)}, ValueError, "float32[2,7,2,6]", "(2, S, K, 5)"),
    ({"value": a(B, S - 1, K, V)}, ValueError, "float32[2,6,2,6]", "(2, 7, 2, Hv)"),
    ({"value": a(B, S, N, V)}, ValueError, "float32[2,7,4,6]", "(2, 7, 2, Hv)"),
    ({"value": a(B, S, K, 0)}, ValueError, "float32[2,7,2,0]", "width above zero"),
    ({"query": a(B, T, N, 0), "key": a(B, S, K, 0)}, ValueError, "[2,3,4,0]", "width above zero"),
    ({"query": a(B, T, 3, H)}, ValueError, "float32[2,3,3,5]", "multiple of the 2 key/value heads"),
    ({**ONE, "key": a(S, K, H + 1)}, ValueError, "float32[7,2,6]", "(S, K, 5)"),
    # several batch axes
    ({**TWO, "value": a(2, 3, S, K, V)}, ValueError, "float32[2,3,7,2,6]", "(2, 2, 7, 2, Hv)"),
    ({**TWO, "bias": a(1, 1, 2, N, T, S)}, ValueError, "[1,1,2,4,3,7]", "to (2, 2, 4, 3, 7)"),
    ({**TWO, "mask": a(3, N, T, S, dtype="bool")}, ValueError, "[3,4,3,7]", "to (2, 2, 4, 3, 7)"),
    ({**TWO, "key_positions": a(2, S, dtype="int32")}, ValueError, "int32[2,7]", "(2, 2, 7)"),
    ({**TWO, "query_seq_lengths": a(4, dtype="int32")}, ValueError, "int32[4]", "(2, 2)"),
    # bias and mask
    ({"bias": 0.0}, TypeError, "float 0.0", "array"),
    ({"bias": a(B, N, T, S, dtype="bool")}, TypeError, "bool[2,4,3,7]", "float32"),
    ({"bias": a(T, S - 1)}, ValueError, "float32[3,6]", "broadcastable to (2, 4, 3, 7)"),
    ({"bias": a(B + 1, 1, T, S)}, ValueError, "[3,1,3,7]", "broadcastable to (2, 4, 3, 7)"),
    ({"bias": a(B, N, T, S, dtype="bool")}, TypeError, "array is mask=", "float32"),
    ({"mask": True}, TypeError, "bool True", "array"),
    ({"mask": a(B, N, T, S)}, TypeError, "float32[2,4,3,7]", "boolean"),
    ({"mask": a(B, N, T, S)}, TypeError, "added to the scores is bias=", "boolean"),
    ({"mask": lambda i, j: i >= j}, TypeError, "masks.Function(function, *p", "or a boolean array"),
    ({"mask": ea.masks.Causal}, TypeError, "Causal(...) makes one", "a mask of energy_attn.masks"),
    ({"mask": a(T + 1, S, dtype="bool")}, ValueError, "bool[4,7]", "broadcastable to (2, 4, 3, 7)"),
    # what other libraries' masks look like
    ({"mask": a(B, S, dtype="bool")}, ValueError, "mask[:, None, None, :]", "to (2, 4, 3, 7)"),
    ({"mask": a(B, T, S, dtype="bool")}, ValueError, "mask[:, None]", "to (2, 4, 3, 7)"),
    ({"bias": a(B, S)}, ValueError, "bias[:, None, None, :]", "to (2, 4, 3, 7)"),
    # scale
    ({"scale": NAN}, ValueError, "nan", "finite"),
    ({"scale": array(NAN, "float32")}, ValueError, "nan", "finite"),
    ({"scale": 10**400}, ValueError, "int 1000", "finite"),
    ({"scale": 1e300}, ValueError, "1e+300", "float32"),
    ({"scale": "1.0"}, TypeError, "str '1.0'", "real number"),
    ({"scale": a(3)}, ValueError, "float32[3]", "scalar"),
    ({"scale": a(dtype="int32")}, TypeError, "int32[]", "float32"),
    # masks by position
    ({"is_causal": 1}, TypeError, "int 1", "True or False"),
    ({"is_causal": a(dtype="bool")}, TypeError, "bool[]", "True or False"),
    ({"local_window_size": (1, -2)}, ValueError, "(1, -2)", "at least 0, or None for any"),
    ({"local_window_size": -1}, ValueError, "-1", "at least 0, or None for any"),
    ({"local_window_size": (None, 2.0)}, TypeError, "(None, 2.0)", "or None for any"),
    ({"local_window_size": (1, 2, 3)}, TypeError, "(1, 2, 3)", "pair"),
    ({"local_window_size": 1.5}, TypeError, "float 1.5", "an int"),
    ({"local_window_size": a(3, dtype="int32")}, TypeError, "int32[3]", "scalar array"),
    ({"local_window_size": (a(1, dtype="int32"), 0)}, ValueError, "int32[1]", "()"),
    ({"local_window_size": a()}, TypeError, "float32[]", "integer"),
    ({"local_window_size": array(-1, "int32")}, ValueError, "-1", "at least 0"),
    ({"max_window": a(dtype="int32")}, TypeError, "int32[]", "an int"),
    ({"query_seq_lengths": [1, 2]}, TypeError, "list [1, 2]", "array"),
    ({"query_seq_lengths": a(B)}, TypeError, "float32[2]", "integer"),
    ({"query_seq_lengths": a(3, dtype="int32")}, ValueError, "int32[3]", "(2)"),
    ({"query_seq_lengths": np.array([T + 1, 0])}, ValueError, "[4, 0]", "from 0 to 3"),
    ({"key_value_seq_lengths": a(B, 1, dtype="int32")}, ValueError, "int32[2,1]", "(2)"),
    ({"key_value_seq_lengths": np.array([1, -1])}, ValueError, "[1, -1]", "from 0 to 7"),
    ({"query_positions": [[0, 1, 2]]}, TypeError, "list", "array"),
    ({"query_positions": a(B, T)}, TypeError, "float32[2,3]", "integer"),
    ({"query_positions": a(B, T + 1, dtype="int32")}, ValueError, "int32[2,4]", "(2, 3)"),
    ({"key_positions": a(B, 1, dtype="int32")}, ValueError, "int32[2,1]", "(2, 7)"),
    ({"key_positions": a(B, S, dtype="bool")}, TypeError, "bool[2,7]", "integer"),
    ({"key_positions": np.full((B, S), 2**31)}, ValueError, "2147483648", "32 bits"),
    ({"key_positions": a(S + 1, dtype="int32"), **ONE}, ValueError, "int32[8]", "(7,)"),
    ({"key_segment_ids": None, **ROW_SEGMENTS}, ValueError, "None", "as the other side has one"),
    ({"query_segment_ids": None, **SEGMENTS}, ValueError, "None", "as the other side has one"),
    ({"query_segment_ids": a(B, T), **SEGMENTS}, TypeError, "float32[2,3]", "integer"),
    ({"query_segment_ids": a(T, dtype="int32"), **SEGMENTS}, ValueError, "int32[3]", "(2, 3)"),
    # implementation
    ({"implementation": "fast"}, ValueError, "'fast'", "'reference'"),
    ({"implementation": 3}, TypeError, "int 3", "a name"),
    ({"implementation": ()}, TypeError, "tuple ()", "a name"),
    ({"implementation": ("reference", 3)}, TypeError, "('reference', 3)", "a name"),
    # no option at all; what other libraries call one
    ({"is_casual": True}, TypeError, "'is_casual'", "did you mean is_causal?"),
    ({"causal": True}, TypeError, "'causal'", "did you mean is_causal?"),
    ({"attn_mask": a(T, S)}, TypeError, "'attn_mask'", "did you mean mask (True: "),
    ({"attn_bias": a(T, S)}, TypeError, "'attn_bias'", "did you mean bias?"),
    ({"softcap": 3.0}, TypeError, "'softcap'", "did you mean score=scores.SoftCap(c)?"),
    ({"dropout": 0.1}, TypeError, "'dropout'", "did you mean nn.MultiheadAttention(dropout_p"),
    ({"sliding_window": 3}, TypeError, "'sliding_window'", "did you mean local_window_size?"),
    ({"nonsense": 3}, TypeError, "'nonsense'", "bias, mask, "),
]
SINKS = [
    ({"sink": a(K)}, ValueError, "float32[2]", "(4,) or (2, 4)"),
    ({"sink": a(T, N)}, ValueError, "float32[3,4]", "(2, 4)"),
    ({"sink": a(1, 1, N)}, ValueError, "float32[1,1,4]", "("),
    ({"sink": [0.0] * N}, TypeError, "list", "array"),
    ({"sink": a(N, dtype="int32")}, TypeError, "int32[4]", "float32"),
]
OTHER_ATTENTION = {
    ea.free_energy: [
        *SINKS,
        ({"source": 0.0}, TypeError, "float 0.0", "array"),
        ({"nonsense": 3}, TypeError, "'nonsense'", "source, bias, mask, scale, is_causal"),
        ({"source": a(B, T, N, V, dtype="int32")}, TypeError, "int32[2,3,4,6]", "float32"),
        ({"source": a(B, T, N, V, dtype="complex64")}, TypeError, "complex64", "float32"),
        ({"source": a(B, T, N, H)}, ValueError, "float32[2,3,4,5]", "(2, 3, 4, 6)"),
        ({"source": np.zeros((T, N, V))}, ValueError, "[3,4,6]", "(2, 3, 4, 6)"),
        ({"parallel": "device"}, TypeError, "str 'device'", "SequenceParallel"),
        ({"parallel": SequenceParallel("x")}, ValueError, "none", "a mesh in force"),
    ],
    ea.attention: [
        *SINKS,
        ({"source": a(B, T, N, V)}, TypeError, "'source'", "free_energy(query, key, value, source"),
        ({"return_lse": True}, TypeError, "'return_lse'", "return_energy"),
        ({"return_energy": "yes"}, TypeError, "str 'yes'", "True or False"),
        ({"return_energy": None}, TypeError, "None", "True or False"),
        ({"parallel": ("device",)}, TypeError, "tuple ('device',)", "SequenceParallel"),
        ({"parallel": SequenceParallel()}, ValueError, "none", "('node', 'device')"),
    ],
    local_attention: [
        ({"source": a()}, ValueError, "float32[]", "(2, 3, 4, 6)"),
        ({"source": a(T, N, V)}, ValueError, "float32[3,4,6]", "(2, 3, 4, 6)"),
    ],
}


def cases():
    for function, own in OTHER_ATTENTION.items():
        for changes, *expected in SHARED + own:
            name = blamed(changes)
            got = expected[1].replace(" ", "")
            case = f"{function.__name__}-{name}-{got}"
            yield pytest.param(function, changes, name, *expected, id=case)


def blamed(changes):
    """The first argument that is changed to something wrong."""
    right = {id(x) for x in (*ONE.values(), *TWO.values())}
    return next(name for name, x in changes.items() if id(x) not in right)


@pytest.mark.parametrize(
    ("function", "changes", "name", "error", "received", "wanted"), list(cases())
)
def test_attention(function, changes, name, error, received, wanted):
    """A mistake that surfaces as XLA's error about a dot_general, or not at all."""
    complains(lambda: function(**{**VALID, **changes}), error, name, received, wanted)


def inside(call):
    """`call` as it is traced inside a shard_map over the axis "device"."""

    def traced():
        jax.shard_map(lambda x: call(), mesh=FLAT, in_specs=P(), out_specs=P())(a(1))

    return traced


def on_mesh(call):
    def called():
        with jax.set_mesh(FLAT):
            call()

    return called


def layer(**changes):
    valid = {"num_heads": 2, "query_size": 8, "key": jax.random.key(0)}
    return ea.nn.MultiheadAttention(**valid | changes)


def call_layer(*args, dropout_p=0.0, **options):
    args = args or (X, X, X)
    return layer(dropout_p=dropout_p)(*args, **options)


def spread(parallel, **options):
    parallel = SequenceParallel(parallel) if isinstance(parallel, str) else parallel
    return ea.attention(**VALID, parallel=parallel, **options)


def sharded(method="tree", axis_name="device", **changes):
    given = {**VALID, **changes}
    return inside(lambda: sharded_attention(**given, axis_name=axis_name, method=method).out)


tree = partial(sharded, "tree")
ulysses, gather = partial(sharded, "ulysses"), partial(sharded, "gather")


def state(out=None, lse=None):
    return AttentionState(STATE.out if out is None else out, STATE.lse if lse is None else lse)


ZIGZAG = SequenceParallel("device", layout="zigzag")


def split_key_without_mesh():
    place = jax.NamedSharding(EXPLICIT, P(None, "device"))
    return ea.attention(a(1, 1, 2, 4), *[jax.device_put(a(1, 8, 2, 4), place)] * 2)


def on_theirs(transform, *given):
    return transform(eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0)))(*given, X, X, X)


spec, across, energies, shard = SequenceParallel, merge_across, logsumexp_across, shard_sequence
TWO = cost.topology("ethernet", (2,), nodes=2)
HIERARCHY, XX = "hierarchical", ("x", "x")
HALF, INTS = a(2, dtype="bfloat16"), a(4, dtype="int32")
PARALLEL = (
    (on_mesh(partial(spread, "node")), ValueError, "parallel", "'node'", "('device',)"),
    (inside(partial(shard, a(1, 8), spec("device"))), ValueError, "parallel", "'device'", "no sur"),
    (inside(partial(spread, "device", bias=a(1, 1, 1, 1))), ValueError, "bias", "float32", "None"),
    (split_key_without_mesh, ValueError, "key", "none", "mesh in force"),
    (partial(spec, ()), TypeError, "axes", "tuple ()", "names"),
    (partial(spec, ("x", 3)), TypeError, "axes", "('x', 3)", "names"),
    (partial(spec, ("x", "x")), ValueError, "axes", "('x', 'x')", "different"),
    (partial(spec, method="star"), ValueError, "method", "'star'", "'tree'"),
    (partial(spec, merge=None), ValueError, "merge", "None", "'allreduce'"),
    (partial(spec, method=methods.Tree(), merge="ring"), ValueError, "merge", "'ring'", "with a"),
    (partial(spec, "x", merge="hierarchical"), ValueError, "merge", "one", "two or"),
    (partial(spec, "x", "hybrid"), ValueError, "method", "one", "two or more mesh axes"),
    (partial(spec, topology="tpu"), TypeError, "topology", "'tpu'", "cost.Topology"),
    (partial(spec, "x", topology=TWO), ValueError, "topology", "2", "each of the 1 mesh axes"),
    (on_mesh(partial(spread, spec("device", "ulysses"))), ValueError, "query", "4", "le of 8"),
    (on_mesh(partial(spread, ZIGZAG, is_causal=True)), ValueError, "key.shape[1]", "7", "of 16"),
    (partial(shard, a(1, 8), ZIGZAG), ValueError, "parallel", "none", "mesh in force"),
    (partial(shard, a(1, 8), 3), TypeError, "parallel", "int 3", "SequenceParallel"),
    (on_mesh(partial(shard, a(1, 8), ZIGZAG)), ValueError, "x.shape[1]", "8", "multiple of 16"),
    (on_mesh(partial(shard, [1.0], ZIGZAG)), TypeError, "x", "list", "array"),
    (on_mesh(partial(shard, a(8), ZIGZAG)), ValueError, "axis", "1", "1 axes of x"),
    (partial(spec, batch=3), TypeError, "batch", "int 3", "names"),
    (partial(spec, layout="spiral"), ValueError, "layout", "'spiral'", "'contiguous'"),
    (partial(make_mesh, "24"), TypeError, "shape", "str '24'", "sequence of integers"),
    (partial(make_mesh, (2.0, 4)), TypeError, "shape", "float 2.0", "integer"),
    (partial(make_mesh, (-2, -4)), ValueError, "shape", "-2", "at least 1"),
    (partial(make_mesh, (8,)), ValueError, "shape", "(8,)", "('node', 'device')"),
    (partial(make_mesh, (3, 3)), ValueError, "shape", "(3, 3)", "8 devices"),
    (partial(make_mesh, None, ("x", "y", "z")), ValueError, "shape", "None", "('x', 'y', 'z')"),
    (partial(make_mesh, None, ("x",), devices=[]), ValueError, "devices", "none", "at least one"),
    (partial(make_mesh, (2, 4), (1, 2)), TypeError, "axis_names", "(1, 2)", "names"),
    (partial(make_mesh, (2, 4), ("x", "x")), ValueError, "axis_names", "('x', 'x')", "different"),
    (partial(make_mesh, (2, 1), devices=["a", "b"]), TypeError, "devices", "['a', 'b']", "devices"),
    (partial(make_mesh, (2, 4), explicit="yes"), TypeError, "explicit", "'yes'", "True or False"),
    (partial(across, STATE, "device"), ValueError, "axis_name", "'device'", "shard_map"),
    (inside(partial(across, STATE, "device", "star")), ValueError, "merge", "star", "gather"),
    (inside(partial(across, STATE, "device", HIERARCHY)), ValueError, "merge", "one", "two or"),
    (inside(partial(across, STATE, "device", topology=3)), TypeError, "topology", "int 3", "cost."),
    (inside(partial(across, STATE, 0)), TypeError, "axis_name", "int 0", "name"),
    (inside(partial(across, STATE, ())), TypeError, "axis_name", "tuple ()", "name"),
    (inside(partial(across, tuple(STATE), "device")), TypeError, "state", "tuple", "State"),
    (inside(partial(across, state(lse=a(3)), "device")), ValueError, "state.lse", "[3]", "2"),
    (inside(partial(energies, a(3), XX)), ValueError, "axis_name", "('x', 'x')", "different"),
    (inside(partial(energies, HALF, "device")), TypeError, "lse", "bfloat16[2]", "float32 or"),
    (partial(energies, a(3), "device"), ValueError, "axis_name", "'device'", "shard_map"),
    (tree("x"), ValueError, "axis_name", "'x'", "shard_map"),
    (tree(is_casual=True), TypeError, "is_casual", "'is_casual'", "is_causal"),
    (lambda: sharded(methods.Tree("star"))(), ValueError, "merge", "'star'", "'butterfly'"),
    (tree(queries_sharded=1), TypeError, "queries_sharded", "int 1", "True or False"),
    (tree(bias=a(B, N, T, S + 1)), ValueError, "bias", "[2,4,3,8]", "(2, 4, 3, 7)"),
    (partial(methods.Ring, "values"), ValueError, "rotate", "'values'", "'queries'"),
    (sharded("star"), ValueError, "method", "'star'", "'ulysses'"),
    (sharded(3), TypeError, "method", "int 3", "methods.Ring()"),
    (gather(queries_sharded=False), ValueError, "queries_sharded", "False", "'gather'"),
    (sharded(methods.Ring("keys"), bias=a(B, N, T, S)), ValueError, "bias", "[2,4,3,7]", "3, 56)"),
    (ulysses(), ValueError, "query", "4", "multiple of 8, so that 8 devices"),
    (sharded("hybrid", ("device",)), ValueError, "method", "one", "two or more mesh axes"),
    (gather(bias=a(B, N, T, S)), ValueError, "bias", "[2,4,3,7]", "(2, 4, 3, 56)"),
)
STATES = (
    (partial(merge, tuple(STATE), STATE), TypeError, "a", "tuple of float32[2,3], flo", "State"),
    (partial(merge, STATE, state(out=[1.0])), TypeError, "b.out", "list", "array"),
    (partial(merge, state(a(2, 3, dtype="int32")), STATE), TypeError, "a.out", "int32", "float32"),
    (partial(merge, STATE, state(lse=HALF)), TypeError, "b.lse", "bfloat16[2]", "wider"),
    (partial(merge, STATE, state(a(2, 3, dtype="float16"))), TypeError, "b.out", "float16", "a's"),
    (partial(merge, state(lse=a(2, 3)), STATE), ValueError, "a.lse", "float32[2,3]", "(2)"),
    (partial(merge, STATE, state(a(2, 4))), ValueError, "b.out", "float32[2,4]", "shape of a's"),
    (partial(merge, state(a(), a()), STATE), ValueError, "a.out", "float32[]", "width axis"),
    (partial(merge_all, [STATE, STATE]), TypeError, "stacked", "list", "AttentionState"),
    (partial(merge_all, STATE, 1), ValueError, "axis", "1", "one of the 1 axes of stacked.lse"),
    (partial(merge_all, STATE, 0.0), TypeError, "axis", "float 0.0", "integer"),
    (partial(empty_state, ()), ValueError, "shape", "()", "width axis"),
    (partial(empty_state, (2, 3.0)), TypeError, "shape", "float 3.0", "integer"),
    (partial(empty_state, (2, -1)), ValueError, "shape", "-1", "at least 0"),
    (partial(empty_state, (2,), "int32"), TypeError, "dtype", "'int32'", "float16, bfloat16"),
    (partial(empty_state, (2,), a(3)), TypeError, "dtype", "float32[3]", "float16, bfloat16"),
)
EITHER_SOFTMAX = (
    (([0.0, 1.0],), {}, TypeError, "scores", "list", "array"),
    ((a(3, dtype="int32"),), {}, TypeError, "scores", "int32[3]", "float32"),
    ((a(),), {}, ValueError, "axis", "-1", "one of the 0 axes of scores"),
    ((a(2, 3),), {"axis": 2}, ValueError, "axis", "2", "one of the 2 axes of scores"),
    ((a(2, 3),), {"axis": (0, 1)}, TypeError, "axis", "tuple (0, 1)", "integer"),
    ((a(2, 3),), {"where": True}, TypeError, "where", "bool True", "array"),
    ((a(2, 3),), {"where": a(2, 3)}, TypeError, "where", "float32[2,3]", "boolean"),
    ((a(2, 3),), {"where": a(2, dtype="bool")}, ValueError, "where", "bool[2]", "(2, 3)"),
)
SHIFT = (
    (0.0, TypeError, "shift", "float 0.0", "array"),
    (a(2, dtype="int32"), TypeError, "shift", "int32[2]", "float32"),
    (a(3), ValueError, "shift", "float32[3]", "(2,)"),
    (a(2, 1), ValueError, "shift", "float32[2,1]", "(2,)"),
)
SOFTMAX = (
    *((partial(ea.safe_softmax, *args, **kw), *rest) for args, kw, *rest in EITHER_SOFTMAX),
    *((partial(shifted_energy, *args, **kw), *rest) for args, kw, *rest in EITHER_SOFTMAX),
    *((partial(shifted_energy, a(2, 3), shift), *rest) for shift, *rest in SHIFT),
)
KEYS, TWO_OF = lambda: jax.random.split(jax.random.key(0), 3), lambda *heads: heads[:2]
WEIGHED = partial(on_theirs, ea.weigh, a(2), a(5, dtype="int32"))
CAUSAL, SEEN = ea.masks.Causal(), a(T, S, dtype="bool")
MASKS, SCORES = partial(ea.masks.Function, lambda i, j: i), partial(ea.scores.Function, lambda s: s)


def nested(join, x):
    """`x` joined to itself a thousand times."""
    return lambda: functools.reduce(lambda inner, _: join(inner), range(1000), x)


CAP = ea.scores.SoftCap(3.0)
FUNCTIONS = (
    (nested(lambda x: x & CAUSAL, CAUSAL), ValueError, "masks", "(a & b) & (c", "at most 100 in"),
    (nested(lambda x: CAUSAL | x, CAUSAL), ValueError, "masks", "(a & b) & (c", "at most 100 in"),
    (nested(lambda x: ~x, CAUSAL), ValueError, "masks", "(a & b) & (c & d)", "at most 100 inside"),
    (nested(partial(ea.scores.Compose, CAP), CAP), ValueError, "scores", "any num", "at most 100"),
    (lambda: CAUSAL & SEEN, TypeError, "&", "(mask=...).attention(..., mask=array)", "a mask"),
    (lambda: SEEN | CAUSAL, TypeError, "|", "(mask=...).attention(..., mask=array)", "a mask"),
    (lambda: CAUSAL & print, TypeError, "&", "masks.Function(function, *parameters)", "a mask"),
    (lambda: CAUSAL & ea.masks.Causal, TypeError, "&", "Causal(...) makes one", "a mask"),
    (partial(MASKS, 3), TypeError, "function", "(i, j)", "(query, key, parameter)"),
    (lambda: ea.masks.Function(len), TypeError, "function", "(obj, /)", "(query, key)"),
    (SCORES, TypeError, "function", "(s)", "(score, at)"),
    (partial(SCORES, 1.0), TypeError, "function", "(s)", "(score, at, parameter)"),
    (lambda: ea.scores.Distance(lambda i, j: i), TypeError, "function", "(i, j)", "(distance)"),
    (lambda: ea.scores.RelativeBias(a(2, 4), KEYS), TypeError, "buckets", "()", "(distance)"),
)


def empty_cache(**sizes):
    return KVCache.empty(**{"batch": 1, "capacity": 8, "kv_heads": 2, "width": 4, **sizes})


def read(**arrays):
    config = models.LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
    model = eqx.filter_eval_shape(models.Llama, config, key=jax.random.key(0))
    return model(**{"tokens": np.ones((1, 2), np.int64), **arrays})


# Numbers that 32 bits do not hold: out of memory, JAX's own errors about shapes, or other numbers without a word.
LARGE, OF_32_BITS = 2**31, "an integer of 32 bits"
INTEGERS = (
    *(
        (partial(empty_cache, **{name: size}), ValueError, name, str(size), OF_32_BITS)
        for name in ("batch", "capacity", "kv_heads", "width", "block_size", "window")
        for size in (2**31, 2**63, 2**70)
    ),
    (lambda: empty_cache().fork(LARGE, capacity=8), ValueError, "count", str(LARGE), OF_32_BITS),
    (lambda: empty_cache().fork(2, capacity=LARGE), ValueError, "capacity", "2147", OF_32_BITS),
    (partial(MASKS, LARGE), ValueError, "parameters", str(LARGE), OF_32_BITS),
    (partial(SCORES, LARGE), ValueError, "parameters", str(LARGE), OF_32_BITS),
    (lambda: ea.masks.Prefix(-LARGE - 1), ValueError, "length", "-2147483649", OF_32_BITS),
    (lambda: ea.masks.tabulate(CAUSAL, LARGE), ValueError, "query_len", str(LARGE), OF_32_BITS),
    (partial(ea.landscape, a(8), X, X, points=LARGE), ValueError, "points", str(LARGE), OF_32_BITS),
    (partial(read, tokens=np.full((1, 2), LARGE)), ValueError, "tokens", str(LARGE), "32 bits"),
    (partial(read, positions=np.full((1, 2), LARGE)), ValueError, "positions", "2147", "32 bits"),
)
COSTS = (
    (partial(cost.Link, 2, 1.0, 1.0, torus="nope"), TypeError, "torus", "'nope'", "True or False"),
    (partial(cost.Link, 2, 1.0, 1.0, 3), TypeError, "name", "int 3", "a text"),
    (partial(cost.Topology, 3, TWO.links), TypeError, "name", "int 3", "a text"),
    (partial(ea.reproducible, 3), TypeError, "function", "int 3", "a function of arrays"),
)
MODULES = (
    (partial(ea.FreeEnergy, *VALID.values()), TypeError, "FreeEnergy", "[2,3,4,5]", ".at(query, "),
    (partial(ea.FreeEnergy, query=X), TypeError, "query", "'query'", "Energy().at(query, key"),
    (partial(ea.FreeEnergy, causal=True), TypeError, "causal", "'causal'", "is_causal"),
    (partial(ea.FreeEnergy, nonsense=1), TypeError, "nonsense", "'non", "regulariser, name, scale"),
    (partial(ea.FreeEnergy, mask=print), TypeError, "mask", "masks.Function(f", "None (arrays go"),
    *(
        (partial(call, **VALID, causal=True), TypeError, "causal", "'ca", "Energy(is_causal=...)")
        for call in (ea.FreeEnergy(), ea.FreeEnergy().at, ea.FreeEnergy().attention)
    ),
    *(
        (partial(call, *VALID.values()), ValueError, "sink", "float32[2]", "(4,) or (2, 4)")
        for F in [ea.FreeEnergy(sink=a(K))]
        for call in (F, F.at)
    ),
    (partial(ea.FreeEnergy, mask=SEEN), TypeError, "mask", "bool[3,7]", "None (arrays go"),
    (partial(ea.FreeEnergy, scale=NAN), ValueError, "scale", "nan", "finite"),
    (partial(ea.FreeEnergy, implementation="fast"), ValueError, "implementation", "'fast'", "'ref"),
    (partial(ea.FreeEnergy, parallel="device"), TypeError, "parallel", "str 'device'", "Sequence"),
    (partial(layer, num_heads=0), ValueError, "num_heads", "0", "at least 1"),
    (partial(layer, query_size=1), ValueError, "query_size", "1", "at least 2"),
    (partial(layer, key_size=0), ValueError, "key_size", "0", "at least 1"),
    (partial(layer, output_size=-3), ValueError, "output_size", "-3", "at least 1"),
    (partial(layer, vo_size="3"), TypeError, "vo_size", "str '3'", "integer"),
    (partial(layer, num_kv_heads=3), ValueError, "num_kv_heads", "3", "divisor of num_heads = 2"),
    (partial(layer, use_key_bias=a(2)), TypeError, "use_key_bias", "float32[2]", "True or False"),
    (partial(layer, dropout_p=1.5), ValueError, "dropout_p", "1.5", "probability"),
    (partial(layer, inference="no"), TypeError, "inference", "str 'no'", "True or False"),
    (partial(layer, dtype="complex64"), TypeError, "dtype", "complex64", "float16, bfloat16"),
    (partial(layer, energy="x"), TypeError, "energy", "str 'x'", "FreeEnergy"),
    (partial(layer, key=0), TypeError, "key", "int 0", "jax.random.key"),
    (partial(call_layer, None, X, X), TypeError, "query", "None", "array"),
    (partial(call_layer, a(1, 5, 8), X, X), ValueError, "query", "[1,5,8]", "(length, 8)"),
    (partial(call_layer, X, a(5, 7), X), ValueError, "key_", "float32[5,7]", "(length, 8)"),
    (partial(call_layer, X, X, a(4, 8)), ValueError, "value", "float32[4,8]", "(5, 8)"),
    (partial(call_layer, mask=a(5, 5, dtype="complex64")), TypeError, "mask", "complex64", "real"),
    (partial(call_layer, mask=-np.eye(5)), ValueError, "mask", "mask=(mask == 0)", "zero"),
    (partial(call_layer, mask=np.ones((3, 5, 5), bool)), ValueError, "mask", "[3", "to (2, 5, 5)"),
    (partial(call_layer, is_causal=True), TypeError, "is_causal", "call", "on(model, is_causal="),
    (partial(call_layer, attn_mask=3), TypeError, "attn_mask", "'attn_mask'", "mask, key, infer"),
    (partial(on_theirs, ea.record), ValueError, "function", "Multihead", "replace_attention("),
    (WEIGHED, ValueError, "function", "Multihead", "replace_attention(model)"),
    (partial(ea.record, X.sum, "entropies"), ValueError, "quantities", "'entropies'", "'entropy'?"),
    (partial(ea.record, X.sum, "samples"), ValueError, "quantities", "'samples'", "mean 'sample'?"),
    (partial(ea.record, X.sum, "xyz"), ValueError, "quantities", "'xyz'", "of Gibbs, as 'score_m"),
    (partial(call_layer, dropout_p=0.5, key=3), TypeError, "key", "int 3", "jax.random.key"),
    (lambda: call_layer(dropout_p=0.5, key=KEYS()), TypeError, "key", "key<fry>[3]", "random.key"),
    (partial(call_layer, inference="yes"), TypeError, "inference", "str 'yes'", "True or False"),
    (partial(call_layer, return_energy=1), TypeError, "return_energy", "int 1", "True or False"),
    (partial(call_layer, query_positions=INTS), ValueError, "query_positions", "int32[4]", "(5,)"),
    (partial(call_layer, process_heads=3), TypeError, "process_heads", "int 3", "function"),
    (partial(call_layer, process_heads=print), TypeError, "process_heads", "None", "three arrays"),
    (partial(call_layer, process_heads=TWO_OF), ValueError, "process_heads", "[(5, 2", "shapes"),
)


@pytest.mark.parametrize(
    ("call", "error", "name", "received", "wanted"),
    PARALLEL + STATES + SOFTMAX + FUNCTIONS + INTEGERS + COSTS + MODULES,
)
def test_everything_else(call, error, name, received, wanted):
    """Axis names that XLA does not know, states that do not match, sizes that no array can have."""
    complains(call, error, name, received, wanted)


def test_documented_exceptions():
    """Errors of other kinds: an implementation that declines, dropout without a key, options that are fields."""
    many = {**VALID, "query": a(B, 50, N, H)}
    for function in (ea.attention, ea.free_energy, local_attention):
        with pytest.raises(NotImplementedError, match="query: wanted at most .* got 50 × 4"):
            function(**many, implementation="decode")
        with pytest.raises(ExceptionGroup) as caught:
            function(**many, implementation=("decode", "decode"))
        assert caught.group_contains(NotImplementedError, match="query: wanted")
    with pytest.raises(RuntimeError, match="key: wanted .* got None"):  # as Equinox does
        call_layer(dropout_p=0.5)
    energy = ea.FreeEnergy()
    for call in (energy, energy.at, energy.attention):
        with pytest.raises(TypeError, match="is_causal"):  # not overridden in silence
            call(**VALID, is_causal=True)
        with pytest.raises(TypeError, match="windows"):
            call(**VALID, windows=3)


@pytest.mark.parametrize(
    ("changes", "received"),
    [
        ({"key": a(B, S, K, H + 1)}, "float32[2,7,2,6]"),
        ({"value": a(B, S, K, V, dtype="int32")}, "int32[2,7,2,6]"),
        ({"mask": a(B, N, T, S)}, "float32[2,4,3,7]"),
        ({"scale": a(3)}, "float32[3]"),
        ({"query_positions": a(B, S, dtype="int32")}, "int32[2,7]"),
        ({"key_value_seq_lengths": a(B)}, "float32[2]"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_when_traced(changes, received):
    """A check that reads the values of a tracer and fails on it, or prints the tracer."""
    for transform in (jax.jit, lambda f: jax.jit(jax.value_and_grad(f, allow_int=True))):
        call = transform(lambda arrays: ea.attention(**arrays).sum())
        with pytest.raises((TypeError, ValueError)) as caught:
            call({**VALID, **changes})
        message = str(caught.value)
        assert message.startswith(f"{next(iter(changes))}: wanted ") and received in message


def test_what_only_values_tell_is_not_checked_when_traced():
    """Traced lengths and scales cannot be checked; reading their values would raise an error of JAX."""
    lengths = jnp.asarray([1, S + 3])
    run = jax.jit(lambda n, x: ea.attention(**VALID, key_value_seq_lengths=n, scale=x))
    out = run(lengths, jnp.asarray(0.5))
    assert np.isfinite(out).all()


def test_a_module_that_is_accepted_can_be_compiled():
    """Fields that are static must be hashable: a list of names would fail much later, inside jit."""
    energy = ea.FreeEnergy(implementation=["reference"], local_window_size=(2, 2))
    assert np.isfinite(eqx.filter_jit(energy)(*VALID.values())).all()


FUZZED = {
    ea.attention: {**VALID, "implementation": "reference"},
    ea.free_energy: {**VALID, "implementation": "reference"},
    local_attention: {**VALID, "implementation": "reference"},
    merge: {"a": STATE, "b": STATE},
    merge_all: {"stacked": STATE},
    empty_state: {"shape": (2, 3)},
    ea.safe_softmax: {"scores": a(2, 3)},
    shifted_energy: {"scores": a(2, 3)},
    SequenceParallel: {},
    make_mesh: {"shape": (2, 4)},
    ea.FreeEnergy: {},
    layer: {},
}


@pytest.mark.full
# Equinox, before our error
@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("function", FUZZED, ids=lambda f: f.__name__)
@given(data=st.data())
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_anything_else(function, data):
    """Every other failure: an AttributeError, an IndexError, XLA's own message, or a NaN as the result."""
    signature = inspect.signature(ea.nn.MultiheadAttention if function is layer else function)
    names = set(signature.parameters)
    name = data.draw(st.sampled_from(sorted(names)))
    arguments = {**FUZZED[function], name: data.draw(ANYTHING)}
    found = outcome(function, names, arguments)
    if found is None or "query" not in FUZZED[function]:
        return
    value = arguments["value"]
    rows = arguments["query"].shape[:-1]
    if function is ea.free_energy:
        found = AttentionState(jnp.zeros((*rows, value.shape[-1])), found)
    elif function is ea.attention:
        found = found if isinstance(found, tuple) else (found, jnp.zeros(rows))
    out, energy = found
    assert out.shape == (*rows, value.shape[-1]) and energy.shape == rows
    assert np.isfinite(np.asarray(out, float)).all()
    assert (np.asarray(energy) < INF).all()  # no NaN; −∞ where a query sees no key
