"""Windows over sharded sequences: what is sent is what some query may see, and attention is what it was."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import masks
from energy_attn.distributed import (
    SequenceParallel,
    cost,
    make_mesh,
    methods,
    shard_sequence,
    unshard_sequence,
)
from energy_attn.distributed.methods import _halo
from energy_attn.scores import SoftCap
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.meshes import SHAPES, mesh_of
from tests.support.problems import Problem
from tests.support.programs import by_kind, payload, shared_keys
from tests.support.reference import dense, dense_jvp, dense_vjp
from tests.support.selection import few, few_rows

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


@pytest.mark.parametrize("window", [(3, 0), (0, 4), (9, 2), (30, 0), (13, 13), (0, 0)])
@pytest.mark.parametrize(
    ("layout", "devices", "length"),
    [("contiguous", 4, 22), ("contiguous", 8, 64), ("zigzag", 4, 48), ("striped", 8, 64)],
)
def test_what_is_sent_is_what_is_seen(layout, devices, length, window):
    """A key that a query sees and no device sends; or keys at the end of a span that none sees."""
    has = tokens(layout, length, devices)
    size = has.shape[1]
    found = _halo.halo(layout, devices, length, length, window)
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


@pytest.fixture
def set_most_spans(monkeypatch):
    """Sets the number of spans above which whole shards go around."""

    def change(number):
        monkeypatch.setattr(_halo, "_MOST_SPANS", number)
        _halo.halo_of_window.cache_clear()

    yield change
    _halo.halo_of_window.cache_clear()


def test_far_windows(set_most_spans):
    """Windows over many shards: whole ones go around, and the last is cut."""
    set_most_spans(1)
    found = _halo.halo("contiguous", 8, 64, 64, (19, 0))
    assert (found.around, found.spans) == (3, (_halo.Span(3, 5, 8),))
    both = _halo.halo("contiguous", 8, 64, 64, (3, 9))
    assert both is None  # neighbours on both sides, which a ring reaches last
    assert _halo.halo("contiguous", 8, 64, 64, (63, 0)) is None


@functools.cache
def arrays():
    """Query, key and value, a direction of each, and a cotangent: numbers that bfloat16 holds."""
    draw = np.random.default_rng(0)
    shapes = {"query": (2, S, 4, 6), "key": (2, S, 2, 6), "value": (2, S, 2, 5)}

    def drawn(shape):
        return draw.standard_normal(shape).astype(jnp.bfloat16).astype(np.float64)

    given = {name: drawn(shape) for name, shape in shapes.items()}
    return given, {name: drawn(shape) for name, shape in shapes.items()}, drawn((2, S, 4, 5))


# documents of 30, 2 and 32 tokens, and of 7, 20, 9, 3, 15 and 10
LENGTHS = (30, 2, 32), (7, 20, 9, 3, 15, 10)
PACKED = np.stack([np.repeat(np.arange(len(x), dtype=np.int32), x) for x in LENGTHS])
SINK = array(np.array([0.3, -1.0, 2.0, 0.0]))
NEAR = {"is_causal": True, "local_window_size": (5, 0)}
FAR = {"is_causal": True, "local_window_size": (27, 0)}
PREFIXES = np.array([5, 9], np.int32)
I, J = np.arange(S)[:, None], np.arange(S)
IMAGES = np.stack([np.arange(S) // 11 % 2, np.arange(S) // 23 % 3]).astype(np.int32)
SAME = (IMAGES[:, :, None] == IMAGES[:, None]) & (IMAGES > 0)[:, None]
# two images of one number do not touch, but those of the second row are one run each
BETWEEN = np.stack([np.cumsum(np.pad(x[1:] != x[:-1], (1, 0))) for x in IMAGES])
SAME &= BETWEEN[:, :, None] == BETWEEN[:, None]
IN_IMAGE = ((J <= I) | SAME[:, None]) & (I - 9 <= J)
IN_PREFIX = (I - 9 <= J) & (J <= I + 4) & ((J < PREFIXES[:, None, None, None]) | (J <= I))
# options, and those of the problem that defines them, where the judge can: it has no scores
CALLS = {
    "a window": (NEAR, NEAR),
    "three shards, and some of a fourth": (FAR, FAR),
    "both sides, a sink and a score": (
        {"local_window_size": (6, 3), "sink": SINK, "score": SoftCap(2.0)},
        None,
    ),
    "documents": (
        {"mask": masks.Causal() & masks.Segments(PACKED)},
        {"is_causal": True, "query_segment_ids": PACKED, "key_segment_ids": PACKED},
    ),
    "images": (
        {"mask": (masks.Causal() | masks.Spans(IMAGES)) & masks.Window(9, None)},
        {"mask": IN_IMAGE},
    ),
    "a prefix": (
        {"mask": masks.Window(9, 4) & (masks.Prefix(array(PREFIXES)) | masks.Causal())},
        {"mask": IN_PREFIX},
    ),
}
WAYS = {
    "ring": ("8", "contiguous", "ring"),
    "ring of keys": ("2x4", "zigzag", methods.Ring("keys")),
    "ring of queries": ("8", "striped", methods.Ring("queries")),
    "gather": ("8", "contiguous", "gather"),
}
# each call and each way
FIRST = [
    ("a window", "ring of queries"),
    ("three shards, and some of a fourth", "gather"),
    ("both sides, a sink and a score", "ring of keys"),
    ("documents", "ring"),
    ("a prefix", "ring"),
    ("images", "ring of queries"),
]
OTHERS = [(name, way) for name in CALLS for way in ("ring", "ring of keys")]
ROWS = [*FIRST, *(row for row in OTHERS if row not in FIRST)]


def passes(name, given=None, parallel=None):
    """Attention of a call, its gradients and its tangent, in the layout of `parallel` and back."""
    given = arrays() if given is None else given

    def run(given, ways, cotangent):
        def f(given):
            return ea.attention(**given, **CALLS[name][0], parallel=parallel)

        out, pull = jax.vjp(f, given)
        return out, pull(cotangent), jax.jvp(f, (given,), (ways,))[1]

    if parallel is None:
        return jax.device_get(jax.jit(run)(*given))
    found = jax.jit(run)(*jax.tree.map(lambda x: shard_sequence(array(x), parallel), given))
    return jax.tree.map(lambda x: np.asarray(unshard_sequence(x, parallel)), found)


@functools.cache
def whole(name):
    """`passes` by the judge, or on one device."""
    definition = CALLS[name][1]
    if definition is None:
        return passes(name)
    given, ways, cotangent = arrays()
    problem = Problem(name, **given, **definition)
    slopes = dense_vjp(problem, cotangent, np.zeros(cotangent.shape[:-1]))
    return dense(problem)[0], slopes, dense_jvp(problem, ways)[0]


@pytest.mark.parametrize(("name", "way"), few_rows(ROWS, len(FIRST)))
def test_attention_is_what_it_was(name, way, set_most_spans):
    """A span from another device, cut elsewhere, or whose gradient returns to another; in both modes."""
    kind, layout, method = WAYS[way]
    if method == "gather":  # two shards around the ring, then spans
        set_most_spans(2)
    with jax.set_mesh(mesh_of(kind)):
        parallel = SequenceParallel(SHAPES[kind][1], method=method, layout=layout)
        close(passes(name, parallel=parallel), whole(name), f"{name}, {way}")


@pytest.mark.parametrize("dtype", few(["bfloat16", "float16"], "bfloat16"))
def test_16_bits(dtype):
    """Keys, or gradients of a span, that lose more than a rounding on their way."""
    name = "three shards, and some of a fourth"
    narrow = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), arrays())
    with jax.set_mesh(mesh_of("8")):
        found = passes(name, narrow, SequenceParallel("device", method="ring"))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(whole(name)), strict=True):
        assert x.dtype == dtype
        apart = np.linalg.norm(x.astype(np.float64) - y) / np.linalg.norm(y)
        assert apart < 2 * float(jnp.finfo(dtype).eps)


def test_nothing_at_all():
    """No rows, or no queries and keys, of which a window makes spans that there are not."""
    with jax.set_mesh(mesh_of("8")):
        parallel = SequenceParallel("device", method="ring")
        for rows, length in ((0, S), (2, 0)):
            given = {name: array(x[:rows, :length]) for name, x in arrays()[0].items()}
            out = ea.attention(**given, **NEAR, parallel=parallel)
            assert out.shape == (rows, length, 4, 5)


def at_a_source(parallel):
    """An energy and its gradient, of a length that 8 does not divide."""
    given, _, source = jax.tree.map(lambda x: x[:, : S - 3], arrays())
    options = {"is_causal": True, "local_window_size": (10, 0), "source": array(source)}

    def total(x):
        return ea.free_energy(**x, **options, parallel=parallel).sum()

    return jax.value_and_grad(total)(given)


def second_derivatives(parallel):
    """A gradient's change in a direction, of one row and half of its tokens."""
    given, ways = ({n: x[:1, :32, :2] for n, x in tree.items()} for tree in arrays()[:2])

    def total(x):
        return (ea.attention(**x, **NEAR, parallel=parallel) ** 2).sum()

    return jax.jvp(jax.grad(total), (given,), (ways,))[1]


def backwards(parallel):
    """Attention of positions that run from the last token to the first."""
    back = array(np.arange(S)[None, ::-1].repeat(2, 0), np.int32)
    positions = {"query_positions": back, "key_positions": back}
    given = {name: array(x) for name, x in arrays()[0].items()}
    return ea.attention(**given, **NEAR, **positions, parallel=parallel)


@pytest.mark.parametrize("call", [backwards, at_a_source, second_derivatives])
def test_around_a_ring(call):
    """A window of positions that no layout tells, cut as if they counted from 0; values beside their source.

    Padding that is seen; a turn that is computed again in a derivative of the gradient, by another turn's number.
    """
    run = jax.jit(call, static_argnums=0)
    wanted = jax.device_get(run(None))
    with jax.set_mesh(mesh_of("8")):
        close(run(SequenceParallel("device", method="ring")), wanted)


def on_a_mesh(mesh, *shapes):
    """The types of arrays of 16 bits, sharded along their sequence over all axes."""
    place = jax.NamedSharding(mesh, jax.P(None, mesh.axis_names))
    return [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=place) for x in shapes]


def trained(forward):
    """The results of a function of arrays, and gradients."""

    def run(*given):
        out, pull = jax.vjp(forward, *given)
        return out, pull(out)

    return run


@pytest.mark.parametrize("window", few([(127, 0), (700, 0), (50, 20)], (127, 0)))
def test_a_hybrid(window):
    """Keys of whole groups of devices where few are seen; gradients that return to another device of a group."""
    options = {"local_window_size": window, "is_causal": window[1] == 0}
    near = options | {"local_window_size": tuple(-(-x // 32) for x in window)}
    shape = cost.Shape(1, 2048, 2048, 4, 4, 16, queries_sharded=True, window=window)
    parallel = SequenceParallel(("node", "device"), method="hybrid")
    mesh = make_mesh((4, 2), ("node", "device"))
    short = {name: x[:, :, :2] for name, x in arrays()[0].items()}

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(parallel):
        def total(x):
            return (ea.attention(**x, **near, parallel=parallel) ** 2).sum()

        return jax.value_and_grad(total)(short)

    wanted = jax.device_get(gradient(None))
    with jax.set_mesh(mesh):
        run = trained(functools.partial(ea.attention, **options, parallel=parallel))
        program = jax.jit(run).lower(*on_a_mesh(mesh, *[(1, 2048, 4, 16)] * 3)).compile()
        close(gradient(parallel), wanted)
    said = cost.transfers(
        "hybrid", None, shape, cost.topology("ethernet", (2,), nodes=4), gradient=True
    )
    moved = payload(program)["collective-permute"]
    assert moved == by_kind(said)["collective-permute"]
    if sum(window) < 512:  # a head of two devices' tokens, there and back, keys and values
        assert moved == 2 * 2 * sum(window) * 2 * 16 * 2


BYTES = list(
    itertools.product(
        ("contiguous", "zigzag"),
        ((127, 0), (50, 20)),
        (("ring", "keys"), ("gather", None), ("tree", "allreduce"), ("ring", "queries")),
    )
)


@pytest.mark.product
@pytest.mark.parametrize(("layout", "window", "method"), BYTES)
def test_bytes(layout, window, method):
    """Keys that no query sees and that are sent; a model that knows of no windows."""
    shape = cost.Shape(1, 2048, 2048, 4, 2, 16, queries_sharded=True, window=window, layout=layout)
    way = methods.Ring("queries") if method[1] == "queries" else method[0]
    parallel = SequenceParallel("device", method=way, layout=layout)
    options = {"local_window_size": window, "is_causal": window[1] == 0, "parallel": parallel}
    forward = functools.partial(ea.attention, **options)
    mesh = mesh_of("8")
    with jax.set_mesh(mesh):
        given = on_a_mesh(mesh, *((1, 2048, heads, 16) for heads in (4, 2, 2)))
        programs = [jax.jit(f).lower(*given).compile() for f in (forward, trained(forward))]
    sent = [payload(x).total() for x in programs]
    model = functools.partial(cost.transfers, *method, shape, cost.topology("ethernet", nodes=8))
    assert sent[0] == by_kind(model()).total()
    if method == ("ring", "keys"):
        assert sent[1] == by_kind(model(gradient=True)).total()
    # keys and values of 2 heads of 16 numbers of 2 bytes, both of a zigzag's pieces
    assert sent[0] == sum(window) * 2 * 2 * 16 * 2 * (1 + (layout == "zigzag"))
    assert sent[1] == 2 * sent[0]


def test_bytes_of_documents():
    """Keys of documents that end before a shard begins; documents that are known nowhere but in the program."""
    x = array(np.zeros((2, S, 2, 4)))

    def sent(packed, *given):
        def f(x, *given):
            mask = masks.Causal() & masks.Segments(given[0] if given else packed)
            parallel = SequenceParallel("device", method=methods.Ring("keys"))
            return ea.attention(x, x, -x, mask=mask, parallel=parallel)

        with jax.set_mesh(mesh_of("8")):
            return payload(jax.jit(f).lower(x, *given).compile())["collective-permute"]

    token = 2 * 2 * 2 * 4 * x.dtype.itemsize  # of keys and values of both rows
    assert sent(PACKED) == sum(shared_keys(PACKED, 8)) * token < 7 * 8 * token
    assert sent(None, PACKED) == 7 * 8 * token


def test_bytes_of_images():
    """All keys, as a window that ends before a query bounds none after it, where the images are known."""
    x, long = array(np.zeros((1, S, 2, 4))), np.zeros(S, np.int32)
    long[: S // 4] = 1

    def sent(**options):
        parallel = SequenceParallel("device", method=methods.Ring("keys"))
        with jax.set_mesh(mesh_of("8")):
            f = jax.jit(lambda x: ea.attention(x, x, -x, parallel=parallel, **options))
            return payload(f.lower(x).compile())["collective-permute"]

    image = (masks.Causal() | masks.Spans(jnp.asarray(long[None]))) & masks.Window(3, None)
    near = sent(is_causal=True, local_window_size=(3, 0))
    everything = sent(mask=masks.Causal() | masks.Prefix(S))
    # the shard after that of an image's first tokens, besides the window
    assert sent(mask=image) == near + everything / 7


def test_automatic_method():
    """A tree of all queries' states where a halo of a few keys would do."""
    topology = cost.topology("ethernet", nodes=8)
    plain = cost.Shape(1, 65536, 65536, 8, 8, 64, queries_sharded=True)
    near = dataclasses.replace(plain, window=(511, 0))
    assert cost.choose_method(plain, topology) == "ulysses"
    assert cost.choose_method(near, topology) == "ring"
    all_keys, few_keys = (cost.volume("ring", "keys", x, topology) for x in (plain, near))
    assert few_keys == all_keys * 511 / (7 * 8192)
    options = {"is_causal": True, "local_window_size": (9, 0)}
    with jax.set_mesh(mesh_of("8")):
        x = jnp.zeros((1, 1024, 8, 4))
        attend = functools.partial(ea.attention, **options, parallel=SequenceParallel("device"))
        sent = payload(jax.jit(lambda x: attend(x, x, x)).lower(x).compile())
    # keys and values are one array, which XLA sends once
    assert sent == {"collective-permute": 9 * 8 * 4 * x.dtype.itemsize}
