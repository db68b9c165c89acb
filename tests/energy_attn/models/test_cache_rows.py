"""`DecoderCache.reset`, `replace` and `fork`: rows that end, begin and share a prompt. The judge is NumPy's Llama."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.prefix_tree import PrefixTree
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


@pytest.mark.parametrize("kind", few([None, "8", "2x4 explicit"], None))
def test_continuations_that_share_a_prompt(kind):
    """Steps, and a chunk longer than there are devices, over the prompt of another row, or at wrong positions."""
    model, rng, count = build(), np.random.default_rng(0), 2
    prompts = [rng.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in (7, 4)]
    more = rng.integers(0, CONFIG.vocab_size, (4, 10)).astype(np.int32)
    texts = [np.append(prompts[row // count], more[row]) for row in range(4)]
    attend = functools.partial(ea.attention, implementation="blockwise")

    @eqx.filter_jit
    def run(model, cache, more):
        first = model(more[:, :1], cache=cache)
        second = model(more[:, 1:2], cache=first.cache, attend=attend, return_energies=True)
        rest = model.prefill(more[:, 2:], second.cache, chunk_size=9)
        return second.logits, second.energies, rest.logits

    with jax.set_mesh(mesh_of(kind or "8")):
        cache = model.empty_cache(2, 8, parallel=kind and parallel_of(kind), block_size=1)
        padded = np.stack([np.append(x, np.zeros(7 - len(x), np.int32)) for x in prompts])
        cache = model.prefill(jnp.asarray(padded), cache, lengths=jnp.asarray([7, 4])).cache
        cache = cache.fork(count, capacity=16)
        assert cache.capacity == 16 and cache.lengths.tolist() == [7, 7, 4, 4]
        second, energies, last = jax.device_get(run(model, cache, jnp.asarray(more)))
    for row, text in enumerate(texts):
        logits, exact = numpy_llama(model, text[None], np.arange(len(text))[None])
        n = len(text) - 9
        close(second[row, 0], logits[0, n], "the second token")
        close(energies[:, row, 0], exact[:, 0, n], "its energies")
        close(last[row, 0], logits[0, -1], "the last token")


def test_what_a_fork_refuses(unchecked):
    """Another function of attention, a recording or a tree that goes by what the rows share, without a word."""
    model = build()
    cache = model.empty_cache(1, 8).fork(2, capacity=8)
    token = jnp.zeros((2, 1), jnp.int32)

    def attend(*arguments, **options):
        return ea.attention(*arguments, **options)

    with pytest.raises(ValueError, match="attend: wanted attention, or a functools.partial of it"):
        model(token, cache=cache, attend=attend)
    with pytest.raises(NotImplementedError, match="no fork where energies are recorded"):
        ea.record(lambda: model(token, cache=cache).logits)()
    with pytest.raises(TypeError, match="cache: wanted one that is no fork for read_tree"):
        model.read_tree(PrefixTree.from_beam(jnp.zeros((2, 1, 2), jnp.int32)), cache)
    with pytest.raises(TypeError, match="cache: wanted one that is no fork for replace"):
        cache.replace(jnp.asarray([0]), model.empty_cache(1, 8))
    with pytest.raises(TypeError, match="cache: wanted one that is no fork for fork"):
        cache.fork(2, capacity=8)
    with pytest.raises(
        ValueError, match=r"cache.layers\[0\].own.key: wanted shape \(3, slots, 2, 8"
    ):
        model(jnp.zeros((3, 1), jnp.int32), cache=cache)


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
