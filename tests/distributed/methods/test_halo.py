"""Windows over sharded sequences: what is sent is what some query may see, and attention is what it was."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import masks
from energy_attn.distributed import (
    SequenceParallel,
    collectives,
    cost,
    make_mesh,
    methods,
    shard_sequence,
    unshard_sequence,
)
from energy_attn.distributed.methods import _halo
from energy_attn.distributed.methods._halo import Span, halo
from energy_attn.scores import SoftCap
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.programs import shared_keys
from tests.support.selection import few

S = 64


def tokens(layout, length, devices):
    """The positions that each device has, in order; -1 for padding."""
    size = -(-length // devices)
    place = np.arange(devices * size)
    if layout == "striped":
        return place.reshape(size, devices).T
    if layout == "zigzag":
        pieces = place.reshape(2 * devices, -1)
        return np.stack([np.concatenate([pieces[i], pieces[-1 - i]]) for i in range(devices)])
    return np.where(place < length, place, -1).reshape(devices, size)


DRAWN = [
    (layout, devices, length, window)
    for layout, devices, length in (
        *(("contiguous", 4, 22), ("contiguous", 8, 64), ("zigzag", 4, 48)),
        ("striped", 8, 64),
    )
    for window in ((3, 0), (0, 4), (9, 2), (30, 0), (13, 13), (0, 0))
]


@pytest.mark.parametrize(("layout", "devices", "length", "window"), DRAWN)
def test_what_is_sent_is_what_is_seen(layout, devices, length, window):
    """A key that a query sees and no device sends; or keys at the end of a span that none sees."""
    has = tokens(layout, length, devices)
    size = has.shape[1]
    found = halo(layout, devices, length, length, window)
    for distance in range(1, devices):
        needed = np.zeros(size, bool)
        for i in range(devices):
            apart = has[(i - distance) % devices][None] - has[i][:, None]
            both = (has[i][:, None] >= 0) & (has[(i - distance) % devices][None] >= 0)
            needed |= ((-window[0] <= apart) & (apart <= window[1]) & both).any(0)
        if found is None or distance < found.around:
            continue
        sent = np.zeros(size, bool)
        for span in found.spans:
            if span.distance == distance:
                assert needed[span.start] and needed[span.stop - 1], span
                sent[span.start : span.stop] = True
        assert (sent >= needed).all()
        # of contiguous shards, and where a window is shorter than a chunk, no key is sent that none sees
        if layout != "zigzag" or max(window) < size // 2:
            assert (sent == needed).all() or (layout, sent.all()) == ("striped", True)
    if found is None:  # where nothing would be saved
        assert max(window) > length // devices or (layout == "striped" and sum(window) >= 7)


def test_far_windows(monkeypatch):
    """Windows over many shards: whole ones go around, and the last is cut."""
    monkeypatch.setattr(_halo, "_MOST_SPANS", 1)
    _halo.halo_of_window.cache_clear()
    found = halo("contiguous", 8, 64, 64, (19, 0))
    assert (found.around, found.spans) == (3, (Span(3, 5, 8),))
    both = halo("contiguous", 8, 64, 64, (3, 9))
    assert both is None  # neighbours on both sides, which a ring reaches last
    assert halo("contiguous", 8, 64, 64, (63, 0)) is None
    _halo.halo_of_window.cache_clear()


@pytest.fixture(scope="module")
def arrays():
    draw = np.random.default_rng(0)
    shapes = {"query": (2, S, 4, 6), "key": (2, S, 2, 6), "value": (2, S, 2, 5)}
    found = {name: array(draw.standard_normal(shape)) for name, shape in shapes.items()}
    ways = {name: array(draw.standard_normal(x.shape)) for name, x in found.items()}
    return found, ways, array(draw.standard_normal((2, S, 4, 5)))


# documents of 30, 2 and 32 tokens, and of 7, 20, 9, 3, 15 and 10
PACKED = array(
    np.stack([np.repeat(range(len(x)), x) for x in ((30, 2, 32), (7, 20, 9, 3, 15, 10))]), np.int32
)
SINK = array(np.array([0.3, -1.0, 2.0, 0.0]))
CALLS = {
    "a window": {"is_causal": True, "local_window_size": (5, 0)},
    "three shards, and some of a fourth": {"is_causal": True, "local_window_size": (27, 0)},
    "both sides, a sink and a score": {
        "local_window_size": (6, 3),
        "sink": SINK,
        "score": SoftCap(2.0),
    },
    "documents": {"mask": masks.Causal() & masks.Segments(PACKED)},
    "a prefix": {
        "mask": masks.Window(9, 4) & (masks.Prefix(array([5, 9], np.int32)) | masks.Causal())
    },
}


def passes(arrays, options, parallel=None, shard=lambda x: x, unshard=lambda x: x):
    """Attention, its gradients and its tangent."""
    given, ways, turned = arrays

    def run(given, ways, turned):
        def f(given):
            return ea.attention(**given, **options, parallel=parallel)

        out, pull = jax.vjp(f, given)
        return out, pull(turned), jax.jvp(f, (given,), (ways,))[1]

    found = jax.jit(run)(*jax.tree.map(shard, (given, ways, turned)))
    return jax.tree.map(lambda x: np.asarray(unshard(x)), found)


@pytest.mark.parametrize("name", few([*CALLS], *list(CALLS)[:4]))
def test_attention_is_what_it_was(name, arrays, monkeypatch):
    """A span from another device, cut elsewhere, or whose gradient returns to another; in both modes."""
    options = CALLS[name]
    wanted = passes(arrays, options)
    several = name.startswith("three")
    for kind, layout, method in (
        ("8", "contiguous", "ring"),
        ("2x4", "zigzag", methods.Ring("keys")),
        ("8", "contiguous", "gather" if several else None),
        ("8", "striped", methods.Ring("queries") if name == "a window" else None),
    ):
        if method is None:
            continue
        if method == "gather":  # two shards around the ring, then spans
            monkeypatch.setattr(_halo, "_MOST_SPANS", 2)
            _halo.halo_of_window.cache_clear()
        with jax.set_mesh(mesh_of(kind)):
            axes = ("device",) if kind == "8" else ("node", "device")
            parallel = SequenceParallel(axes, method=method, layout=layout)
            found = passes(
                arrays,
                options,
                parallel,
                lambda x, parallel=parallel: shard_sequence(x, parallel),
                lambda x, parallel=parallel: unshard_sequence(x, parallel),
            )
        close(found, wanted, f"{name} {kind} {layout}")


def test_padded_and_at_a_source(arrays):
    """A length that no device divides; values beside their source."""
    given = {name: x[:, : S - 3] for name, x in arrays[0].items()}
    source = arrays[2][:, : S - 3]
    options = {"is_causal": True, "local_window_size": (10, 0), "source": source}
    wanted = jax.jit(jax.value_and_grad(lambda x: ea.free_energy(**x, **options).sum()))(given)
    with jax.set_mesh(mesh_of("8")):
        parallel = SequenceParallel("device", method="ring")
        f = jax.value_and_grad(lambda x: ea.free_energy(**x, **options, parallel=parallel).sum())
        found = jax.jit(f)(given)
    close(found, jax.device_get(wanted))


@pytest.mark.parametrize("dtype", few(["bfloat16", "float16"], "bfloat16"))
def test_16_bits(dtype, arrays):
    """Keys, or gradients of a span, that lose more than a rounding on their way."""
    dtype, options = jnp.dtype(dtype), CALLS["three shards, and some of a fourth"]
    narrow = jax.tree.map(lambda x: x.astype(dtype), arrays)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), narrow)
    wanted = passes(wide, options)
    with jax.set_mesh(mesh_of("8")):
        found = passes(narrow, options, SequenceParallel("device", method="ring"))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == dtype
        apart = np.linalg.norm(x.astype(np.float64) - y) / np.linalg.norm(y)
        assert apart < 2 * float(jnp.finfo(dtype).eps)


def test_nothing_at_all(arrays):
    """No rows, or no queries and keys, of which a window makes spans that there are not."""
    with jax.set_mesh(mesh_of("8")):
        parallel = SequenceParallel("device", method="ring")
        for rows, length in ((0, S), (2, 0)):
            given = {name: x[:rows, :length] for name, x in arrays[0].items()}
            out = ea.attention(**given, **CALLS["a window"], parallel=parallel)
            assert out.shape == (rows, length, 4, 5)


def test_second_derivatives(arrays):
    """A turn that is computed again in a derivative of the gradient, by another number of the turn."""
    given = {name: x[:1, :32, :2] for name, x in arrays[0].items()}
    ways = {name: x[:1, :32, :2] for name, x in arrays[1].items()}
    options = {"is_causal": True, "local_window_size": (6, 0)}

    def along(parallel):
        def total(x):
            return (ea.attention(**x, **options, parallel=parallel) ** 2).sum()

        return jax.jit(lambda x, way: jax.jvp(jax.grad(total), (x,), (way,))[1])(given, ways)

    wanted = jax.device_get(along(None))
    with jax.set_mesh(mesh_of("8")):
        found = along(SequenceParallel("device", method="ring"))
    close(found, wanted)


BYTES = list(
    itertools.product(
        ("contiguous", "zigzag"),
        ((127, 0), (50, 20)),
        (("ring", "keys"), ("gather", None), ("tree", "allreduce"), ("ring", "queries")),
    )
)


@pytest.mark.parametrize("window", few([(127, 0), (700, 0), (50, 20)], (127, 0)))
def test_a_hybrid(window, arrays):
    """Keys of whole groups of devices where few are seen; gradients that return to another device of a group."""
    x = jax.ShapeDtypeStruct((1, 2048, 4, 16), jnp.bfloat16)
    options = {"local_window_size": window, "is_causal": window[1] == 0}
    sizes = {"queries_sharded": True, "window": window, "causal": False}
    shape = cost.Shape(1, 2048, 2048, 4, 4, 16, **sizes)
    topology = cost.topology("ethernet", (2,), nodes=4)
    parallel = SequenceParallel(("node", "device"), method="hybrid")
    mesh = make_mesh((4, 2), ("node", "device"))
    with jax.set_mesh(mesh):
        spec = jax.NamedSharding(mesh, jax.P(None, ("node", "device")))
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spec)] * 3

        def both(*given):
            out, pull = jax.vjp(lambda *x: ea.attention(*x, **options, parallel=parallel), *given)
            return out, pull(out)

        sent = [x for x in collectives(jax.jit(both).lower(*given).compile())]
        moved = sum(x.bytes * x.count for x in sent if x.kind == "collective-permute")
        short = {name: x[:, :, :2] for name, x in arrays[0].items()}
        near = {
            "local_window_size": tuple(-(-x // 32) for x in window),
            "is_causal": window[1] == 0,
        }

        def gradient(parallel):
            def total(x):
                return (ea.attention(**x, **near, parallel=parallel) ** 2).sum()

            return jax.jit(jax.value_and_grad(total))(short)

        found = jax.device_get(gradient(parallel))
    said = cost.transfers("hybrid", None, shape, topology, gradient=True)
    assert moved == sum(x.bytes * x.count for x in said if x.kind == "collective-permute")
    if sum(window) < 512:  # a head of two devices' tokens, there and back, keys and values
        assert moved == 2 * 2 * sum(window) * 2 * 16 * 2
    close(found, jax.device_get(gradient(None)))


@pytest.mark.product
@pytest.mark.parametrize(("layout", "window", "method"), BYTES)
def test_bytes(layout, window, method):
    """Keys that no query sees and that are sent; a model that knows of no windows."""
    length = 2048
    q = jax.ShapeDtypeStruct((1, length, 4, 16), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.bfloat16)
    shape = cost.Shape(
        1, length, length, 4, 2, 16, queries_sharded=True, window=window, layout=layout
    )
    mesh = mesh_of("8")
    topology = cost.topology("ethernet", nodes=8)
    with jax.set_mesh(mesh):
        way = methods.Ring("queries") if method[1] == "queries" else method[0]
        parallel = SequenceParallel("device", method=way, layout=layout)
        spec = jax.NamedSharding(mesh, jax.P(None, "device"))
        q, k = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spec) for x in (q, k))

        def forward(q, k, v):
            return ea.attention(
                q, k, v, local_window_size=window, is_causal=window[1] == 0, parallel=parallel
            )

        def backward(q, k, v):
            out, pull = jax.vjp(forward, q, k, v)
            return out, pull(out)

        sent = [
            sum(x.bytes * x.count for x in collectives(jax.jit(f).lower(q, k, k).compile()))
            for f in (forward, backward)
        ]
    said = [sum(x.bytes * x.count for x in cost.transfers(*method, shape, topology))]
    if method == ("ring", "keys"):
        moved = cost.transfers(*method, shape, topology, gradient=True)
        said.append(sum(x.bytes * x.count for x in moved))
    assert sent[: len(said)] == said
    # keys and values of 2 heads of 16 numbers of 2 bytes, both of a zigzag's pieces
    assert sent[0] == sum(window) * 2 * 2 * 16 * 2 * (1 + (layout == "zigzag"))
    assert sent[1] == 2 * sent[0]


def test_automatic_method():
    """A tree of all queries' states where a halo of a few keys would do."""
    topology = cost.topology("ethernet", nodes=8)
    sizes = {"batch": 1, "queries": 65536, "keys": 65536, "heads": 8, "kv_heads": 8, "width": 64}
    plain = cost.Shape(**sizes, queries_sharded=True)
    near = cost.Shape(**sizes, queries_sharded=True, window=(511, 0))
    assert cost.choose_method(plain, topology) == "ulysses"
    assert cost.choose_method(near, topology) == "ring"
    whole, few = (cost.volume("ring", "keys", x, topology) for x in (plain, near))
    assert few == whole * 511 / (7 * 8192)
    with jax.set_mesh(mesh_of("8")):
        x = jnp.zeros((1, 1024, 8, 4))
        f = jax.jit(
            lambda x: ea.attention(
                x,
                x,
                x,
                is_causal=True,
                local_window_size=(9, 0),
                parallel=SequenceParallel("device"),
            )
        )
        sent = collectives(f.lower(x).compile())
    assert {x.kind for x in sent} == {"collective-permute"}
    # keys and values are one array, which XLA sends once
    assert sum(x.bytes * x.count for x in sent) == 9 * 8 * 4 * x.dtype.itemsize


def test_positions_that_are_given(arrays):
    """A window of positions that no layout tells, cut as if they counted from 0."""
    given = arrays[0]
    back = array(np.arange(S)[None, ::-1].repeat(2, 0), np.int32)
    options = {"is_causal": True, "local_window_size": (5, 0)}
    options |= {"query_positions": back, "key_positions": back}
    wanted = jax.device_get(jax.jit(lambda x: ea.attention(**x, **options))(given))
    with jax.set_mesh(make_mesh((8,), ("device",))):
        parallel = SequenceParallel("device", method="ring")
        found = jax.jit(lambda x: ea.attention(**x, **options, parallel=parallel))(given)
    close(found, wanted)


@pytest.mark.parametrize(
    ("said", "change"),
    {
        "window: wanted two integers or None, got int 5": {"window": 5},
        "window: wanted at least 0, got -1": {"window": (-1, 0)},
        "layout: wanted one of 'contiguous'": {"layout": "mixed"},
    }.items(),
)
def test_bad_shapes(said, change, unchecked):
    """A window of another form, found where bytes are counted."""
    with pytest.raises((TypeError, ValueError), match=said):
        cost.Shape(1, 8, 8, 1, 1, 4, **change)


def test_bytes_of_documents():
    """Keys of documents that end before a shard begins; documents that are known nowhere but in the program."""
    x = array(np.zeros((2, S, 2, 4)))

    def sent(packed, *given):
        def f(x, *given):
            mask = masks.Causal() & masks.Segments(given[0] if given else packed)
            parallel = SequenceParallel("device", method=methods.Ring("keys"))
            return ea.attention(x, x, -x, mask=mask, parallel=parallel)

        with jax.set_mesh(mesh_of("8")):
            found = collectives(jax.jit(f).lower(x, *given).compile())
        return sum(x.bytes * x.count for x in found if x.kind == "collective-permute")

    token = 2 * 2 * 2 * 4 * x.dtype.itemsize  # of keys and values of both rows
    assert sent(PACKED) == sum(shared_keys(np.asarray(PACKED), 8)) * token < 7 * 8 * token
    assert sent(None, PACKED) == 7 * 8 * token
