"""`reproducible=True`: the bytes of one device, whatever mesh, method, layout, cache or transformation computes."""

import dataclasses
import functools
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import (
    KVCache,
    SequenceParallel,
    collectives,
    make_mesh,
    shard_sequence,
    sharded_attention,
    unshard_sequence,
)
from energy_attn.distributed.methods import _reproducible
from energy_attn.kernels import scores
from tests.support.arrays import array
from tests.support.compare import same as same_numbers
from tests.support.selection import few_rows

LENGTH, BATCH, WIDTH = 608, 2, 16  # three leaves, a multiple of 16 that is none of a leaf
OPTIONS: dict[str, Any] = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (300, 0)},
    "both ways": {"local_window_size": (100, 70)},
    "full": {},
    "segments": {"is_causal": True},
    "sinks": {"is_causal": True},
    "scores": {"is_causal": True},
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call: the bytes of its results depend on this alone."""

    option: str = "causal"
    heads: int = 4
    key_heads: int = 2
    dtype: str = "float32"

    def arrays(self) -> tuple[Any, ...]:
        """Query, key, value, a cotangent of `out`, one of the energy, and segments."""
        rng = np.random.default_rng(self.heads)
        heads = self.heads, self.key_heads, self.key_heads, self.heads
        q, k, v, d_out = (
            array(2 * rng.standard_normal((BATCH, LENGTH, n, WIDTH)), self.dtype) for n in heads
        )
        wide = "float64" if self.dtype == "float64" else "float32"
        d_energy = array(rng.standard_normal((BATCH, LENGTH, self.heads)), wide)
        segments = np.cumsum(rng.random((BATCH, LENGTH)) < 0.005, 1).astype(np.int32)
        return q, k, v, d_out, d_energy, jnp.asarray(segments)


def computed(problem: Problem, *arrays, **options):
    """Attention, energy, their gradients and a tangent."""
    q, k, v, d_out, d_energy, segments = arrays
    ids: Any = {}
    if problem.option == "segments":
        ids = {"query_segment_ids": segments, "key_segment_ids": segments}
    learned: Any = {}
    if problem.option == "sinks":
        sink = jnp.linspace(-1, 3, BATCH * problem.heads).reshape(BATCH, -1)
        learned = {"sink": sink.astype(d_energy.dtype)}
    if problem.option == "scores":
        slopes, sink = (
            jnp.linspace(*x, problem.heads, dtype=d_energy.dtype) for x in [(0.1, 0.3), (0, 2)]
        )
        learned = {"score": scores.Function(wave, slopes), "sink": sink}
    energy = ea.FreeEnergy(reproducible=True, **OPTIONS[problem.option])

    def state(q, k, v, learned):
        parallel = options.get("parallel")
        return dataclasses.replace(energy, parallel=parallel, **learned).attention(
            q, k, v, return_energy=True, **ids
        )

    found, pull = jax.vjp(state, q, k, v, learned)
    moves = d_out, 2 * k, 3 * v, learned
    return found, pull((d_out, d_energy)), jax.jvp(state, (q, k, v, learned), moves)[1]


def wave(score, at, period):
    """A score with a parameter for each head, that reads positions."""
    far = (at.query - at.key).astype(score.dtype)
    return score + jnp.sin(score * period[at.head]) * jnp.tanh(0.01 * far)


@functools.cache
def alone(problem: Problem):
    """The results of one device, in one call."""
    return jax.jit(functools.partial(computed, problem))(*problem.arrays())


@dataclasses.dataclass(frozen=True)
class Way:
    """A mesh, a method and a transformation by which a call is computed."""

    sizes: tuple[int, ...] = (8,)
    method: str = "auto"
    layout: str = "contiguous"
    batch: bool = False
    heads: bool = False
    explicit: bool = False
    transform: str = "jit"

    def run(self, problem: Problem):
        """The results of a call, in one device's order."""
        axes = tuple(f"s{i}" for i in range(len(self.sizes)))
        extra = {"b": 2} if self.batch else {"h": 2} if self.heads else {}
        sizes = *extra.values(), *self.sizes
        devices = jax.devices()[: math.prod(sizes)]
        mesh = make_mesh(sizes, (*extra, *axes), devices=devices, explicit=self.explicit)
        parallel = SequenceParallel(
            axes,
            self.method,
            layout=self.layout,
            batch="b" if self.batch else (),
            heads="h" if self.heads else (),
        )
        with jax.set_mesh(mesh):
            arrays = problem.arrays()
            if self.layout != "contiguous":
                arrays = tuple(shard_sequence(x, parallel) for x in arrays)
            run = functools.partial(computed, problem, parallel=parallel)
            if self.transform == "remat":  # everything is computed again for the derivatives
                run = jax.checkpoint(run)
            found = (run if self.transform == "eager" else jax.jit(run))(*arrays)
            if self.layout != "contiguous":
                found = jax.tree.map(
                    lambda x: unshard_sequence(x, parallel) if x.ndim > 2 else x, found
                )
            return jax.device_get(found)


def same(found, wanted):
    """Each array has the bytes of the other, signs of zeros included; none is NaN."""
    same_numbers(found, wanted)
    same_numbers(*(jax.tree.map(np.signbit, jax.device_get(x)) for x in (found, wanted)))


CAUSAL, WINDOW = Problem(), Problem("window", dtype="bfloat16")
WAYS = [
    (CAUSAL, Way((8,), "ring")),
    (WINDOW, Way((2, 2), "auto", "zigzag", batch=True)),
    (Problem("full"), Way((4,), "tree", "striped")),
    (Problem("both ways", dtype="float64"), Way((3,), "gather")),
    (Problem("segments", dtype="float16"), Way((2, 2), "hybrid", heads=True)),
    (CAUSAL, Way((4,), "ulysses", explicit=True, transform="eager")),
    (Problem("sinks"), Way((2,), "ring", batch=True)),
    (Problem("sinks"), Way((2,), "ring", heads=True)),
    (Problem(heads=2), Way((2, 4), "tree", transform="remat")),
    (Problem("scores"), Way((3,), "ring", batch=True)),
    (Problem("scores"), Way((2,), "tree", "zigzag", heads=True)),
    (Problem("scores", dtype="bfloat16"), Way((1,), batch=True)),
]


@pytest.mark.parametrize(("problem", "way"), few_rows(WAYS, 1))
def test_ways(problem, way):
    """A fold in the order of arrival; a sum that devices share; keys in leaves by place and not by position."""
    same(way.run(problem), alone(problem))


def test_sums_over_types():
    """Gradients of a sink and of a score's arrays that JAX sums over the devices of an explicit mesh."""
    rng, shape = np.random.default_rng(2), (4, 70, 4, WIDTH)
    q, k, v, d_out = (array(rng.standard_normal(shape), "float32") for _ in range(4))
    learned = jnp.linspace(0, 1, 4), scores.Function(wave, jnp.linspace(0.1, 0.3, 4))

    def gradient(learned, q, k, v, d_out):
        options = {"is_causal": True, "reproducible": True}
        run = functools.partial(ea.attention, q, k, v, **options)
        return jax.vjp(lambda x: run(sink=x[0], score=x[1]), learned)[1](d_out)

    wanted = jax.jit(gradient)(learned, q, k, v, d_out)
    mesh = make_mesh((4, 2), ("b", "h"), explicit=True)
    with jax.set_mesh(mesh):
        place = jax.NamedSharding(mesh, jax.P("b", None, "h"))
        found = jax.jit(gradient)(learned, *jax.device_put((q, k, v, d_out), place))
        same(jax.device_get(found), wanted)


METHODS = "auto", "tree", "ring", "gather", "ulysses", "hybrid"


@st.composite
def ways(draw):
    """A call and a way to compute it."""
    heads, key_heads = draw(st.sampled_from([(4, 4), (4, 2), (8, 1)]))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16", "float64"]))
    problem = Problem(draw(st.sampled_from(sorted(OPTIONS))), heads, key_heads, dtype)
    sizes = draw(st.sampled_from([(2,), (3,), (4,), (2, 2)]))
    method = draw(st.sampled_from(METHODS))
    hypothesis.assume(method != "hybrid" or len(sizes) > 1)
    hypothesis.assume(method != "ulysses" or (heads % (sizes[0] * len(sizes)) == 0))
    layouts = ["contiguous"] if sizes == (3,) else ["contiguous", "zigzag", "striped"]
    split = draw(st.sampled_from(["none", "batch", "heads"]))
    hypothesis.assume(split != "heads" or key_heads > 1)
    hypothesis.assume(method not in ("ulysses", "hybrid") or split != "heads" or heads == 8)
    layout = draw(st.sampled_from(layouts))
    # types of cotangents and of orders would have to name the axes
    explicit = split == "none" and layout == "contiguous" and draw(st.booleans())
    return problem, Way(
        sizes,
        method,
        layout,
        split == "batch",
        split == "heads",
        explicit,
        draw(st.sampled_from(["jit", "eager", "remat"])),
    )


@pytest.mark.full
@hypothesis.settings(max_examples=6)
@hypothesis.given(ways())
def test_law(drawn):
    """What `test_ways` would, anywhere between its cases."""
    problem, way = drawn
    same(way.run(problem), alone(problem))


@pytest.mark.parametrize("queries", few_rows([("whole",), ("parts",)]))
def test_inside_shard_map(queries):
    """Queries that all devices have, and gradients that each adds its share to."""
    q, k, v, d_out, d_energy, _ = CAUSAL.arrays()
    place = jnp.arange(LENGTH, dtype=jnp.int32)
    rows = jax.P(None, "s") if queries == "parts" else jax.P()

    def run(q, k, v, d_out, d_energy, query_positions, key_positions):
        def state(q, k, v):
            positions = {
                "query_positions": query_positions[None],
                "key_positions": key_positions[None],
            }
            options = {"axis_name": "s", "is_causal": True, "reproducible": True}
            return sharded_attention(q, k, v, **options, **positions)

        found, pull = jax.vjp(state, q, k, v)
        moves = d_out, 2 * k, 3 * v
        return found, pull(type(found)(d_out, d_energy)), jax.jvp(state, (q, k, v), moves)[1]

    keys, at = jax.P(None, "s"), jax.P(*rows[1:])
    specs = rows, keys, keys, rows, rows, at, jax.P("s")
    out = rows, (rows, keys, keys), rows
    args = q, k, v, d_out, d_energy, place, place
    mesh = make_mesh((4,), ("s",), devices=jax.devices()[:4])
    found = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out))(*args)
    same(jax.device_get(found), alone(CAUSAL))


def over_own_keys(parallel, q, k, v, d_out, d_energy):
    """The state of a few queries, which all devices have, its gradients and a tangent."""
    options = {"key_value_seq_lengths": jnp.array([2900, 700]), "parallel": parallel}

    def state(q, k, v):
        return ea.attention(q, k, v, return_energy=True, reproducible=True, **options)

    found, pull = jax.vjp(state, q, k, v)
    return found, pull((d_out, d_energy)), jax.jvp(state, (q, k, v), (d_out, 2 * k, 3 * v))[1]


@functools.cache
def few_queries():
    """Few queries, many keys and cotangents, and what one device computes of them."""
    rng = np.random.default_rng(1)
    shapes = (2, 3, 4, WIDTH), *[(2, 6144, 2, WIDTH)] * 2, (2, 3, 4, WIDTH), (2, 3, 4)
    given = [array(rng.standard_normal(x), "float32") for x in shapes]
    return given, jax.jit(functools.partial(over_own_keys, None))(*given)


# runs of six leaves, of which the tree has two nodes; two runs of three; runs of three; two runs of twelve
@pytest.mark.parametrize(
    ("devices", "layout"),
    few_rows([(4, "contiguous"), (4, "zigzag"), (8, "contiguous"), (1, "zigzag")]),
)
def test_own_keys(devices, layout):
    """Trees of devices' own keys that are joined in the order of the devices; a gradient that each has a part of."""
    (q, k, v, *cotangents), wanted = few_queries()
    mesh = make_mesh((devices,), ("s",), devices=jax.devices()[:devices])
    parallel = SequenceParallel("s", "tree", queries_sharded=False, layout=layout)
    with jax.set_mesh(mesh):
        args = q, shard_sequence(k, parallel), shard_sequence(v, parallel), *cotangents
        run = jax.jit(functools.partial(over_own_keys, parallel)).lower(*args).compile()
        state, (to_query, *to_keys), moved = run(*args)
        to_keys = [unshard_sequence(x, parallel) for x in to_keys]
        same(jax.device_get((state, (to_query, *to_keys), moved)), wanted)
    sent = [x.bytes for x in collectives(run)]
    assert max(sent, default=0) < k.nbytes / devices / 4


@pytest.mark.parametrize(("devices", "block"), few_rows([(4, 32), (4, 256), (1, 32)]))
def test_caches(devices, block):
    """A step over a cache of another capacity, in blocks on several devices, beside a longer row."""
    q, k, v, *_ = WINDOW.arrays()
    F = ea.FreeEnergy(is_causal=True, reproducible=True)
    wanted = jax.jit(functools.partial(F.attention, return_energy=True))(q, k, v)
    parallel = None if devices == 1 else SequenceParallel("s")
    counts = jnp.array([LENGTH - 40, LENGTH - 9])  # of the two rows, before the last step
    mesh = make_mesh((devices,), ("s",), devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        cache = KVCache.empty(
            BATCH, 900, 2, WIDTH, dtype=k.dtype, parallel=parallel, block_size=block
        )
        cache = cache.append(k, v, lengths=counts)
        at = counts[:, None, None, None]
        new = (jnp.take_along_axis(x, at, 1) for x in (k, v))
        cache = cache.append(*new)
        found = cache.attend(jnp.take_along_axis(q, at, 1), reproducible=True)
        found = jax.device_get(tuple(found))
    for row, count in enumerate(counts.tolist()):
        same(tuple(x[row, 0] for x in found), tuple(x[row, count] for x in wanted))


def test_a_head_at_a_time(monkeypatch):
    """Heads that change places, or gradients of one that are those of all."""
    monkeypatch.setattr(_reproducible, "LEAST", 0)
    same(Way((4,), "gather").run(CAUSAL), alone(CAUSAL))


def test_refusals():
    """An option that is ignored where the bits would not be the same."""
    q, k, v, *_ = CAUSAL.arrays()
    with pytest.raises(ValueError, match="implementation: wanted None with reproducible"):
        ea.attention(q, k, v, reproducible=True, implementation="blockwise")
    with pytest.raises(TypeError, match="reproducible"):
        ea.attention(q, k, v, reproducible=1)
    with pytest.raises(NotImplementedError, match="scale"):
        ea.attention(q, k, v, reproducible=True, scale=jnp.float32(0.3))
    options = {"reproducible": True, "is_causal": True}
    with_bias = jax.jit(lambda x: ea.attention(q, k, v, bias=x, **options))
    with pytest.raises(NotImplementedError, match="arrays, got a program for tpu"):
        with_bias.trace(jnp.ones((1, 4, LENGTH, LENGTH))).lower(lowering_platforms=("tpu",))
    F = ea.FreeEnergy(reproducible=True).at(q, k, v)
    with pytest.raises(NotImplementedError, match="reproducible"):
        F.entropy()
    with pytest.raises(NotImplementedError, match="one call"):
        (F | F).attention()
    bias = jnp.zeros((1, 1, LENGTH, LENGTH))
    mesh = make_mesh((2,), ("s",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="bias"):
        ea.attention(q, k, v, bias=bias, reproducible=True, parallel=SequenceParallel("s"))
