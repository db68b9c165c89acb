"""What the library differentiates: every public function of floating arrays, at a small point inside its domain."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn import masks
from energy_attn import scores as ready
from energy_attn.bayes import gamma, saddle_attention
from energy_attn.distributed import (
    KVCache,
    SequenceParallel,
    logsumexp_across,
    make_mesh,
    merge_across,
    shard_sequence,
    sharded_attention,
    unshard_sequence,
)
from energy_attn.functional import shifted_energy
from energy_attn.hopfield import EnergyAttentionBlock, retrieve
from energy_attn.kernels import (
    AttentionState,
    CovarianceState,
    as_state,
    local_attention,
    merge,
    merge_all,
)
from energy_attn.models import Encoder, EncoderConfig, ExpertsConfig, Llama, score_continuations
from energy_attn.prefix_tree import Accepted, PrefixTree, commit, tree_decode
from energy_attn.solvers import FixedPoint, Newton, Optax
from tests.support.arrays import drawn as drawn_module
from tests.support.llama import CONFIG, build


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays by name, trees of them among these, integers too.

    `covers`: names of `energy_attn` that it calls. `zero`: arguments whose derivative is zero, each with the reason.
    `refused`: arguments whose derivative raises a `TypeError`, each with what the error says. `spread`: whether
    it needs devices. `tolerance`: of second derivatives, for solvers that stop before rounding.
    """

    covers: str
    call: Callable[..., Any]
    make: Callable[[], dict[str, Any]]
    zero: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    spread: bool = False
    tolerance: float = 1e-6

    def setting(self) -> contextlib.AbstractContextManager:
        """The mesh in force where the function sends: two devices."""
        if not self.spread:
            return contextlib.nullcontext()
        return jax.set_mesh(make_mesh((1, 2), ("y", "x"), devices=jax.devices()[:2]))

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        """The arguments, made when a test wants them."""
        return jax.tree.map(jnp.asarray, self.make())


def drawn(seed: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def rows(seed: int = 0, **more: Any) -> dict[str, Any]:
    """Three queries of two heads, five keys of one, values of width two; a scale."""
    shapes = {"query": (3, 2, 3), "key": (5, 1, 3), "value": (5, 1, 2)}
    return drawn(seed, **shapes) | {"scale": np.asarray(0.7)} | more


VECTORS = (3, 2, 2)  # one of the values' width for each query and head
THREE = dict.fromkeys("abc", VECTORS)
BIAS = drawn(7, bias=(1, 2, 1, 5))
SINK = {"sink": np.array([0.4, -0.9])}
SOURCE = drawn(8, source=VECTORS)
# the second query sees no key, the last key is seen by none
SEEN = np.ones((1, 1, 3, 5), bool)
SEEN[..., 1, :] = SEEN[..., 4] = False
MASK = {"mask": SEEN}
POSITIONS = {
    "query_positions": np.asarray([[4, 1, 2]], np.int32),
    "key_positions": np.asarray([[0, 1, 2, 3, -1]], np.int32),
}
SEGMENTS = {
    "query_segment_ids": np.asarray([[0, 1, 1]], np.int32),
    "key_segment_ids": np.asarray([[0, 0, 1, 1, 1]], np.int32),
}


def measure(
    query: Any, key: Any, value: Any, scale: Any = None, bias: Any = None, sink: Any = None
) -> ea.Gibbs:
    return ea.FreeEnergy(scale=scale, sink=sink).at(query, key, value, bias=bias)


LAYER = drawn(30, hidden=(3, 2), weight=(5, 2), bias=(5,), scale=()) | {
    "temperature": np.asarray([0.5, 1.0, 2.0])
}


def distributions(
    hidden: Any, weight: Any, bias: Any, scale: Any, temperature: Any, other: Any, matrix: Any
) -> Any:
    p = ea.Categorical(hidden, weight, bias, scale=scale, temperature=temperature)
    q, labels = ea.Categorical(other, matrix), jnp.asarray([1, 0, 4])
    divergences = p.cross_entropy(q), p.kl_divergence(q), p.js_divergence(q)
    return (
        divergences,
        p.log_partition(),
        p.logits_of(labels),
        p.log_prob(labels),
        p.entropy(),
        p.top_k(2)[0],
    )


def sparse(query: Any, key: Any, value: Any, scale: Any, source: Any, bias: Any) -> Any:
    energy = ea.FreeEnergy(scale=scale, regulariser=ea.Tsallis(1.5))
    out, at_zero = energy.attention(query, key, value, bias=bias, return_energy=True)
    return out, at_zero, energy(query, key, value, source=source, bias=bias)


PARAMETERS = {"slopes": (2,), "table": (2, 5), "beta": (2,), "function": (2,), "cap": ()}


def scored(
    score: Any, slopes: Any, table: Any, beta: Any, function: Any, cap: Any, **arrays: Any
) -> Any:
    """An energy of all scores, and the last of them of an array."""
    products = score
    score = ready.Compose(
        ready.Temperature(beta),
        ready.Function(lambda s, at, w: s + jnp.sin(w[at.head] * s), function),
        ready.SoftCap(2 + cap),
        ready.Distance(lambda d: jnp.cos(d)),
        ready.ALiBi(slopes),
        ready.RelativeBias(table),
    )
    source = arrays.pop("source")
    scale = arrays.pop("scale")
    F = ea.FreeEnergy(scale=scale, score=score, is_causal=True).at(**arrays)
    at = ready.ScoreIndices(
        *(np.arange(n, dtype=np.int32).reshape(x) for n, x in ((1, (1, 1, 1)), (2, (2, 1, 1)))),
        *(np.arange(n, dtype=np.int32).reshape(x) for n, x in ((3, (1, 3, 1)), (5, (1, 1, 5)))),
    )
    return F(source), F.attention(), F.tilt(source).entropy(), score(products, at)


def union(query: Any, key: Any, value: Any, scale: Any, source: Any) -> ea.Gibbs:
    """Three keys and two, tilted."""
    first, second = (measure(query, key[at], value[at], scale) for at in (slice(3), slice(3, None)))
    return (first | second).tilt(source)


def observables(tangent: Any, tangents: Any, source: Any, **arrays: Any) -> Any:
    F = measure(**arrays).tilt(source)
    return (
        F.covariance(),
        F.covariance(tangent),
        F.cumulant(tangents),
        F.moment(tangents[:2]),
        F.entropy(),
        F.score_moments(),
        F.temperature_sensitivity(),
    )


def of_keys(other: Any, rows: Any, bias: Any, source: Any, **arrays: Any) -> Any:
    F, G = (measure(**x).tilt(source) for x in (arrays, arrays | other))
    by_blocks = measure(bias=bias, **arrays).tilt(source)
    return (
        F.kl(G),
        F.cross_entropy(by_blocks),
        by_blocks.kl(G),
        F.weights(rows=slice(1, 3), keys=[4, 0]),
        by_blocks.importance(rows),
    )


def inside(value: Any, seed: int = 3) -> Any:
    """Points of the hull of the values, one for each query and head."""
    weights = np.random.default_rng(seed).dirichlet(np.ones(len(value)), (3, 2))
    return np.einsum("tns,sv->tnv", weights, value[:, 0])


# Points well inside, and a tolerance near rounding: finite differences see what a solver leaves.
HULL = rows(1)
HULL["value"] = 2 * HULL["value"]
POINT = inside(HULL["value"])
EXACT = Newton(tolerance=1e-13)
LAMBDA = {"regulariser": np.asarray(0.3)}


def solution(found: ea.Solution) -> Any:
    return found.value, found.point if found.source is None else found.source


def conjugate(point: Any, regulariser: Any, solver: Any = EXACT, **arrays: Any) -> Any:
    return solution(measure(**arrays).conjugate(point, regulariser=regulariser, solver=solver))


def rate(point: Any, source: Any, regulariser: Any, **arrays: Any) -> Any:
    F = union(source=source, **arrays)
    smooth = F.rate(point, regulariser=regulariser, solver=EXACT)
    return solution(smooth), solution(F.rate(point, solver=EXACT))


def mode(start: Any, regulariser: Any, **arrays: Any) -> Any:
    found = measure(**arrays).map(start=start, regulariser=regulariser, solver=EXACT)
    return found.value, found.point


def saddle(start: Any, **arrays: Any) -> Any:
    found = saddle_attention(measure(**arrays), start=(0 * start, start), solver=EXACT)
    return found.value, found.point


def retrieved(state: Any, memories: Any, scale: Any) -> Any:
    solver = FixedPoint(max_steps=3000, tolerance=1e-15)
    found = retrieve(state, memories, scale=scale, solver=solver)
    stats = {name: found.stats[name] for name in ("effective", "weight", "overlap")}
    return found.value, found.point, stats


def plane(**arrays: Any) -> Any:
    found = ea.landscape(points=3, extent=(1.0, 0.3), **arrays)
    return found.free_energy, found.rate, found.attention, found.slope, found.values


@functools.cache
def split_layer() -> tuple[Any, Any]:
    sizes = {"num_heads": 2, "query_size": 4, "num_kv_heads": 1, "dropout_p": 0.4}
    made = ea.nn.MultiheadAttention(**sizes, scale=jnp.asarray(0.8), key=jax.random.key(0))
    return eqx.partition(made, eqx.is_array)


def layer(layer: Any, query: Any, key_: Any, value: Any) -> Any:
    whole = eqx.combine(layer, split_layer()[1])
    found = whole(query, key_, value, key=jax.random.key(1), return_energy=True)
    return found, whole.project(query, key_, value)


def flaxes(query: Any, key: Any, value: Any, bias: Any, **energy: Any) -> Any:
    attend = ea.flax.attention_fn(**energy)
    found = attend(query, key, value, bias=bias)
    dropped = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(0)}
    return found, attend(query, key, value, bias=bias, **dropped)


def split_theirs() -> tuple[Any, Any]:
    made = eqx.nn.MultiheadAttention(2, 4, use_key_bias=True, key=jax.random.key(0))
    return eqx.partition(made, eqx.is_array)


def swapped(layer: Any, query: Any, key_: Any, value: Any, **energy: Any) -> Any:
    theirs = eqx.combine(layer, split_theirs()[1])
    scaled = ea.replace_attention(theirs, **energy)
    found = ea.record(scaled, "energy", "entropy")(query, key_, value)
    back = ea.restore_attention(ea.replace_attention(theirs))
    return found, back(query, key_, value)


def block(block: EnergyAttentionBlock, x: Any) -> Any:
    return block.energy(x), block(x)


def make_block(**options: Any) -> EnergyAttentionBlock:
    energy = ea.FreeEnergy(scale=jnp.asarray(0.9), **options)
    options = {"free_energy": energy, "dtype": jnp.float64, "key": jax.random.key(0)}
    return EnergyAttentionBlock(3, 2, 2, **options)


TOKENS = np.asarray([[3, 1, 4, 1, 5]], np.int32)
SMALL = dataclasses.replace(
    CONFIG, vocab_size=8, hidden_size=6, intermediate_size=5, num_hidden_layers=1, head_dim=4
)

ROUTED = dataclasses.replace(
    SMALL,
    model_type="mixtral",
    experts=ExpertsConfig(num_experts=3, num_experts_per_tok=2, intermediate_size=4),
)


def encoder() -> Encoder:
    config = EncoderConfig(8, 6, 1, 2, 5, 8)
    return drawn_module(lambda key: Encoder(config, jnp.float64, key=key))


def logits(model: Llama, tokens: Any, x: Any) -> Any:
    return model(tokens).logits, model.logits(x), model.output(x).log_partition()


def scores(model: Llama, tokens: Any, continuations: Any) -> Any:
    return score_continuations(model, tokens, continuations)


def cached(key: Any, value: Any, quantize: Any = None) -> KVCache:
    """A cache of eight slots with these tokens."""
    heads, width = key.shape[2:]
    options = {"dtype": jnp.float64, "quantize": quantize, "block_size": 8}
    return KVCache.empty(len(key), 8, heads, width, value.shape[3], **options).append(key, value)


CACHE = drawn(5, key=(1, 5, 1, 3), value=(1, 5, 1, 2), query=(1, 3, 2, 3), source=(1, 3, 2, 2))
SCALE = {"scale": np.asarray(0.7)}


def decode(
    query: Any, key: Any, value: Any, source: Any, scale: Any, sink: Any, importance: Any
) -> Any:
    cache = cached(key, value)
    F = cache.at(query, energy=ea.FreeEnergy(scale=scale, is_causal=True))
    kept = cache.evict(2, importance=importance)
    return (
        cache.attend(query, source=source, scale=scale, sink=sink),
        kept.attend(query[:, :1]),
        cache.keys(),
        cache.values(),
        F.entropy(),
    )


def forked(query: Any, key: Any, value: Any, old: Any, **options: Any) -> Any:
    cache = cached(old["key"], old["value"]).fork(2, capacity=8)
    return cache.append(key, value).attend(query, **options)


def rounded(query: Any, key: Any, value: Any) -> Any:
    return cached(key, value, "int8").attend(query)


def tree_nodes(query: Any, key: Any, value: Any, old: Any, **options: Any) -> Any:
    tree = PrefixTree.from_beam(jnp.asarray([[[1, 2], [1, 3]]], jnp.int32), capacity=3)
    cache = cached(old["key"], old["value"])
    out = tree_decode(query, key, value, tree=tree, cache=cache, **options)
    path = Accepted(*(jnp.asarray(x, jnp.int32) for x in ([[0, 2]], [2], [3])))
    return out, commit(cache, path, key, value).keys()


NODES = drawn(6, query=(1, 3, 2, 3), key=(1, 3, 1, 3), value=(1, 3, 1, 2), source=(1, 3, 2, 2))
NODES["old"] = {name: CACHE[name] for name in ("key", "value")}

FORK = drawn(22, query=(2, 3, 2, 3), key=(2, 3, 1, 3), value=(2, 3, 1, 2), source=(2, 3, 2, 2))
FORK["old"] = NODES["old"]

STATES = drawn(9, out=(4, 2), lse=(4,), covariance=(4, 2, 2))


def merged(out: Any, lse: Any, covariance: Any) -> Any:
    state = as_state(out, lse, base=2.0)
    first, second = (jax.tree.map(lambda x, i=i: x[i], state) for i in (0, 1))
    others = (CovarianceState(covariance[i], out[i], lse[i]) for i in (2, 3))
    return merge(first, second), merge_all(state), merge(*others)


WHOLE, HERE, BOTH = P(), P("x"), P(("y", "x"))
DEVICES = SequenceParallel("x", layout="zigzag")


def over_two(function: Callable[..., Any], result: P = WHOLE, **specs: P) -> Callable[..., Any]:
    """A function of one device's arrays, mapped over two; those that `specs` do not name are whole."""

    def run(**arrays: Any) -> Any:
        mapped = jax.shard_map(
            lambda arrays: function(**arrays),
            in_specs=({name: specs.get(name, WHOLE) for name in arrays},),
            out_specs=result,
        )
        return mapped(arrays)

    return run


def spread(**arrays: Any) -> Any:
    """Attention over a mesh by layouts, without `shard_map`."""
    arrays = {name: shard_sequence(x, DEVICES, axis=0) for name, x in arrays.items()}
    out = ea.attention(**arrays, parallel=DEVICES, is_causal=True)
    return unshard_sequence(out, DEVICES, axis=0)


def folded(out: Any, lse: Any, covariance: Any) -> Any:
    state = AttentionState(out[0], lse[0])
    other = CovarianceState(covariance[0], *state)
    return merge_across(state, "x"), merge_across(other, "x"), logsumexp_across(lse[0], "x")


LONG = drawn(4, query=(4, 2, 3), key=(4, 2, 3), value=(4, 2, 2), source=(4, 2, 2)) | SCALE
BY_KEYS = {"key": HERE, "value": HERE, "bias": P(None, None, None, "x")}
BY_ROWS = dict.fromkeys(("query", "key", "value", "source"), HERE)
CONSTANT = "the optimum is the same for every start and regulariser: exact zeros"
PENALTY = drawn(12, x=(4,))["x"] * 2
CASES = {
    "free_energy": Case(
        "free_energy",
        functools.partial(ea.free_energy, is_causal=True),
        lambda: rows() | BIAS | SOURCE | MASK | POSITIONS | SINK,
    ),
    "attention": Case(
        "attention",
        functools.partial(ea.attention, return_energy=True, mask=masks.Window(9, 2)),
        lambda: rows() | BIAS | SEGMENTS | SINK,
    ),
    "scores": Case(
        " ".join(
            f"kernels.scores.{x} kernels.scores.{x}.__call__"
            for x in "ALiBi Compose Distance Function RelativeBias SoftCap Temperature".split()
        ),
        scored,
        lambda: rows() | SOURCE | drawn(13, score=(2, 3, 5), **PARAMETERS),
    ),
    "sparse": Case("Tsallis", sparse, lambda: rows() | SOURCE | BIAS, tolerance=1e-5),
    "local_attention": Case(
        "kernels.local_attention",
        functools.partial(local_attention, implementation="decode"),
        lambda: rows() | BIAS | SOURCE,
    ),
    "reference": Case(
        "kernels.local_attention",
        functools.partial(local_attention, implementation="reference"),
        lambda: rows() | BIAS | SOURCE,
    ),
    "FreeEnergy": Case(
        "FreeEnergy FreeEnergy.__call__ FreeEnergy.attention",
        lambda scale, source, bias, **x: (
            ea.FreeEnergy(scale)(**x, source=source, bias=bias),
            ea.FreeEnergy(scale).attention(**x, bias=bias),
        ),
        lambda: rows() | BIAS | SOURCE,
    ),
    "Gibbs": Case(
        "Gibbs Gibbs.__call__ Gibbs.attention Gibbs.tilt Gibbs.merge Gibbs.__or__ FreeEnergy.at",
        lambda tilt, source, bias, query, key, value, scale: (
            (F := union(query, key, value, scale, tilt))(source),
            F.attention(),
            measure(query, key, value, scale, bias).merge(F)(source),
        ),
        lambda: rows() | BIAS | SOURCE | drawn(13, tilt=VECTORS),
    ),
    "observables": Case(
        """Gibbs.covariance Gibbs.cumulant Gibbs.moment Gibbs.entropy Gibbs.score_moments
        Gibbs.temperature_sensitivity""",
        observables,
        lambda: (
            rows()
            | BIAS
            | SOURCE
            | SINK
            | drawn(14, tangent=VECTORS)
            | {"tangents": list(drawn(15, **THREE).values())}
        ),
    ),
    "of keys": Case(
        "Gibbs.weights Gibbs.importance Gibbs.kl Gibbs.cross_entropy",
        of_keys,
        lambda: (
            rows()
            | BIAS
            | SOURCE
            | {"other": drawn(24, query=(3, 2, 4), key=(5, 1, 4))}
            | drawn(25, rows=(3, 2))
        ),
    ),
    "statistics": Case(
        "Gibbs.statistics Gibbs.score_max Gibbs.renyi",
        lambda sink, **arrays: (
            (F := ea.FreeEnergy(arrays.pop("scale"), sink=sink).at(**arrays)).statistics(),
            F.score_max(),
            F.entropy(),
            F.renyi(2),
        ),
        lambda: rows() | SINK,
    ),
    "conjugate": Case(
        "Gibbs.conjugate Solution",
        conjugate,
        lambda: HULL | LAMBDA | {"point": POINT},
    ),
    "conjugate by Optax": Case(
        "Gibbs.conjugate",
        functools.partial(conjugate, solver=Optax(optax.lbfgs(), tolerance=1e-12, max_steps=200)),
        lambda: HULL | LAMBDA | {"point": POINT},
    ),
    "rate": Case("Gibbs.rate", rate, lambda: HULL | LAMBDA | SOURCE | {"point": POINT}),
    "map": Case(
        "Gibbs.map",
        mode,
        lambda: HULL | LAMBDA | {"start": POINT},
        zero={"start": CONSTANT, "regulariser": CONSTANT},
    ),
    "saddle_attention": Case(
        "bayes.saddle_attention",
        saddle,
        lambda: HULL | {"start": POINT},
        zero={"start": CONSTANT},
    ),
    "gamma": Case(
        "bayes.gamma",
        lambda source, point, **x: gamma(measure(**x), source, point),
        lambda: rows() | SOURCE | {"point": POINT},
    ),
    "reproducible": Case(
        "reproducible",
        lambda x, y: ea.reproducible(lambda x, y: x * y + jnp.exp(x) / (1 + y * y))(x, y),
        lambda: drawn(27, x=(3, 5), y=(3, 5)),
    ),
    "softmax_cross_entropy": Case(
        "softmax_cross_entropy",
        lambda labels, **x: ea.softmax_cross_entropy(
            **x,
            labels=labels,
            label_smoothing=0.1,
            z_loss=0.1,
            soft_cap=3.0,
            return_statistics=True,
        ),
        lambda: LAYER | drawn(31, weights=(3,)) | {"labels": np.asarray([4, 0, 2], np.int32)},
    ),
    "Categorical": Case(
        """Categorical Categorical.log_partition Categorical.log_prob Categorical.logits_of Categorical.entropy
        Categorical.cross_entropy Categorical.kl_divergence Categorical.js_divergence Categorical.top_k""",
        distributions,
        lambda: LAYER | drawn(32, other=(3, 2), matrix=(5, 2)),
    ),
    "sum_over_tokens": Case(
        "sum_over_tokens",
        lambda factor, **x: ea.sum_over_tokens(
            lambda p, factor: factor * p.entropy(), ea.Categorical(**x), factor
        ),
        lambda: LAYER | drawn(33, factor=(3,)),
    ),
    "safe_softmax": Case(
        "safe_softmax",
        lambda scores, where: ea.safe_softmax(scores, where=where),
        lambda: drawn(15, scores=(3, 5)) | {"where": SEEN[0, 0]},
    ),
    "shifted_energy": Case(
        "functional.shifted_energy",
        lambda scores, shift: (shifted_energy(scores, shift), sum(shifted_energy(scores))),
        lambda: drawn(16, scores=(3, 5), shift=(3,)),
    ),
    "penalties": Case(
        "lse_penalty entropy_penalty",
        lambda energy, entropy: (
            ea.lse_penalty(energy),
            ea.entropy_penalty(entropy, low=0.3, high=0.4),
        ),
        lambda: {"energy": PENALTY, "entropy": PENALTY},
    ),
    "energy_report": Case(
        "energy_report",
        lambda **x: ea.energy_report(measure(**x), per_query=True),
        lambda: rows() | BIAS,
    ),
    "landscape": Case(
        "landscape",
        plane,
        lambda: drawn(17, query=(3,), key=(5, 3), value=(5, 2), directions=(2, 2), bias=(5,)),
        tolerance=1e-4,
    ),
    "MultiheadAttention": Case(
        "nn.MultiheadAttention nn.MultiheadAttention.__call__ nn.MultiheadAttention.project",
        layer,
        lambda: {"layer": split_layer()[0]} | drawn(18, query=(3, 4), key_=(5, 4), value=(5, 4)),
    ),
    "flax": Case(
        "flax.attention_fn",
        flaxes,
        lambda: (
            drawn(23, query=(3, 2, 4), key=(5, 2, 4), value=(5, 2, 3), bias=(2, 3, 5))
            | SCALE
            | SINK
        ),
    ),
    "record": Case(
        "record replace_attention restore_attention",
        swapped,
        lambda: (
            {"layer": split_theirs()[0]}
            | drawn(22, query=(3, 4), key_=(5, 4), value=(5, 4))
            | SCALE
            | SINK
        ),
    ),
    "weigh": Case(
        "weigh",
        lambda weights, segments, **x: ea.weigh(lambda: ea.attention(**x, is_causal=True))(
            weights, segments
        ),
        lambda: (
            rows() | drawn(26, weights=(2,)) | {"segments": np.asarray([0, 1, 1, -1, 0], np.int32)}
        ),
    ),
    "retrieve": Case(
        "hopfield.retrieve",
        retrieved,
        lambda: drawn(19, state=(2, 2, 3), memories=(5, 1, 3)) | SCALE,
        zero={"state": "a fixed point does not change with the state that leads to it"},
    ),
    "EnergyAttentionBlock": Case(
        """hopfield.EnergyAttentionBlock hopfield.EnergyAttentionBlock.energy
        hopfield.EnergyAttentionBlock.__call__""",
        block,
        lambda: {"block": make_block()} | drawn(20, x=(4, 3)),
    ),
    "Llama": Case(
        "models.Llama models.Llama.__call__ models.Llama.logits models.Llama.output",
        logits,
        lambda: {"model": build(SMALL), "tokens": TOKENS} | drawn(21, x=(1, 2, 6)),
    ),
    "log_probs": Case(
        "models.Llama.log_probs models.Llama.loss models.Llama.distribution",
        lambda model, tokens, weights: (
            model.log_probs(tokens),
            model.loss(tokens, weights=weights, z_loss=0.1),
            model.distribution(tokens).entropy(),
        ),
        lambda: {"model": build(SMALL), "tokens": TOKENS} | drawn(33, weights=(1, 4)),
    ),
    "Llama of experts": Case(
        "models.Llama.__call__",
        lambda model, tokens: model(tokens).logits,
        lambda: {"model": build(ROUTED), "tokens": TOKENS},
    ),
    "Encoder": Case(
        "models.Encoder models.Encoder.__call__ models.Encoder.embed",
        lambda model, tokens: (model(tokens).hidden, model.embed(tokens)),
        lambda: {"model": encoder(), "tokens": TOKENS},
    ),
    "score_continuations": Case(
        """models.score_continuations models.Llama.read_tree
        models.DecoderCache""",
        scores,
        lambda: {"model": build(SMALL), "tokens": TOKENS, "continuations": TOKENS[:, None, :2]},
    ),
    "KVCache": Case(
        """distributed.KVCache distributed.KVCache.append distributed.KVCache.attend
        distributed.KVCache.at distributed.KVCache.keys distributed.KVCache.values
        distributed.KVCache.evict""",
        decode,
        lambda: CACHE | SCALE | SINK | drawn(27, importance=(1, 8)),
        zero={"importance": "it says which tokens stay, and no number of them"},
    ),
    "ForkedCache": Case(
        "distributed.ForkedCache distributed.ForkedCache.append distributed.ForkedCache.attend",
        forked,
        lambda: FORK | SCALE | SINK,
    ),
    "KVCache of eight bits": Case(
        "distributed.KVCache.append",
        rounded,
        lambda: {name: CACHE[name] for name in ("query", "key", "value")},
        refused=dict.fromkeys(("key", "value"), "quantize: wanted a cache that stores floating"),
    ),
    "tree_decode": Case(
        "prefix_tree.tree_decode prefix_tree.commit",
        tree_nodes,
        lambda: NODES | SCALE | SINK,
    ),
    "states": Case(
        """kernels.AttentionState kernels.CovarianceState kernels.as_state kernels.merge
        kernels.merge_all""",
        merged,
        lambda: STATES,
    ),
    "folds": Case(
        "distributed.merge_across distributed.logsumexp_across",
        over_two(folded, out=HERE, lse=HERE, covariance=HERE),
        lambda: {name: x[:2] for name, x in STATES.items()},
        spread=True,
    ),
    "tree_attention": Case(
        "distributed.sharded_attention",
        over_two(functools.partial(sharded_attention, axis_name="x"), **BY_KEYS),
        lambda: LONG | SINK | drawn(11, bias=(1, 2, 1, 4)),
        spread=True,
    ),
    **{
        f"{method}_attention": Case(
            "distributed.sharded_attention",
            over_two(
                functools.partial(sharded_attention, axis_name=axes, method=method), out, **specs
            ),
            lambda: LONG | SINK | drawn(11, bias=(1, 2, 1, 4)),
            spread=True,
        )
        for method, axes, out, specs in (
            ("ring", "x", HERE, BY_ROWS),
            ("ulysses", "x", HERE, BY_ROWS | {"bias": P(None, "x")}),
            ("gather", "x", HERE, BY_ROWS),
            (
                "hybrid",
                ("y", "x"),
                BOTH,
                dict.fromkeys(BY_ROWS, BOTH) | {"bias": P(None, "x", "y")},
            ),
        )
    },
    "layouts": Case(
        "distributed.shard_sequence distributed.unshard_sequence distributed.SequenceParallel",
        spread,
        lambda: {name: LONG[name] for name in ("query", "key", "value")},
        spread=True,
    ),
}

# Public names without a derivative, or modules of them; all that has none is here, with the reason.
WITHOUT = {
    "of types, which differentiate nothing": """kernels.Operands kernels.Settings kernels.KernelCall
    Result VocabularyParallel prefix_tree.PrefixTree prefix_tree.Accepted models.LlamaConfig
    models.ModelDrafter models.PromptLookup models.Images""",
    "of solvers, masks and costs, which have no floating arrays": """solvers. kernels.masks.
    distributed.cost. distributed.plan. distributed.methods.""",
    "of text, pictures, files, processes and programs": """citation plot. kernels.implementations
    distributed.collectives distributed.initialize distributed.make_mesh distributed.fetch distributed.place
    models.shard models.load models.Tokenizer""",
    "of integers: draws, tokens, trees, places and buckets": """Gibbs.sample Categorical.sample Categorical.mode
    models.generate     kernels.scores.ScoreIndices kernels.scores.RelativeBias.t5_buckets prefix_tree.accept_greedy
    prefix_tree.accept_sampling prefix_tree.verify prefix_tree.grow""",
    "of constants": """CHECKPOINT_NAMES kernels.empty_state models.Rope
    models.Rope.scaled models.Rope.linear models.Rope.llama3 models.Rope.yarn models.Rope.dynamic models.Rope.longrope
    models.ExpertsConfig models.LatentConfig models.EncoderConfig""",
    "of a loop that ends when it may, which raises in reverse mode": "attribute",
}
