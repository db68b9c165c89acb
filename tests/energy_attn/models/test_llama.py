"""The Llama decoder against its definition in NumPy, and its readings (alone, cached, in chunks) against each other."""

import dataclasses
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.models import Llama, Rope
from tests.support.compare import close
from tests.support.complaints import refused
from tests.support.llama import CONFIG, build, numpy_llama
from tests.support.selection import few

VARIANTS = {
    "grouped": CONFIG,
    "multi-query": dataclasses.replace(CONFIG, num_key_value_heads=1),
    "tied": dataclasses.replace(CONFIG, tie_word_embeddings=True),
    "wide heads, biases, scaled rope": dataclasses.replace(
        CONFIG, head_dim=10, attention_bias=True, mlp_bias=True, rope_scaling=Rope.linear(3.0)
    ),
    "one layer": dataclasses.replace(CONFIG, num_hidden_layers=1),
    "large eps": dataclasses.replace(CONFIG, rms_norm_eps=0.3),
}


def random_tokens(batch, time, seed=2):
    drawn = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (batch, time))
    return jnp.asarray(drawn, jnp.int32)


@pytest.mark.smoke
@pytest.mark.parametrize("name", few(list(VARIANTS), "tied", "wide heads, biases, scaled rope"))
def test_equals_the_definition(name):
    model, tokens = build(VARIANTS[name]), random_tokens(2, 7)
    got = eqx.filter_jit(model)(tokens, return_energies=True)
    logits, energies = numpy_llama(model, tokens)
    close((got.logits, got.energies), (logits, energies))
    assert got.cache is None


def test_positions_are_explicit():
    """Gaps, left padding (negative: not there), and another row with positions of its own."""
    model, tokens = build(), random_tokens(2, 6)
    positions = np.array([[-1, -1, 0, 1, 9, 10], [3, 4, 5, 40, 41, 42]], np.int32)
    got = eqx.filter_jit(model)(tokens, jnp.asarray(positions), return_energies=True)
    logits, energies = numpy_llama(model, tokens, positions)
    there = positions >= 0
    close((np.asarray(got.logits)[there], got.energies), (logits[there], energies))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64])
def test_dtypes(dtype):
    """Logits and energies are float32 at least; weights of 16 bits cost accuracy only."""
    model, tokens = build(VARIANTS["one layer"], dtype), random_tokens(2, 9)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), model)
    got = model(tokens, return_energies=True)
    cache = model.empty_cache(2, 9)
    assert cache.layers[0].key.dtype == dtype
    cached = model.prefill(tokens, cache)
    expected = jnp.float64 if dtype == jnp.float64 else jnp.float32
    assert got.logits.dtype == got.energies.dtype == cached.logits.dtype == expected
    want = wide(tokens).logits
    error = np.abs(np.asarray(got.logits, np.float64) - want).max() / np.abs(want).max()
    assert error < 100 * float(jnp.finfo(dtype).eps)


def test_attention_is_ours_to_choose():
    model, tokens = build(), random_tokens(1, 12)

    @jax.jit
    def run(model, tokens):
        reference = partial(ea.attention, implementation="reference")
        window = partial(ea.attention, local_window_size=(3, 0))
        return [model(tokens, attend=attend).logits for attend in (reference, window)]

    plain, window = jax.device_get(run(model, tokens))
    close(plain, numpy_llama(model, tokens)[0], tolerance=1e-12)
    close(window[:, :4], plain[:, :4], tolerance=1e-12)
    assert np.abs(window - plain)[:, 4:].min(-1).max() > 1e-3


PARALLEL = {
    "one device, chunks": (None, 5, 1),
    "2×4, chunks": (SequenceParallel(("node", "device")), 5, 2),
    "2×4, byte by byte": (SequenceParallel(("node", "device")), 1, None),
    "over device only": (SequenceParallel("device"), 8, 3),
}


@pytest.mark.parametrize("name", few(list(PARALLEL), "one device, chunks"))
def test_cache_equals_whole_reading(name):
    """Prefill in chunks that straddle blocks, then decoding, equal reading at once."""
    parallel, chunk_size, block = PARALLEL[name]
    model, tokens = build(), random_tokens(2, 19)
    logits, energies = numpy_llama(model, tokens)
    with jax.set_mesh(make_mesh((2, 4))):
        cache = model.empty_cache(2, 21, parallel=parallel, block_size=block)
        devices = 1 if parallel is None else 4 if parallel.axes == ("device",) else 8
        assert cache.capacity == -(-21 // (devices * (block or 3))) * devices * (block or 3)
        prefill = eqx.filter_jit(partial(model.prefill, chunk_size=chunk_size))
        out = prefill(tokens[:, :13], cache)
        close(out.logits[:, 0], logits[:, 12], tolerance=1e-10)
        step = eqx.filter_jit(partial(model, return_energies=True))
        for t in range(13, 19, 2):
            out = step(tokens[:, t : t + 2], cache=out.cache)
            here = slice(t, t + 2)
            close(
                (out.logits, out.energies), (logits[:, here], energies[:, :, here]), tolerance=1e-10
            )
        positions = np.sort(np.asarray(out.cache.layers[0].positions), 1)
    assert out.cache.lengths.tolist() == [19, 19]
    assert (positions[:, -19:] == np.arange(19)).all() and (positions[:, :-19] == -1).all()


@pytest.mark.full
def test_rows_of_different_lengths():
    """Each row is read as if it were alone: prompts, steps of several tokens, and of none."""
    model, tokens = build(VARIANTS["one layer"]), random_tokens(3, 12)
    counts, more = np.array([7, 1, 4], np.int32), np.array([3, 0, 2], np.int32)
    out = eqx.filter_jit(partial(model.prefill, chunk_size=3))(
        tokens[:, :7], model.empty_cache(3, 12), lengths=jnp.asarray(counts)
    )
    step = eqx.filter_jit(partial(model))(
        tokens[:, 7:10], cache=out.cache, lengths=jnp.asarray(more)
    )
    assert step.cache.lengths.tolist() == (counts + more).tolist()
    for row, (count, added) in enumerate(zip(counts, more, strict=True)):
        alone = np.concatenate([tokens[row, :count], tokens[row, 7 : 7 + added]])[None]
        want = model(jnp.asarray(alone)).logits[0]
        np.testing.assert_allclose(out.logits[row, 0], want[count - 1], rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(step.logits[row, :added], want[count:], rtol=1e-10, atol=1e-10)


@pytest.mark.full
def test_cache_of_few_bits_and_with_a_window():
    """`quantize` rounds the cache, and little; a window hides distant tokens for ever."""
    model, tokens = build(VARIANTS["one layer"], jnp.float32), random_tokens(1, 14)
    whole = model(tokens).logits
    read = eqx.filter_jit(partial(model.prefill, chunk_size=2))
    few = read(tokens, model.empty_cache(1, 16, quantize="int8")).logits
    error = np.abs(few[:, 0] - whole[:, -1]).max() / np.abs(whole).max()
    assert 1e-5 < error < 0.05
    ring = model.empty_cache(1, 6, window=3)
    window = model(tokens, attend=partial(ea.attention, local_window_size=(3, 0))).logits
    got = read(tokens, ring).logits
    np.testing.assert_allclose(got[:, 0], window[:, -1], rtol=2e-4, atol=2e-4)


@pytest.mark.full
def test_prompts_split_by_their_type():
    """Tokens that an explicit mesh splits over rows and time: JAX wants the sharding of a table's rows."""
    model, tokens = build(VARIANTS["one layer"]), random_tokens(2, 8)

    def loss(model, tokens):
        logits = model(tokens).logits
        return (logits**2).mean(), logits

    # JAX 0.8 and 0.9 do not infer the sharding of a weight's gradient
    gradient = jax.grad(loss, has_aux=True) if jax.__version_info__ >= (0, 10) else loss
    run = jax.jit(gradient)
    want, _ = run(model, tokens)
    mesh = make_mesh((2, 4), ("batch", "sequence"), explicit=True)
    with jax.set_mesh(mesh):
        spread = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("batch", "sequence")))
        got, logits = run(model, spread)
    exact = numpy_llama(model, tokens)[0]
    np.testing.assert_allclose(logits, exact, rtol=1e-11, atol=1e-11)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.full
def test_running_over_the_cache_is_loud(monkeypatch, raises_late):
    """More tokens than fit: an error when it runs, NaN where errors are off; never other numbers."""
    model, tokens = build(VARIANTS["one layer"]), random_tokens(2, 4)
    out = model(tokens, cache=model.empty_cache(2, 6))
    with pytest.raises(RuntimeError, match="no room for its new tokens"):
        jax.block_until_ready(model(tokens, cache=out.cache))
    with pytest.raises(ValueError, match=r"cache: wanted room for 7 tokens at once, .*, got 6"):
        eqx.filter_jit(model)(random_tokens(2, 7), cache=out.cache)

    def silent(place, capacity, starts, lengths, counts, tokens):  # as on accelerators
        return jnp.where(lengths + counts <= capacity, counts, -1)

    monkeypatch.setattr("energy_attn.distributed.cache._tokens.fitting", silent)
    loud = model(tokens, cache=out.cache, lengths=jnp.array([2, 3], jnp.int32))
    assert np.isfinite(loud.logits[0]).all() and np.isnan(loud.logits[1]).all()
    prompt = model.prefill(tokens, out.cache, lengths=jnp.array([2, 3], jnp.int32))
    assert np.isfinite(prompt.logits[0]).all() and np.isnan(prompt.logits[1]).all()
    for cache in (loud.cache, prompt.cache):  # and later
        after = model(tokens[:, :1], cache=cache, lengths=jnp.array([0, 1], jnp.int32))
        assert np.isnan(after.logits[1]).all()


def test_a_token_outside_the_vocabulary_is_loud():
    model = build(VARIANTS["one layer"])
    tokens = jnp.asarray([[1, 2, CONFIG.vocab_size, 3], [1, 2, 3, 4], [-1, 1, 2, 3]], jnp.int32)
    logits = np.asarray(eqx.filter_jit(model)(tokens).logits)
    assert np.isnan(logits[0, 2:]).all() and np.isfinite(logits[1]).all()
    assert np.isnan(logits[2]).all()


BAD_CONFIGS = {
    "TypeError hidden_size: wanted an integer, got float 24.0": {"hidden_size": 24.0},
    "ValueError num_hidden_layers: wanted at least 1, got 0": {"num_hidden_layers": 0},
    "TypeError vocab_size": {"vocab_size": True},
    "ValueError num_key_value_heads: wanted a divisor of the 4 heads": {"num_key_value_heads": 3},
    "ValueError head_dim: wanted an even number": {"head_dim": 7},
    "ValueError hidden_size: wanted a multiple of the 4": {"head_dim": None, "hidden_size": 30},
    "ValueError head_dim: wanted at least 2": {"head_dim": 0},
    "TypeError num_attention_heads: wanted an integer": {"num_attention_heads": "4"},
    "ValueError rope_theta: wanted at least 1": {"rope_theta": 0.0},
    "TypeError tie_word_embeddings": {"tie_word_embeddings": "no"},
    "ValueError rms_norm_eps": {"rms_norm_eps": float("nan")},
    "ValueError post_norms: wanted True where pre_norms is False": {"pre_norms": False},
    # fields of a static configuration are hashable
    "TypeError rope_scaling: wanted a Rope or None": {"rope_scaling": {"factor": 2.0}},
    "TypeError eos_token_id: wanted a tuple, got list": {"eos_token_id": [2]},
}


@pytest.mark.parametrize(("wanted", "change"), BAD_CONFIGS.items(), ids=BAD_CONFIGS)
def test_bad_config(wanted, change, unchecked):
    with refused(wanted):
        dataclasses.replace(CONFIG, **change)


SPREAD, ONE_LAYER = SequenceParallel(), partial(build, VARIANTS["one layer"])
BAD_CALLS = {
    "TypeError tokens: wanted a JAX": lambda m, t: m([[1, 2]]),
    "TypeError tokens: wanted an integer": lambda m, t: m(t / 2),
    "ValueError tokens: wanted shape": lambda m, t: m(t[0]),
    "TypeError positions: wanted an integer": lambda m, t: m(t, t / 2),
    "ValueError positions: wanted": lambda m, t: m(t, t[:, :3]),
    "TypeError cache: wanted a DecoderCache": lambda m, t: m(t, cache=(t,)),
    r"ValueError cache.layers\[0\].key: .*\(1, slots, 2, 8": lambda m, t: m(
        t, None, m.empty_cache(2, 8)
    ),
    "ValueError cache: .* 2 layers .* got 1": lambda m, t: m(
        t, None, ONE_LAYER().empty_cache(1, 8)
    ),
    "ValueError positions: wanted None with a cache": lambda m, t: m(t, t, m.empty_cache(1, 8)),
    "ValueError lengths: wanted None without a cache": lambda m, t: m(t, lengths=t[0, :1]),
    "ValueError parallel: wanted None or": lambda m, t: m(
        t, None, m.empty_cache(1, 8), parallel=SPREAD
    ),
    "ValueError at least one token": lambda m, t: m.prefill(t[:, :0], m.empty_cache(1, 8)),
    "ValueError chunk_size": lambda m, t: m.prefill(t, m.empty_cache(1, 8), chunk_size=0),
    "TypeError chunk_size": lambda m, t: m.prefill(t, m.empty_cache(1, 8), chunk_size=2.0),
    "TypeError cache: wanted": lambda m, t: m.prefill(t, None),
    "ValueError slots: wanted at least 1, got -1": lambda m, t: m.empty_cache(1, -1),
    "ValueError parallel": lambda m, t: m.empty_cache(1, 8, parallel=SPREAD),
    "TypeError parallel: wanted a Seq": lambda m, t: m.empty_cache(1, 8, parallel=("node",)),
    "TypeError config: wanted a LlamaConfig": lambda m, t: Llama({}, key=jax.random.key(0)),
    "TypeError key": lambda m, t: Llama(CONFIG, key=0.5),
    "TypeError dtype: wanted": lambda m, t: Llama(CONFIG, jnp.int32, key=jax.random.key(0)),
}


@pytest.mark.parametrize(("wanted", "call"), BAD_CALLS.items(), ids=BAD_CALLS)
def test_bad_call(wanted, call, unchecked):
    with refused(wanted):
        call(build(), random_tokens(1, 4))
