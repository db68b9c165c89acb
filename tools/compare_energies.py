"""Compares the energies of docs/energies.md, and their derivatives, with dense formulas in float64.

    python tools/compare_energies.py

prints the table of `docs/energies.md` and writes `docs/benchmarks/variants.json`. Both this and the tests run the
page's own code.
"""

import argparse
import ast
import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from dense_energies import FORMULAS, LENGTH, Formula, dense

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel, make_mesh
from energy_attn.kernels import implementations

ROOT = Path(__file__).resolve().parents[1]
PAGE, FILE = ROOT / "docs" / "energies.md", ROOT / "docs" / "benchmarks" / "variants.json"
WIDTH, LAST = 16, 4  # of rows; how many queries are decoded
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
ROWS = "query", "key", "value"
Pair = tuple[Any, Any]  # a result, and the exact one


def sections() -> Iterator[tuple[str, str, list[str]]]:
    """The titles of the page's published energies, where they are linked, and the code of each."""
    page = (
        PAGE.read_text(encoding="utf-8").partition("## Published energies")[2].partition("\n## ")[0]
    )
    for part in page.split("\n### "):
        title, _, text = part.partition("\n")
        link = re.search(r"\[[^\]]+\]\((https?://[^)]+)\)", text)
        yield title, link[1] if link else "", BLOCK.findall(text)


def assigned(code: str) -> str:
    """The name that the last assignment of an energy in a block is to."""
    assignments = [x for x in ast.parse(code).body if isinstance(x, ast.Assign)]
    calls = [x for x in assignments if ast.unparse(x.value).startswith("ea.FreeEnergy(")]
    return ast.unparse(calls[-1].targets[0])


def energies() -> dict[str, ea.FreeEnergy]:
    """The page's energies by name, with parameters in float64 where that is enabled."""
    drawn = np.random.default_rng(0).standard_normal((3, 2, LENGTH, 4, WIDTH))
    names: dict[str, Any] = {"eqx": eqx, "jax": jax, "jnp": jnp, "np": np, "ea": ea}
    names |= dict(zip(ROWS, map(jnp.asarray, drawn), strict=True))
    page_energies = {}
    for title, _, blocks in sections():
        for code in blocks:
            exec(compile(code, str(PAGE), "exec"), names)
            if title:
                page_energies[assigned(code)] = names[assigned(code)]
    dtype = jnp.zeros(()).dtype
    return {
        name: jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, energy)
        for name, energy in page_energies.items()
    }


def rows_of(formula: Formula) -> dict[str, Any]:
    """Queries, keys and values for a formula; they are of length one where it is made for such."""
    drawn = np.random.default_rng(7).standard_normal((3, 2, LENGTH, 4, WIDTH))
    drawn[0] *= 3  # so that a bound on the scores is felt
    if formula.unit:
        drawn[:2] /= np.linalg.norm(drawn[:2], axis=-1, keepdims=True)
    return dict(zip(ROWS, map(jnp.asarray, drawn), strict=True))


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Float64, and types that are joined as NumPy joins them."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def both(
    energy: ea.FreeEnergy, formula: Formula
) -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]:
    """An input, and the functions from it to `(out, energy)` by the library and by the formula."""
    learnt, static = eqx.partition(energy, eqx.is_inexact_array)

    def ours(x: Any) -> Any:
        combined = eqx.combine(x["energy"], static)
        return combined.attention(*(x[name] for name in ROWS), return_energy=True)

    def exact(x: Any) -> Any:
        return dense(formula, x["query"], x["key"], x["value"], jax.tree.leaves(x["energy"]))

    return rows_of(formula) | {"energy": learnt}, ours, exact


def number(state: Any) -> Any:
    """A number that depends on all of a state, and the state."""
    return jnp.sin(state[0]).sum() + jnp.cos(state[1]).sum(), state


def derivatives(f: Callable[[Any], Any], x: Any) -> dict[str, Any]:
    """A state, its gradients, its derivative in a direction, and a product of a Hessian: one program."""
    u = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size) + 1.0).reshape(a.shape), x)

    def gradient(x: Any) -> Any:
        return jax.value_and_grad(lambda x: number(f(x)), has_aux=True)(x)

    ((_, state), slope), ((_, tangent), second) = jax.jit(lambda: jax.jvp(gradient, (x,), (u,)))()
    return {"values": state, "gradients": slope, "jvp": tangent, "second order": second}


def on_one_device(energy: ea.FreeEnergy, formula: Formula) -> dict[str, Pair]:
    """The derivatives of an energy, and the exact ones."""
    x, ours, exact = both(energy, formula)
    results, expected = derivatives(ours, x), derivatives(exact, x)
    return {name: (results[name], expected[name]) for name in results}


def on_a_mesh(energy: ea.FreeEnergy, formula: Formula) -> Pair:
    """Values and gradients with the keys over eight devices."""
    sharded = dataclasses.replace(energy, parallel=SequenceParallel("device"))
    x, ours, exact = both(sharded, formula)

    def run(f: Callable[[Any], Any]) -> Any:
        return jax.jit(jax.value_and_grad(lambda x: number(f(x)), has_aux=True))(x)

    expected = run(exact)
    with jax.set_mesh(make_mesh((8,), ("device",))):
        return run(ours), expected


def in_a_cache(energy: ea.FreeEnergy, formula: Formula) -> Pair:
    """The last tokens, decoded from a cache over eight devices."""
    x, _, exact = both(energy, formula)
    expected = jax.tree.map(lambda a: a[:, -LAST:], jax.jit(exact)(x))
    batch, length, heads, width = x["key"].shape
    with jax.set_mesh(make_mesh((8,), ("device",))):
        cache = KVCache.empty(
            *(batch, length + 8, heads, width),
            dtype=x["key"].dtype,
            parallel=SequenceParallel("device"),
        ).append(x["key"], x["value"])

        @jax.jit
        def decode(cache: KVCache, query: Any) -> Any:
            return cache.at(query, energy=energy).attention(return_energy=True)

        return decode(cache, x["query"][:, -LAST:]), expected


def kernels_of(energy: ea.FreeEnergy) -> list[str]:
    """The implementations that take a call of 128 queries, or of one, and 128 keys in bfloat16."""

    def longer(x: Any) -> Any:
        if not eqx.is_array(x):
            return x
        x = x.astype(jnp.float32) if eqx.is_inexact_array(x) else x
        for axis in range(x.ndim):  # tables by position
            x = jnp.concatenate([x, x], axis) if x.shape[axis] == LENGTH else x
        return x

    def takes(name: str, queries: int) -> bool:
        query, key = (jax.ShapeDtypeStruct((2, n, 4, 64), jnp.bfloat16) for n in (queries, 128))
        chosen = dataclasses.replace(jax.tree.map(longer, energy), implementation=name)
        try:
            jax.eval_shape(chosen.attention, query, key, key)
        except NotImplementedError:
            return False
        return True

    return [name for name in implementations() if takes(name, 128) or takes(name, 1)]


def largest_error(pair: Pair) -> float:
    """Largest error over all arrays, relative to the largest entry of each."""
    results, expected = map(jax.tree.leaves, pair)
    worst = 0.0
    for a, b in zip(results, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape or not np.isfinite(a).all():
            return float("inf")
        worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)))
    return worst


def judged(run: Callable[[], Any]) -> Any:
    """`yes` or `wrong`, of each pair; or the first words of the error."""
    try:
        pairs = run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    named = pairs if isinstance(pairs, dict) else {"": pairs}
    verdicts = {
        name: "yes" if largest_error(pair) < 1e-10 else "wrong" for name, pair in named.items()
    }
    return verdicts if isinstance(pairs, dict) else verdicts[""]


def measured() -> Iterator[tuple[str, dict[str, Any]]]:
    """The measured errors of each energy."""
    with exact():
        for name, energy in energies().items():
            arguments = energy, FORMULAS[name]
            of_one = judged(lambda arguments=arguments: on_one_device(*arguments))
            if isinstance(of_one, str):
                of_one = dict.fromkeys(("values", "gradients", "jvp", "second order"), of_one)
            yield (
                name,
                of_one
                | {"mesh": judged(lambda arguments=arguments: on_a_mesh(*arguments))}
                | {"cache": judged(lambda arguments=arguments: in_a_cache(*arguments))}
                | {"kernels": kernels_of(energy)},
            )


def table(results: dict[str, dict[str, Any]]) -> str:
    """A table in Markdown; an error is shown as `raises`."""
    titles = {assigned(code): title for title, _, blocks in sections() for code in blocks if title}
    columns = list(next(iter(results.values())))
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    for name, row in results.items():
        anchor = re.sub(r"[^\w\s-]", "", titles[name]).lower().replace(" ", "-")
        cells = (", ".join(f"`{k}`" for k in x) if isinstance(x, list) else x for x in row.values())
        lines.append(
            [f"[{titles[name]}](#{anchor})", *("raises" if ": " in x else x for x in cells)]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Runs, prints and writes; returns 0."""
    flags = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = flags  # read when JAX first computes
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=FILE, help="the file of results")
    out = parser.parse_args().out
    results = {}
    for name, row in measured():
        results[name] = row
        print(name, *row.values(), flush=True)
    out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
