"""The law of `Canonical` in programs of CPUs: loops, vectorisation, meshes, threads and the flags of users."""

import functools
import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from energy_attn.kernels import local_attention
from energy_attn.kernels.internal import Canonical
from tests.support.flags import LEVEL, flags, spawn
from tests.support.prompts import (
    DTYPES,
    LENGTH,
    OPTIONS,
    SHORT,
    VALUE_WIDTH,
    Tokens,
    at,
    attend,
    cache_of,
    gradients,
    in_batch,
    prompt,
    same_bytes,
    whole,
)
from tests.support.selection import few, few_rows

STEPS = [("float32", "causal"), *itertools.product(DTYPES, ("causal", "window"))]


@pytest.mark.parametrize(("dtype", "option"), few_rows(list(dict.fromkeys(STEPS))))
def test_steps_of_a_scan(dtype, option):
    """A step's tile that is fused with what surrounds it, or of another height; a head that depends on others.

    Keys that are read where they lie and are in another place of the tree, or of a leaf, than they would be elsewhere.
    """
    tokens, first, steps = prompt(dtype), 2030, 40
    tokens = tokens._replace(query=tokens.query[:, ::2])  # a row a key head
    cache = cache_of(tokens.at(slice(first)), 2560, np.random.default_rng(2))

    def step(keys, index):
        new = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(jnp.asarray(x), index, 1), tokens)
        keys = jax.tree.map(
            lambda xs, x: lax.dynamic_update_slice_in_dim(xs, x, index, 0), keys, new
        )
        return keys, [attend(option, new, keys, Canonical(x)) for x in (False, True)]

    index = jnp.arange(first, first + steps, dtype=jnp.int32)
    cache = jax.tree.map(jnp.asarray, cache)
    found = jax.jit(lambda cache, index: lax.scan(step, cache, index)[1])(cache, index)
    wanted = at(whole(dtype, option), (slice(first, first + steps), slice(None, None, 2)))
    same_bytes(jax.tree.map(lambda x: x[:, 0], found), [wanted, wanted])


@pytest.mark.parametrize("option", few(list(OPTIONS), "segments"))
def test_vmap(option):
    """A leaf that begins with the first key of another row; products of a batch that round otherwise."""
    dtype, rng = DTYPES[list(OPTIONS).index(option)], np.random.default_rng(3)
    caches, queries = [], []
    for seed, length in ((1, 300), (0, LENGTH), (2, 1900)):
        tokens = prompt(dtype, seed).at(slice(length))
        caches.append(cache_of(tokens, 2400, rng, int(rng.integers(2400 - length))))
        queries.append(cache_of(tokens, LENGTH, rng))
    keys, rows = in_batch(caches[0], caches[1:]), in_batch(queries[0], queries[1:])
    run = functools.partial(attend, option)
    same_bytes(at(jax.jit(jax.vmap(run))(rows, keys), 1), whole(dtype, option))
    one = jax.tree.map(lambda x: x[1], keys)
    found = jax.jit(jax.vmap(run, in_axes=(0, None)))(
        in_batch(prompt(dtype, 1), [prompt(dtype)]), one
    )
    same_bytes(at(found, 1), whole(dtype, option))


@pytest.mark.parametrize("dtype", few(DTYPES, "float32"))
def test_from_the_middle_of_a_leaf(dtype):
    """A leaf that is numbered from the first key on."""
    tokens = prompt(dtype)
    late = tokens.at(slice(2049, None))
    found = attend("window", late, tokens.at(slice(749, None)))
    same_bytes(found, at(whole(dtype, "window"), slice(2049, None)))


def test_two_keys_of_one_position():
    """One of them that hides the other, without a word."""
    tokens = prompt("float32").at(slice(8))
    twice = tokens._replace(positions=np.array([0, 1, 2, 3, 3, 4, 5, 6], np.int32))
    assert np.isnan(attend("causal", tokens, twice).out).all()
    far = tokens._replace(positions=np.array([0, 1, 2, 3, 4, 5, 6, 5000], np.int32))
    assert np.isnan(attend("causal", tokens, far).out).all()


def with_gradients(rows, keys, weights):
    """The state and its gradients, of a causal call."""
    return attend("causal", rows, keys), gradients("causal", rows, keys, weights)


def weights_of(tokens, rng):
    """Random cotangents of a state."""
    shape = tokens.query.shape[:-1]
    out = rng.standard_normal((*shape, VALUE_WIDTH)).astype(tokens.value.dtype)
    return out, rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("explicit", few([True, False], True))
def test_over_a_mesh(explicit):
    """Fewer heads, or a part of the batch, on each device: products of a batch of another size."""
    one, other = (prompt("float32", seed).at(slice(SHORT)) for seed in (0, 1))
    tokens = in_batch(one, [other])
    weights = weights_of(tokens, np.random.default_rng(7))
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    heads, rest = jax.P("b", None, "h"), jax.P("b")
    specs = Tokens(heads, heads, heads, rest, rest)
    args, specs = (tokens, tokens, weights), (specs, specs, (heads, heads))
    wanted = jax.jit(with_gradients)(*args)
    run = with_gradients
    if explicit:
        run = jax.shard_map(with_gradients, mesh=mesh, in_specs=specs, out_specs=heads)
    else:
        put = functools.partial(jax.NamedSharding, mesh)
        args = jax.tree.map(lambda x, spec: jax.device_put(x, put(spec)), args, specs)
    same_bytes(jax.jit(run)(*args), wanted)


def digest() -> str:
    """Of the bytes of a state and its gradients, of wide heads."""
    tokens = prompt("float32").at(slice(SHORT))
    out, lse = weights_of(tokens, np.random.default_rng(8))
    wide = Tokens._make((*(np.tile(x, (1, 1, 8)) / 8 for x in tokens[:3]), *tokens[3:]))
    found = jax.jit(with_gradients)(wide, wide, (np.tile(out, (1, 1, 8)), lse))
    return hashlib.sha256(
        b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(found))
    ).hexdigest()


@pytest.mark.full
def test_number_of_threads():
    """A product whose sum is cut by the number of threads, which XLA:CPU takes from NPROC."""
    program = "from tests.kernels.xla.test_canonical import digest; print(digest())"
    assert len({spawn("-c", program, NPROC=str(threads)) for threads in (1, 2, 16)}) == 1


def test_short_axes():
    """An exponential that is another one where the last axis, of the rows of a head, is short."""
    rng = np.random.default_rng(0)
    shapes = [(1, 1500, heads, 64) for heads in (32, 8, 8)]
    arrays = [jnp.asarray(rng.standard_normal(x), jnp.float32) for x in shapes]
    places = jnp.arange(1500, dtype=jnp.int32)[None]

    @jax.jit
    def run(query, positions):
        given = {"query_positions": positions, "key_positions": places, "is_causal": True}
        return local_attention(query, *arrays[1:], implementation=Canonical(), **given)

    whole = run(arrays[0], places)
    for first in range(1480, 1500):
        some = slice(first, first + 1)
        found = run(arrays[0][:, some], places[:, some])
        same_bytes(found, at(whole, (slice(None), some)))


@pytest.mark.smoke
@pytest.mark.full
def test_short_axes_as_users_compile():
    """Likewise, in programs that LLVM makes vectors of, which the suite's are not; by the newest JAX, too."""
    file = "tests/kernels/xla/test_canonical.py"
    some = "short_axes and not as_users"
    spawn("-m", "pytest", file, "-k", some, XLA_FLAGS=flags(given=f"{LEVEL}=3"))


@pytest.mark.full
def test_as_users_compile():
    """Programs that LLVM makes vectors of, and that XLA fuses, which the suite's are not."""
    files = (
        "tests/kernels/fold/test_canonical.py",
        "tests/kernels/xla/test_canonical.py",
        "tests/kernels/xla/test_canonical_calls.py",
    )
    some = "(rows and cpu) or steps or in_order or terms or odd or exponentials"
    spawn("-m", "pytest", "-x", *files, "-k", some, XLA_FLAGS=flags(given=f"{LEVEL}=3"))
