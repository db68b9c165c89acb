"""`reproducible=True`: bits are those of the numbers, whatever XLA fuses with a call, at its usual optimisation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import scores
from tests.support.arrays import array
from tests.support.compare import close, same
from tests.support.flags import USUAL
from tests.support.selection import few_rows

BATCH, HEADS, KEY_HEADS, WIDTH = 2, 4, 2, 16
TERMS = {"plain": (), "bias": ("bias",), "sink": ("sink",), "scores": ("sink", "score")}


def moved(score, at, shift, period):
    """A score that adds one of its arrays."""
    far = jnp.tanh(0.01 * (at.query - at.key).astype(score.dtype))
    return score + shift[at.batch, at.head] + far * jnp.sin(score * period[at.batch, at.head])


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is computed: operands, each with an entry for each of the batch, cotangents and directions."""

    length: int
    terms: str = "plain"
    dtype: str = "float32"
    positions: bool = False

    def arrays(self) -> tuple[Any, Any, Any]:
        """Operands by name, cotangents of the output and of the energy, and directions."""
        rng = np.random.default_rng(self.length)
        wide = "float64" if self.dtype == "float64" else "float32"

        def drawn(*shape, dtype=self.dtype):
            return array(rng.standard_normal((BATCH, *shape)), dtype)

        heads = {"query": HEADS, "key": KEY_HEADS, "value": KEY_HEADS}
        operands: Any = {name: drawn(self.length, n, WIDTH) for name, n in heads.items()}
        more = {
            "bias": lambda: drawn(HEADS, self.length, self.length),
            "sink": lambda: drawn(HEADS, dtype=wide),
            "score": lambda: (drawn(HEADS, dtype=wide), drawn(HEADS, dtype=wide)),
        }
        operands |= {name: more[name]() for name in TERMS[self.terms]}
        cotangents = drawn(self.length, HEADS, WIDTH), drawn(self.length, HEADS, dtype=wide)
        directions = jax.tree.map(lambda x: drawn(*x.shape[1:], dtype=x.dtype), operands)
        return operands, cotangents, directions


def attend(operands, positions):
    """Attention and energies."""
    query, key, value = (operands[x] for x in ("query", "key", "value"))
    more: Any = {x: y for x, y in operands.items() if x in ("bias", "sink")}
    if "score" in operands:
        more["score"] = scores.Function(moved, *operands["score"])
    if positions is not None:
        more |= {"query_positions": positions, "key_positions": positions}
    options = {"is_causal": True, "return_energy": True, "reproducible": True}
    return ea.attention(query, key, value, **options, **more)


def gradients(operands, cotangents, directions, positions):
    """The values with the gradients."""
    found, pull = jax.vjp(lambda x: attend(x, positions), operands)
    return found, pull(cotangents)


def tangents(operands, cotangents, directions, positions):
    """The values with their tangents."""
    return jax.jvp(lambda x: attend(x, positions), (operands,), (directions,))


def check(derivatives: Callable[..., Any], problem: Problem) -> None:
    """A text alone, of operands that are products, has the bits that it has in a batch."""
    given, factor = problem.arrays(), jnp.float32(0.3)
    positions = jnp.arange(problem.length, dtype=jnp.int32)[None] if problem.positions else None

    def products(given):
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), given)

    def of_products(given, positions):
        return derivatives(*products(given), positions)

    whole = jax.jit(derivatives, compiler_options=USUAL)(*products(given), None)
    given, whole = jax.tree.map(lambda x: x[:1], (given, whole))
    same(jax.jit(of_products, compiler_options=USUAL)(given, positions), whole)


CASES = [
    (gradients, Problem(96)),
    (tangents, Problem(17, "sink")),
    (gradients, Problem(256, "sink")),
    (tangents, Problem(40, "bias", "bfloat16", True)),
    (gradients, Problem(40, "bias", "bfloat16", True)),
    (gradients, Problem(300, "scores", "float16", True)),
]


@pytest.mark.parametrize(("derivatives", "problem"), few_rows(CASES, 2))
def test_surroundings(derivatives, problem):
    """A product outside, as that of an energy's cotangent, that XLA fuses with a sum of the kernel where it can."""
    check(derivatives, problem)


@st.composite
def problems(draw):
    """A length that fills no tile, one or two, and what is added to scores."""
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16", "float64"]))
    terms = draw(st.sampled_from(sorted(TERMS)))
    return Problem(draw(st.integers(1, 300)), terms, dtype, draw(st.booleans()))


@pytest.mark.full
@hypothesis.settings(max_examples=6)
@hypothesis.given(st.sampled_from([gradients, tangents]), problems())
def test_law(derivatives, problem):
    """What `test_surroundings` would, anywhere between its cases."""
    check(derivatives, problem)


OF_ONE: Any = {"is_causal": True, "reproducible": True}


def evicted(positions):
    """Attention of a query after keys at these positions, and what it should be."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, n, 2, 8)) for n in (1, *[positions.shape[1]] * 2))
    products = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(8)
    weights = np.exp(np.where(positions[:, None, None] >= 0, products, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    last = jnp.full((1, 1), positions.max() + 1)
    given = {"query_positions": last, "key_positions": jnp.asarray(positions)}
    found = ea.attention(*map(jnp.asarray, (q, k, v)), **given, **OF_ONE)
    return found, np.einsum("bhts,bshd->bthd", weights, v)


def test_keys_in_many_leaves():
    """NaN, without a word, of keys that are far from each other; absent keys that do not make room for them."""
    few = np.array([[0, 1, 2, 3, 4, 600]], np.int32)
    with pytest.raises(ValueError, match=r"key_positions: wanted at most 2 times 256.* up to 257"):
        evicted(few)
    close(*evicted(np.pad(few, ((0, 0), (0, 251)), constant_values=-1)))


def test_positions_that_begin_again():
    """NaN, without a word, of packed documents; documents of one call that see each other."""
    q, k, v = (array(np.random.default_rng(i).standard_normal((1, 10, 2, 8))) for i in range(3))
    again = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]], jnp.int32)
    ids = jnp.array([[0] * 4 + [1] * 6], jnp.int32)
    documents: Any = {"query_segment_ids": ids, "key_segment_ids": ids}
    positions: Any = {"query_positions": again, "key_positions": again}
    with pytest.raises(ValueError, match="got 2 of 0; documents have segment ids"):
        ea.attention(q, k, v, **positions, **documents, **OF_ONE)
    found = ea.attention(q, k, v, **documents, **OF_ONE)
    close(found, np.asarray(ea.attention(q, k, v, **positions, **documents, is_causal=True)))
