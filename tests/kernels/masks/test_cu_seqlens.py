"""Rows of packed sequences by FlashAttention's offsets, against each sequence by itself, by definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel
from energy_attn.masks import Segments
from tests.support.compare import close
from tests.support.meshes import mesh_of

OFFSETS = np.asarray([0, 3, 3, 8, 13], np.int32)  # one sequence is empty
KEYS = np.asarray(
    [0, 5, 7, 9, 15], np.int32
)  # more keys than queries, keys without queries, and fewer


def arrays(keys=16):
    rng = np.random.default_rng(0)
    drawn = (rng.standard_normal((n, h, 4)) for n, h in ((16, 4), (keys, 2), (keys, 2)))
    return tuple(map(jnp.asarray, drawn))


def by_sequence(query, key, value, of_keys, is_causal):
    """Each sequence's attention by definition; zeros for other queries."""
    key, value = (jnp.repeat(x, 2, 1) for x in (key, value))
    out = jnp.zeros((16, 4, 4))
    pairs = zip(itertools.pairwise(OFFSETS), itertools.pairwise(of_keys), strict=True)
    for (a, b), (c, d) in pairs:
        scores = jnp.einsum("tnh,snh->nts", query[a:b], key[c:d]) / 2
        last = np.arange(b - a)[:, None] + (d - c) - (b - a)
        seen = (np.arange(d - c) <= last) | (not is_causal)
        terms = jnp.where(seen, jnp.exp(scores), 0.0)
        weights = terms / jnp.where(seen.any(-1)[:, None], terms.sum(-1, keepdims=True), 1.0)
        out = out.at[a:b].set(jnp.einsum("nts,snh->tnh", weights, value[c:d]))
    return out


def derivatives(attend, qkv):
    along = jax.tree.map(lambda x: jnp.cos(x[::-1]), qkv)
    value, tangent = jax.jvp(attend, qkv, along)
    gradient = jax.grad(lambda qkv: (jnp.sin(attend(*qkv)) * qkv[0]).sum())(qkv)
    return value, tangent, gradient


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("of_keys", [None, KEYS], ids=["equal", "other"])
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_packed_sequences(is_causal, of_keys, implementation):
    """A query that sees another sequence or the padding, or keys aligned at the first query of a sequence."""
    qkv = arrays()

    @jax.jit  # offsets are traced
    def found(offsets, of_keys, qkv):
        options = {} if of_keys is None else {"cu_seqlens_k": of_keys, "key_length": 16}
        mask = Segments.from_cu_seqlens(offsets, 16, is_causal=is_causal, **options)
        options = {"mask": mask, "implementation": implementation}
        return derivatives(lambda *x: ea.attention(*x, **options), qkv)

    ends = OFFSETS if of_keys is None else of_keys
    wanted = derivatives(lambda *x: by_sequence(*x, ends, is_causal), qkv)
    close(found(OFFSETS, of_keys, qkv), wanted, tolerance=1e-12)


@pytest.mark.parametrize("traced", [False, True])
def test_packed_sequences_over_a_mesh(traced):
    """Sequences that a shard cuts, by offsets that are known, where few keys are sent, and by traced ones."""
    qkv = arrays()

    def found(offsets, qkv):
        def attend(*qkv):
            mask = Segments.from_cu_seqlens(offsets, 16, is_causal=True)
            options = {"mask": mask, "parallel": SequenceParallel("device")}
            return ea.attention(*(x[None] for x in qkv), **options)[0]

        return derivatives(attend, qkv)

    with jax.set_mesh(mesh_of("8")):
        if traced:
            result = jax.jit(found)(OFFSETS, qkv)
        else:
            result = jax.jit(lambda qkv: found(OFFSETS, qkv))(qkv)
    close(result, derivatives(lambda *x: by_sequence(*x, OFFSETS, True), qkv), tolerance=1e-12)


def test_padding_is_not_read():
    """A NaN of the padding in the output, a gradient or a tangent."""
    qkv = tuple(x.at[13:].set(jnp.nan) for x in arrays())
    mask = Segments.from_cu_seqlens(OFFSETS, 16)
    out, pull_back = jax.vjp(lambda *x: ea.attention(*x, mask=mask), *qkv)
    assert np.isfinite(out).all() and not np.asarray(out[13:]).any()
    assert all(np.isfinite(x).all() for x in pull_back(jnp.ones_like(out)))


@pytest.mark.parametrize(
    ("offsets", "options", "message"),
    [
        (np.asarray([0, 3, 2], np.int32), {}, "cu_seqlens: wanted offsets .* do not decrease, got"),
        (
            np.asarray([1, 3], np.int32),
            {},
            "cu_seqlens: wanted offsets from 0 to at most length, 8",
        ),
        (
            np.asarray([0, 9], np.int32),
            {},
            "cu_seqlens: wanted offsets from 0 to at most length, 8",
        ),
        (np.asarray([0], np.int32), {}, r"cu_seqlens: wanted shape \(n \+ 1,\)"),
        (
            np.asarray([0, 9], np.int32),
            {"cu_seqlens_k": np.asarray([0, 3, 9], np.int32), "key_length": 9},
            "cu_seqlens: wanted offsets",
        ),
        (
            np.asarray([0, 8], np.int32),
            {"cu_seqlens_k": np.asarray([0, 3, 9], np.int32), "key_length": 9},
            r"cu_seqlens_k: wanted as many as cu_seqlens, \(2,\), got int32\[3\]",
        ),
    ],
)
def test_what_is_refused(offsets, options, message, unchecked):
    """Offsets of other sequences, or lengths in their place."""
    with pytest.raises(ValueError, match=message):
        Segments.from_cu_seqlens(offsets, 8, **options)
