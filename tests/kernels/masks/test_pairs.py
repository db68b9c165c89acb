"""Masks in kernels that compare numbers of tokens: what is cut out of a mask, and any composition in tiles.

The masks of `support/masks.py`, their gradients and tangents go through these kernels in `test_local_attention.py` and
`test_tangents.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings

from energy_attn import masks
from energy_attn.kernels import AttentionState, KernelCall
from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.dispatch import _registry
from energy_attn.kernels.masks._structure import pairwise, structure_of
from energy_attn.kernels.pallas._rows import block_list
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.problems import _make, cast, cotangents, tangents
from tests.support.random_masks import JOINED, blocks, places, rules, seen, with_batch
from tests.support.reference import dense, dense_jvp, dense_vjp
from tests.support.traits import SMALL

KERNELS = [SMALL["pallas_gpu"], SMALL["pallas_tpu"]]


@pytest.mark.smoke
@given(rules, blocks, blocks)
@settings(max_examples=6)
def test_numbers_of_tokens(rule, queries, keys):
    """What is known of a query taken for what is known of a key, or a table that is read at a wrong place."""
    arrays = tuple(jax.tree.leaves(with_batch(rule)))
    pairs = pairwise(structure_of(with_batch(rule)), arrays)
    assert pairs.problem is None
    query, key = (array(np.asarray(x)[None], np.int32) for x in (queries, keys))
    features = pairs.features(arrays, query, key)
    assert (len(features.queries), len(features.keys)) == (pairs.of_queries, pairs.of_keys)
    for turned in (False, True):  # keys in front
        i, j = (1, 2) if turned else (2, 1)
        found = pairs.visible(
            jnp.expand_dims(query, i),
            jnp.expand_dims(key, j),
            [jnp.expand_dims(x, i) for x in features.queries],
            [jnp.expand_dims(x, j) for x in features.keys],
        )
        found = np.broadcast_to(found, (1, 3, 3))[0]
        np.testing.assert_array_equal(found.T if turned else found, seen(rule, queries, keys))


def test_only_comparisons_are_of_pairs():
    """A table of segments, or a length, that is read for each pair."""
    rule = masks.Causal() | (masks.Segments(np.zeros(8, np.int32)) & masks.Prefix(3))
    pairs = pairwise(*_split(rule))
    assert (pairs.of_queries, pairs.of_keys) == (2, 3)  # id, inside; id, inside, below the length
    window = pairwise(*_split(masks.Causal() & masks.Window(3, 2)))
    assert (window.of_queries, window.of_keys) == (0, 0)
    remainder = pairwise(*_split(masks.Function(lambda query, key: (query - key) % 5 == 0)))
    assert (remainder.of_queries, remainder.of_keys) == (0, 0)  # 5 is a constant of the kernel


def test_a_choice_of_booleans():
    """The other of two booleans, of which compilers of kernels select none."""
    rule = masks.Function(lambda q, k: jnp.where(q > k, (q - k) % 2 == 0, k < 5))
    pairs, tokens = pairwise(*_split(rule)), array(np.arange(8)[None], np.int32)
    assert pairs.problem is None
    of_queries, of_keys = pairs.features((), tokens, tokens)
    found = pairs.visible(
        tokens[:, :, None],
        tokens[:, None],
        [x[:, :, None] for x in of_queries],
        [x[:, None] for x in of_keys],
    )
    q, k = np.ogrid[:8, :8]
    np.testing.assert_array_equal(found[0], np.where(q > k, (q - k) % 2 == 0, k < 5))


def _split(rule):
    rule = with_batch(rule)
    return structure_of(rule), tuple(jax.tree.leaves(rule))


def of_both(query, key, table):
    return table[query % 4, key % 4]


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (masks.Function(of_both, np.ones((4, 4), bool)), "the operation concatenate of both"),
        (masks.Function(lambda q, k: jnp.sin(q - k) > 0), "got float32"),
        (
            masks.Function(
                lambda q, k, t: (t[q % 2] == k[..., None]).any(-1), np.ones((2, 3), np.int32)
            ),
            "the operation reduce_or of both",
        ),
        (
            masks.Function(
                lambda q, k: functools.reduce(jnp.logical_or, [q % i == k for i in range(2, 22)])
            ),
            "at most 16 numbers, got 20",
        ),
    ],
)
def test_declined(rule, reason):
    """A mask whose program a kernel's compiler refuses, or that it computes wrongly, in place of one that declines."""
    x = array(np.ones((1, 8, 1, 16)), np.float32)
    call = check_call(x, x, x, mask=rule)
    for kernel in KERNELS:
        with pytest.raises(NotImplementedError, match=rf"^mask: wanted .*{reason}.*blockwise"):
            kernel.check(KernelCall(call.operands, call.settings))
    for platform in ("cuda", "tpu"):
        chosen = _registry.explain(_registry.tried(), call.settings, call.operands, platform)
        assert chosen.name == "decode"  # XLA's operations


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda x: x.name)
def test_a_composition(kernel):
    """A tile that is skipped or not masked, forward, backward or along a direction; absent tokens that are seen."""
    places = [*range(8), -1, *range(8, 16), 2**31 - 1]
    check_composition(kernel, JOINED["near or same"], places, places)


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda x: x.name)
@given(rule=rules, queries=places, keys=places)
@settings(max_examples=25, phases=[Phase.generate])
def test_many_compositions(kernel, rule, queries, keys):
    """The same."""
    check_composition(kernel, rule, queries, keys)


def check_composition(kernel, rule, queries, keys):
    problem = _make("composition", B=1, T=18, S=18, N=2, K=1, H=4)
    problem = dataclasses.replace(problem, mask=seen(rule, queries, keys)[None, None])
    arrays, rounded = cast(dataclasses.replace(problem, mask=None), jnp.float32)
    positions = (array(np.asarray(x)[None], np.int32) for x in (queries, keys))
    options = dict(zip(("query_positions", "key_positions"), positions, strict=True))
    directions = {n: array(x, np.float32) for n, x in tangents(problem).items()}

    def attend(arrays):
        call = check_call(**arrays, **options, mask=rule)
        return _registry.attend((kernel,), call.settings, call.operands)

    @jax.jit
    def run(arrays, directions, dout, dlse):
        state, back = jax.vjp(attend, arrays)
        moved = jax.jvp(attend, (arrays,), (directions,))[1]
        return state._asdict() | back(AttentionState(dout, dlse))[0], moved

    given = cotangents(problem, jnp.float32)
    found, moved = run(arrays, directions, *given)
    rounded = dataclasses.replace(rounded, mask=problem.mask)
    out, lse = dense(rounded)
    wanted = {"out": out, "lse": lse} | dense_vjp(rounded, *given)
    close(found, wanted, f"{kernel.name}, {rule}", tolerance=4e-6)
    exact = dense_jvp(rounded, {n: np.asarray(x, np.float64) for n, x in directions.items()})
    close(moved, exact, f"{kernel.name}, {rule}", tolerance=4e-6)


def test_list_of_blocks():
    """A block that meets left out or visited twice; one that needs a mask among those that need none."""
    random = np.random.default_rng(0)
    meets, whole = random.random((2, 5, 7)) < 0.5, random.random((2, 5, 7)) < 0.5
    found = jax.tree.map(np.asarray, jax.jit(block_list)(meets, whole))
    for b, x in np.ndindex(2, 5):
        stop, first = found.stop[b, x], found.unmasked[b, x]
        order = found.order[b, x]
        assert sorted(order) == list(range(7))
        np.testing.assert_array_equal(np.sort(order[:stop]), np.flatnonzero(meets[b, x]))
        np.testing.assert_array_equal(np.sort(order[:first]), np.flatnonzero((meets & whole)[b, x]))
