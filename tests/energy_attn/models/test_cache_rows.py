"""`DecoderCache.reset` and `replace`: a batch whose rows end and begin one by one. The judge is NumPy's Llama."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.compare import close
from tests.support.llama import CONFIG, build, numpy_llama
from tests.support.meshes import mesh_of, parallel_of
from tests.support.selection import few


@eqx.filter_jit(donate="all-except-first")
def step(model, cache, tokens, lengths):
    out = model(tokens, cache=cache, lengths=lengths)
    return out.cache, out.logits


@pytest.mark.parametrize("kind", few(["8", "2x4 explicit"], "8"))
def test_rows_that_begin_again(kind):
    """A layer whose row is left as it was: a prompt that sees tokens of the one before, or rotary positions of it."""
    model, rng = build(), np.random.default_rng(0)
    texts = [rng.integers(0, CONFIG.vocab_size, 12).astype(np.int32) for _ in range(5)]

    def check(logits, row, text):
        exact = numpy_llama(model, text[None], np.arange(len(text))[None])[0][0]
        close(logits[row, -1], exact[-1], f"row {row}")

    with jax.set_mesh(mesh_of(kind)):
        cache, other = (
            model.empty_cache(rows, 16, parallel=parallel_of(kind), block_size=1) for rows in (3, 1)
        )
        all_rows = jnp.full(3, 6, jnp.int32)
        cache, _ = step(model, cache, jnp.asarray([x[:6] for x in texts[:3]]), all_rows)
        read = model.prefill(jnp.asarray(texts[3][None, :7]), other).cache
        cache = jax.jit(type(cache).replace)(cache, jnp.asarray([1]), read)
        cache = cache.reset(jnp.asarray([False, False, True]))
        assert [x.lengths.tolist() for x in cache.layers] == 2 * [[6, 7, 0]]
        new = [texts[0][6:11], texts[3][7:12], texts[4][:5]]
        cache, logits = step(model, cache, jnp.asarray(new), jnp.full(3, 5, jnp.int32))
    for row, text in enumerate((texts[0][:11], texts[3], texts[4][:5])):
        check(logits, row, text)


def test_another_model(unchecked):
    """Rows of a cache with fewer layers, of which some would be left as they are."""
    cache = build().empty_cache(2, 8)
    with pytest.raises(TypeError, match="other: wanted a DecoderCache, got KVCache"):
        cache.replace(jnp.asarray([0]), cache.layers[0])
    fewer = type(cache)(cache.layers[:1])
    with pytest.raises(ValueError, match="other: wanted the 2 layers of the cache, got 1"):
        cache.replace(jnp.asarray([0, 1]), fewer)
    with pytest.raises(ValueError, match=r"rows: wanted rows from 0 to 1, got \[2\]"):
        cache.reset(jnp.asarray([2]))
