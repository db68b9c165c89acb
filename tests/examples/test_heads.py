"""The study of heads: measures on heads made by hand, ablation beside changed weights, and what the page says."""

import importlib
import json
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from energy_attn.cli.demo import byte_llama

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
heads = importlib.import_module("heads")
minilm = importlib.import_module("minilm.heads")
bert = importlib.import_module("minilm.bert")
measure = importlib.import_module("minilm.measure")
energies = importlib.import_module("minilm_energies")

REPORT = json.loads((ROOT / "docs" / "benchmarks" / "heads.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model():
    return byte_llama()


def one_hot(keys, count):
    """Weights `[T, S]` of rows that each look at one key."""
    return np.eye(count)[np.asarray(keys)]


def test_behaviour():
    """A diagonal beside the right one, or queries among them that see too few keys."""
    count = heads.FIRST + 40
    rows = np.arange(count)
    before = one_hot(np.maximum(rows - 1, 0), count)
    first, fifth = one_hot(0 * rows, count), one_hot(np.minimum(rows, 5), count)
    even = np.tril(np.ones((count, count))) / (rows[:, None] + 1)
    before[: heads.FIRST] = first[: heads.FIRST]  # does not count
    found = heads.behaviour(np.stack([before, first, fifth, even])[None])
    near = (1 / (rows[heads.FIRST :] + 1)).mean()
    np.testing.assert_allclose(found["previous"][0], [1, 0, 0, near])
    np.testing.assert_allclose(found["first"][0], [0, 1, 0, near])
    np.testing.assert_allclose(found["heaviest"][0], [1 / 40, 1, 1, near])


def test_matched():
    """A head that looks at the same byte, or at the one before, taken for one of induction."""
    rows = np.arange(2 * heads.HALF)
    for offset, wanted in ((1, 1.0), (0, 0.0), (2, 0.0)):
        looks = one_hot(np.maximum(rows - heads.HALF + offset, 0), len(rows))
        np.testing.assert_array_equal(heads.matched(looks), np.full(heads.HALF - 1, wanted))


def test_random_texts():
    """A first half with an earlier occurrence that should have none, or queries that differ."""
    texts = {name: np.asarray(x) for name, x in heads.random_texts().items()}
    halves = slice(47), slice(47, 94)
    first, second = ({name: x[:, half] for name, x in texts.items()} for half in halves)
    for name in texts:
        np.testing.assert_array_equal(second[name], second["repeated"])
    np.testing.assert_array_equal(first["repeated"], second["repeated"])
    np.testing.assert_array_equal(np.sort(first["shuffled"]), np.sort(second["repeated"]))
    assert (first["shuffled"] == second["repeated"]).mean() < 0.1
    both = np.sort(np.concatenate([first["others"], second["repeated"]], 1))
    np.testing.assert_array_equal(both, np.broadcast_to(np.arange(33, 127), both.shape))


def test_statistics():
    """Ties that count for one side, layers that are compared with each other, or a p of nothing."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(5, size=(2, 3, 7)), rng.integers(5, size=(2, 3, 9))
    above = (x[..., :, None] > y[..., None, :]) + 0.5 * (x[..., :, None] == y[..., None, :])
    np.testing.assert_allclose(heads.separation(x, y), above.mean((-2, -1)))

    x, y = rng.normal(size=(2, 4, 4))
    found = heads.rank_correlation(x, y)
    wanted = stats.spearmanr(x.ravel(), y.ravel())
    np.testing.assert_allclose(found["rho"], wanted.statistic)
    assert abs(found["p"] - wanted.pvalue) < 0.02 and found["p"] > 0.05
    low, high = found["interval"]
    assert low < found["rho"] < high
    layers = 100 * np.arange(4)[:, None]
    apart = heads.rank_correlation(x + layers, x - layers)
    assert apart["rho"] < 0 and apart["within_layers"] == 1 and apart["p_within_layers"] < 1e-3
    wanted = [stats.spearmanr(x[i], y[i]).statistic for i in range(4)]
    np.testing.assert_allclose(heads.by_position(x, y), wanted)


@pytest.fixture(scope="module")
def tokens():
    return heads.pieces()[:2, :81]


def without(model, layer, head):
    """The model whose projection reads nothing of a head."""
    size = model.config.head_dim
    columns = slice(head * size, (head + 1) * size)

    def where(model):
        return model.layers[layer].self_attn.o_proj.weight

    return eqx.tree_at(where, model, where(model).at[:, columns].set(0))


def test_zero(model, tokens, user_settings):
    """Heads of another layer or place that are taken away, or a loss of other bytes."""
    layer, head = 2, 1
    instead = jnp.zeros((4, 4, 32))
    loss, rise, divergence = heads.ablate(model, tokens, instead)
    log_p = [
        np.asarray(jax.nn.log_softmax(x(tokens[:, :-1]).logits), np.float64)
        for x in (model, without(model, layer, head))
    ]
    each = [-np.take_along_axis(x, np.asarray(tokens)[:, 1:, None], 2)[..., 0] for x in log_p]
    np.testing.assert_allclose(loss, each[0], atol=1e-4)
    np.testing.assert_allclose(rise[layer, head], each[1] - each[0], atol=1e-4)
    wanted = (np.exp(log_p[0]) * (log_p[0] - log_p[1])).sum(-1)
    np.testing.assert_allclose(divergence[layer, head], wanted, atol=1e-4)
    # of a head that has been taken away already, nothing is left
    _, again, _ = heads.ablate(without(model, layer, head), tokens, instead)
    np.testing.assert_allclose(again[layer, head], 0, atol=1e-5)
    assert (jnp.abs(again).mean((2, 3)) > 1e-3).sum() == 15


@pytest.mark.full
def test_matched_without(model, user_settings):
    """Induction that is measured in another head, or without another one."""
    texts = heads.random_texts()["repeated"][:2]
    found = heads.matched_without(model, texts, jnp.zeros((4, 4, 32)), (3, 0))
    for layer, head in ((1, 2), (0, 3)):
        weights = heads.record(without(model, layer, head), texts)["weights"][:, 3, 0]
        wanted = heads.matched(weights).mean(-1)
        np.testing.assert_allclose(found[:, layer, head], wanted, atol=1e-4)


def test_mean(model, user_settings):
    """A mean that is not put in the place of its head: of one byte alone, layer 0 says the same everywhere."""
    text = jnp.full((1, 65), ord("a"), jnp.int32)
    seen = heads.record(model, text[:, :-1])
    mean = seen["out"].mean((0, 3))
    everywhere = np.broadcast_to(mean[0][:, None], (4, 64, 32))
    np.testing.assert_allclose(seen["out"][0, 0], everywhere, atol=1e-5)
    _, restored, _ = heads.ablate(model, text, jnp.asarray(mean, jnp.float32))
    _, taken, _ = heads.ablate(model, text, jnp.zeros((4, 4, 32)))
    np.testing.assert_allclose(restored[0], 0, atol=1e-4)
    assert (jnp.abs(taken[0]).max((1, 2)) > 0.01).all()


def test_figures(model, tokens, user_settings):
    """A figure of other rows or heads than the weights beside it, from which it follows."""
    seen = heads.record(model, tokens)
    p = seen["weights"]
    count = np.arange(1, p.shape[-1] + 1)
    log = np.log(np.where(p > 0, p, 1))
    entropy = -(p * log).sum(-1)
    np.testing.assert_allclose(seen["entropy"], entropy, atol=1e-4)
    np.testing.assert_allclose(
        seen["relative_entropy"][..., 1:],
        (entropy / np.log(np.maximum(count, 2)))[..., 1:],
        atol=1e-4,
    )
    np.testing.assert_allclose(seen["gap"], -np.log(p.max(-1)), atol=1e-4)
    heat = (p * log**2).sum(-1) - (p * log).sum(-1) ** 2  # scores, but for the energy of the row
    np.testing.assert_allclose(seen["heat_capacity"], heat, atol=2e-3)
    added = seen["out"][:, 1, 2] @ np.asarray(model.layers[1].self_attn.o_proj.weight[:, 64:96]).T
    weights = [x.self_attn.o_proj.weight for x in model.layers]
    real = np.arange(p.shape[-1]) < np.array([[50], [81]])
    found = heads.contribution(weights, seen["out"], real)
    for i, size in enumerate((50, 81)):
        rms = np.sqrt((added[i, :size] ** 2).mean())
        np.testing.assert_allclose(found["norm"][i, 1, 2], rms)
    mean = np.mean([added[0, :50].mean(0), added[1].mean(0)], 0)
    rms = np.sqrt(((added[0, :50] - mean) ** 2).mean())
    np.testing.assert_allclose(found["varying_norm"][0, 1, 2], rms)


@pytest.mark.full
def test_measure(model, user_settings, monkeypatch):
    """A script that stops, or writes other entries than the page reads."""
    for name, x in {"TEXTS": 2, "RANDOM": 2, "SHOWN": 1, "RESAMPLED": 20}.items():
        monkeypatch.setattr(heads, name, x)
    found = heads.measure(model)

    def names(x):
        return {name: names(y) for name, y in x.items()} if isinstance(x, dict) else None

    assert names(found) == {name: names(REPORT[name]) for name in found}
    shape = np.shape(found["heads"]["induction"])
    assert shape == np.shape(REPORT["heads"]["induction"]) == (2, 4, 4)
    assert found["random"]["most_inductive"] == REPORT["random"]["most_inductive"]


@pytest.mark.full
def test_sentences(user_settings):
    """Energies without the first token that are those of other rows, or padding in a mean."""
    directory = energies.get_model_path()
    encoder = bert.load(directory)
    encodings = bert.tokenize(directory, energies.SENTENCES)[:3]
    found, out, real = minilm.by_head(encoder, encodings)
    encoded = measure.encode(encoder, encodings)
    weights = np.asarray(measure.weights_of(encoder, encoded), np.float64)
    weights = np.moveaxis(weights, (1, 3), (0, 2))
    assert weights.shape[:4] == out.shape[:4]
    for i, length in enumerate(real.sum(1)):
        p = weights[i, :, :, :length, :length]
        rest = p[..., 1:] / p[..., 1:].sum(-1, keepdims=True)
        logs = np.log(np.where(rest > 0, rest, 1))
        entropy = -(rest * logs).sum(-1).mean(-1) / np.log(length - 1)
        np.testing.assert_allclose(found["first"][i], p[..., 0].mean(-1), atol=1e-4)
        # one row of that head has weight 0 elsewhere
        usual = np.arange(12) != np.array([2] + 5 * [-1])[:, None]
        cost = -np.log(p[..., 1:].sum(-1)).mean(-1)
        found_cost = found["cost_of_first"][i][usual]
        np.testing.assert_allclose(found_cost, cost[usual], rtol=1e-3, atol=1e-4)
        of_others = found["relative_entropy_of_others"][i][usual]
        np.testing.assert_allclose(of_others, entropy[usual], atol=1e-3)
    kept, instead = np.ones((6, 12), bool), np.random.default_rng(0).normal(size=(6, 12, 32))
    same = minilm.ablated(encoder, jnp.asarray(kept), jnp.asarray(instead, jnp.float32))
    assert eqx.tree_equal(same, encoder)
    # its projection, beside one whose head 5 says the same at every token
    kept[3, 5] = False
    changed = minilm.ablated(encoder, jnp.asarray(kept), jnp.asarray(instead, jnp.float32))
    linear, other = (x.layers[3].attention.output_proj for x in (encoder, changed))
    said = np.random.default_rng(1).normal(size=(12, 32))
    given = jnp.asarray(said.ravel(), jnp.float32)
    said[5] = instead[3, 5]
    wanted = linear(jnp.asarray(said.ravel(), jnp.float32))
    np.testing.assert_allclose(other(given), wanted, atol=1e-4)


def number(x, digits=2):
    """As the page writes it."""
    return f"{x:.{digits}f}".replace("-", "−")


def test_what_the_page_says():
    """A sentence that the numbers do not bear out."""
    page = " ".join((ROOT / "docs" / "heads.md").read_text(encoding="utf-8").split())
    mean, error = ({n: np.asarray(x[i]) for n, x in REPORT["heads"].items()} for i in (0, 1))
    random, text = REPORT["random"], REPORT["text"]
    settings, pairs = REPORT["settings"], REPORT["rank_correlations"]
    encoder = {name: np.asarray(x[0]) for name, x in REPORT["minilm"]["heads"].items()}
    others = REPORT["minilm"]["rank_correlations"]
    cost, repeats = mean["mean on text"], mean["mean on repeats"]
    unsure = error["mean on text"].ravel()[cost.argmin()]
    at = tuple(random["most_inductive"])
    away = np.arange(16).reshape(4, 4) != 4 * at[0] + at[1]
    texts = "repeated", "shuffled", "others"
    entropy, energy = (
        {x: random["figures"][x][name][0][at[0]][at[1]] for x in texts}
        for name in ("entropy", "energy")
    )
    heat = random["figures"]["others"]["heat_capacity"][0][at[0]][at[1]]
    left = np.asarray(random["matched_without"][0])
    apart = {
        (x, y): np.asarray(random["separation"][x][y][0])
        for x in texts[1:]
        for y in ("relative_entropy", "energy", "heat_capacity")
    }
    where = {
        x: np.asarray(text[f"by_position, {x}"]["relative_entropy"][0]) for x in ("mean", "zero")
    }
    narrow = mean["relative_entropy"]
    sink = np.unravel_index(encoder["cost_of_first"].argmax(), (6, 12))
    least, second = (np.unravel_index(i, (6, 12)) for i in encoder["mean"].ravel().argsort()[:2])
    sixths = [number(x[1]) for x in random["heat_capacity_by_weight"]]
    quoted = [
        f"{settings['texts']} pieces of {settings['length']} bytes",
        f"{settings['random']} random texts of {settings['half']} different printable bytes",
        f"the {sum(map(len, pairs.values()))} pairs",
        f"with {number(mean['previous'][1, 2])} of its weight",
        f"{number(mean['induction'][at])} of its weight is on the match",
        f"The second halves cost {number(random['losses_of_halves'][1][0])} nats per byte, "
        f"the first {number(random['losses_of_halves'][0][0])}",
        f"without the head {number(repeats[at])} more",
        f"an induction head builds, {number(repeats[1, 2])} more. Without the latter the match gets "
        f"{number(left[1, 2])} of the induction head's weight, without any other head at least "
        f"{number(np.sort(left.ravel())[1])}",
        f"The least cost on text is {number(cost.min(), 3)} ± {number(unsure, 3)}",
        f"at most {number(mean['first'].max(), 4)} of a head's weight",
        f"get {number(text['uniform_by_span'][-1], 4)} to {number(text['uniform_by_span'][0], 4)}",
        f"first key, {number(np.max(text['cost_of_first'][0]), 3)} nats in that head",
        f"$S / \\log n = {number(narrow[at])}$",
        f"go together, by {number(pairs['relative_entropy']['induction']['rho'])}",
        f"its entropy is {number(entropy['repeated'])} nats, shuffled {number(entropy['shuffled'])}, "
        f"with other bytes {number(entropy['others'])}",
        "with probability "
        + " and ".join(f"{number(1 - apart[x, 'relative_entropy'][at])} ({x})" for x in texts[1:]),
        f"free energy is {number(energy['repeated'] - energy['shuffled'])} nats higher than "
        f"shuffled, and higher with probability {number(apart['shuffled', 'energy'][at])}",
        "match with probability "
        + " and ".join(f"{number(apart[x, 'heat_capacity'][at])} ({x})" for x in texts[1:]),
        f"it is {', '.join(sixths[:-1])} and {sixths[-1]} nats²",
        f"nothing to find, {number(heat)} with other bytes",
        f"by {number(pairs['relative_entropy']['mean on text']['rho'])} with "
        f"p = {number(pairs['relative_entropy']['mean on text']['p'])}: 16 heads",
        f"other one, {number(others['relative_entropy']['mean']['rho'])} with "
        f"p = {number(others['relative_entropy']['mean']['p'], 4)}, and within layers "
        f"{number(others['relative_entropy']['mean']['within_layers'])} with "
        f"p = {number(others['relative_entropy']['mean']['p_within_layers'])}",
        f"entropy of {number(narrow[at])} belongs to a head that costs {number(cost[at])} nats, one "
        f"of {number(narrow[1, 0])} to a head that costs {number(cost[1, 0])}",
        f"by {number(where['mean'][3].max())} to {number(where['mean'][3].min())}, in the first "
        f"by {number(where['mean'][0].max())} to {number(where['mean'][0].min())}; in between "
        f"from {number(where['mean'][1:3].max())} to {number(where['mean'][1:3].min())}",
        f"it is {number(where['zero'][3].max())} to {number(where['zero'][3].min())} in the last",
        f"by {number(pairs['varying_norm']['mean on text']['within_layers'])} on the byte model",
        f"by {number(others['varying_norm']['mean']['within_layers'])} on MiniLM",
        f"is {number(encoder['cost_of_first'].mean())} nats in the mean of all heads and "
        f"{number(encoder['cost_of_first'][sink])} at most, in head {sink[1]} of layer {sink[0]}, "
        f"which gives it {number(encoder['first'][sink])}",
        f"byte model it is {number(np.max(text['cost_of_first'][0]), 3)} at most",
        f"by {number(others['relative_entropy']['first']['rho'])}, and the higher the heat "
        f"capacity, by {number(others['heat_capacity']['first']['rho'])}",
        f"left, {number(others['relative_entropy_of_others']['first']['rho'])} with "
        f"p = {number(others['relative_entropy_of_others']['first']['p'])}",
        f"by {number(others['first']['mean']['rho'])}, within layers by "
        f"{number(others['first']['mean']['within_layers'])}",
        f"are head {least[1]} of layer {least[0]}, one of the widest with "
        f"$S / \\log n = {number(encoder['relative_entropy'][least])}$, and head {second[1]} of "
        f"layer {second[0]}, the narrowest but one with {number(encoder['relative_entropy'][second])}",
    ]
    assert not [sentence for sentence in quoted if sentence not in page]

    assert at == (3, 0) and REPORT["dead"] == {"zero": [], "mean": []}
    assert mean["induction"][away].max() < 0.015 and left.argmin() == 4 * 1 + 2
    assert (cost / error["mean on text"]).min() > 6 and mean["heaviest"].max() < 0.015
    assert mean["first"].argmax() == np.argmax(text["cost_of_first"][0])
    assert (narrow > narrow[at]).sum() == 3  # the fourth widest
    for x in texts[1:]:
        assert np.abs(apart[x, "relative_entropy"] - 0.5)[away].max() < 0.02
    assert np.max(text["by_position, mean"]["relative_entropy"][1]) < 0.035
    assert max(abs(x["rho"]) for x in pairs["energy"].values()) < 0.215
    helped = repeats + 2 * error["mean on repeats"] < 0
    assert helped.sum() == 7 and 0.015 < cost[helped].min() < cost[helped].max() < 0.075
    assert encoder["varying_norm"].argmin() == 12 * least[0] + least[1]
    assert (encoder["relative_entropy"] < encoder["relative_entropy"][second]).sum() == 1
    assert (encoder["relative_entropy"] > encoder["relative_entropy"][least]).sum() < 8
