"""The published energies of docs/energies.md: the page's own, and formulas over the whole matrix of scores.

A formula is written without the library, and is the same for `x = jax.numpy` and `x = torch`. Scores `s` are
`[B, N, T, S]`, or what broadcasts to that; so are `b`, `h`, `i`, `j`: the places of the batch, the head, the query and
the key. `p` are the parameters.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import energy_attn as ea

PAGE = Path(__file__).resolve().parents[2] / "docs" / "energies.md"
HEADS, WIDTH, SIDE = 4, 16, 8
LENGTH = SIDE**2
Score = Callable[..., Any]


def _real(s: Any, x: Any) -> Any:
    return x + 0 * s


def _steps(i: Any, j: Any) -> tuple[Any, Any]:
    return j // SIDE - i // SIDE, j % SIDE - i % SIDE


def _t5() -> np.ndarray:
    """The buckets of distances from -63 to 63: 16 for each direction, 8 of them logarithmic, up to 128."""
    buckets = []
    for distance in range(1 - LENGTH, LENGTH):
        far, bucket = abs(distance), abs(distance)
        if far >= 8:
            bucket = min(8 + int(math.log(far / 8) / math.log(128 / 8) * 8 + 1e-9), 15)
        buckets.append(bucket + (16 if distance > 0 else 0))
    return np.array(buckets)


def _paths() -> np.ndarray:
    return np.array(
        [[min((a - b) % LENGTH, (b - a) % LENGTH) for b in range(LENGTH)] for a in range(LENGTH)]
    )


def _fire(x: Any, s: Any, b: Any, h: Any, i: Any, j: Any, p: Any) -> Any:
    c, least, units = p
    share = x.log1p(c * _real(s, abs(i - j)))
    share = share / x.log1p(c * x.where(i > least, _real(s, i), least))
    inner = [x.where((z := u[0] * share + u[1]) > 0, z, 0 * z) for u in units]
    return s + sum(u[2:][h] * z for u, z in zip(units, inner, strict=True))


def _swin_v2(x: Any, s: Any, b: Any, h: Any, i: Any, j: Any, p: Any) -> Any:
    beta, units = p
    down, right = (x.sign(d) * x.log(1 + _real(s, abs(d))) for d in _steps(i, j))
    inner = [x.where((z := u[0] * down + u[1] * right + u[2]) > 0, z, 0 * z) for u in units]
    return beta[h] * s + sum(u[3:][h] * z for u, z in zip(units, inner, strict=True))


def _sandwich(x: Any, s: Any, b: Any, h: Any, i: Any, j: Any, p: Any) -> Any:
    i, j = _real(s, i), _real(s, j)
    total = 0.0
    for k in range(8):
        wave = 10000.0 ** (-k / 8)
        total = total + x.sin(i * wave) * x.sin(j * wave) + x.cos(i * wave) * x.cos(j * wave)
    return s + total / ((h + 1) * 8 / HEADS)


def _alibi(x: Any, s: Any, b: Any, h: Any, i: Any, j: Any, p: Any) -> Any:
    return s - p[0][h] * abs(i - j)


def _table(index: Callable[[Any, Any, Any], tuple[Any, ...]]) -> Score:
    return lambda x, s, b, h, i, j, p: s + p[0][(h, *index(x, i, j))]


def _plain(x: Any, s: Any, b: Any, h: Any, i: Any, j: Any, p: Any) -> Any:
    return s


class Formula(NamedTuple):
    """`score(x, s, b, h, i, j, p)`, `seen(x, b, i, j)`, and the factor of products, of rows of width 16."""

    score: Score = _plain
    seen: Callable[[Any, Any, Any, Any], Any] | None = None
    scale: float = 0.25
    sink: bool = False
    unit: bool = False


def _causal(x: Any, b: Any, i: Any, j: Any) -> Any:
    return j <= i


_BUCKETS, _HOPS = _t5(), _paths()
_BLOCKS = abs(np.subtract.outer(np.arange(8), np.arange(8))) < 2
_BLOCKS[[0, 7]] = _BLOCKS[:, [0, 7]] = True
_BLOCKS |= np.random.default_rng(1).random((8, 8)) < 0.2
_DIVISORS, _PREFIXES = np.array([13, 29]), np.array([20, 33])


def _documents(x: Any, b: Any, i: Any, j: Any) -> Any:
    divisor = x.asarray(_DIVISORS)[b]
    return (j <= i) & (i // divisor == j // divisor)


FORMULAS: dict[str, Formula] = {
    "gemma2": Formula(lambda x, s, b, h, i, j, p: 50 * x.tanh(s / 50), _causal, scale=1 / 16),
    "qk_norm": Formula(lambda x, s, b, h, i, j, p: p[0] * s, scale=1.0, unit=True),
    "hopfield": Formula(lambda x, s, b, h, i, j, p: p[0][h] * s, scale=1.0),
    "ssmax": Formula(lambda x, s, b, h, i, j, p: p[0][h] * x.log(1 + _real(s, i)) * s, _causal),
    "alibi": Formula(_alibi, _causal),
    "t5": Formula(_table(lambda x, i, j: (x.asarray(_BUCKETS)[j - i + LENGTH - 1],)), scale=1.0),
    "clipped": Formula(_table(lambda x, i, j: ((j - i).clip(-8, 8) + 8,))),
    "kerple_log": Formula(
        lambda x, s, b, h, i, j, p: s - p[0][h] * x.log(1 + p[1][h] * _real(s, abs(i - j))),
        _causal,
    ),
    "kerple_power": Formula(
        lambda x, s, b, h, i, j, p: (
            s
            - p[0][h]
            * x.where(i == j, 0 * s, x.exp(p[1][h] * x.log(_real(s, abs(i - j) + (i == j)))))
        ),
        _causal,
    ),
    "fire": Formula(_fire, _causal),
    "sandwich": Formula(_sandwich, _causal),
    "gaussian": Formula(
        lambda x, s, b, h, i, j, p: s - abs(p[0][h] * _real(s, (i - j) ** 2) + p[1][h])
    ),
    "swin": Formula(_table(lambda x, i, j: tuple(d + SIDE - 1 for d in _steps(i, j)))),
    "swin_v2": Formula(_swin_v2, scale=1.0, unit=True),
    "graphormer": Formula(_table(lambda x, i, j: (x.asarray(_HOPS)[i, j],))),
    "forgetting": Formula(lambda x, s, b, h, i, j, p: s + p[0][b, i, h] - p[0][b, j, h], _causal),
    "sliding": Formula(seen=lambda x, b, i, j: (j <= i) & (i - j < 16)),
    "prefix_lm": Formula(seen=lambda x, b, i, j: (j <= i) | (j < x.asarray(_PREFIXES)[b])),
    "documents": Formula(seen=_documents),
    "longformer": Formula(seen=lambda x, b, i, j: (abs(i - j) <= 6) | (i < 3) | (j < 3)),
    "sparse": Formula(seen=lambda x, b, i, j: (j <= i) & ((i - j < 8) | ((i - j) % 8 == 0))),
    "big_bird": Formula(seen=lambda x, b, i, j: x.asarray(_BLOCKS)[i // 8, j // 8]),
    "block_diffusion": Formula(seen=lambda x, b, i, j: j // 8 <= i // 8),
    "streaming": Formula(seen=lambda x, b, i, j: (j <= i) & ((i - j < 12) | (j < 4))),
    "softmax1": Formula(sink=True),
    "gpt_oss": Formula(seen=lambda x, b, i, j: (j <= i) & (i - j < 32), sink=True),
}


def dense(formula: Formula, query: Any, key: Any, value: Any, parameters: Any) -> tuple[Any, Any]:
    """`(out, energy)` of JAX arrays, with every array of the size of the scores written out."""
    products = formula.scale * jnp.einsum("btnh,bsnh->bnts", query, key)
    (*parameters, sink) = parameters if formula.sink else (*parameters, None)
    places = (
        jnp.arange(n).reshape([-1 if a == x else 1 for a in range(4)])
        for x, n in enumerate(products.shape)
    )
    b, h, i, j = places
    s = formula.score(jnp, products, b, h, i, j, parameters)
    if formula.seen is not None:
        s = jnp.where(formula.seen(jnp, b, i, j), s, -jnp.inf)
    top = s.max(-1, keepdims=True)  # every row sees a key
    if sink is not None:
        top = jnp.maximum(top, sink[:, None, None])
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(s - top)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink[:, None, None] - top)
    out = jnp.einsum("bnts,bsnh->btnh", weights / total, value)
    return out, (top + jnp.log(total))[..., 0].transpose(0, 2, 1)


def page_energies() -> dict[str, tuple[str, str, ea.FreeEnergy]]:
    """The energies of the page by name, each with its block of code and its link, as the page's own code makes them."""
    drawn = jax.random.normal(jax.random.key(0), (3, 2, LENGTH, HEADS, WIDTH))
    names: dict[str, Any] = {"eqx": eqx, "jax": jax, "jnp": jnp, "np": np, "ea": ea}
    names |= dict(zip(("query", "key", "value"), drawn, strict=True))
    page = PAGE.read_text(encoding="utf-8").partition("## Published energies")[2]
    found = {}
    for section in page.partition("\n## ")[0].split("\n### "):
        link = re.search(r"\[[^\]]+\]\((https?://[^)]+)\)", section)
        for code in re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            exec(compile(code, str(PAGE), "exec"), names)
            if section.startswith("\n"):  # names that all share
                continue
            (*_, name) = re.findall(r"^(\w+) = ea.FreeEnergy\(", code, re.MULTILINE)
            energy = jax.tree.map(
                lambda x: x.astype(float) if eqx.is_inexact_array(x) else x, names[name]
            )
            found[name] = code, link[1] if link else "", energy
    return found
