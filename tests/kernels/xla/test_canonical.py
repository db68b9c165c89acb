"""The law of `Canonical`: a row has the same bytes however it is computed, and the values of attention."""

import functools
import hashlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from energy_attn.kernels import AttentionState, local_attention
from energy_attn.kernels.xla._canonical import Canonical
from tests.support.compare import close
from tests.support.flags import LEVEL, flags, spawn
from tests.support.problems import Problem, cotangents
from tests.support.prompts import (
    DTYPES,
    HEADS,
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
    junk_like,
    prompt,
    same_bytes,
    tangent,
    whole,
)
from tests.support.reference import dense, dense_jvp, dense_vjp
from tests.support.selection import few, few_rows


def rows(*first: tuple[str, str], options: Any = OPTIONS):
    """Dtypes and options, of which `make test` runs the first."""
    rest = [x for x in itertools.product(DTYPES, options) if x not in first]
    return pytest.mark.parametrize(("dtype", "option"), few_rows([*first, *rest], len(first)))


@rows(("float32", "causal"), ("bfloat16", "segments"))
def test_chunks(dtype, option):
    """A tile whose size follows the call; a fold over the slots of a cache instead of positions; junk that counts."""
    rng, tokens = np.random.default_rng(1), prompt(dtype)
    capacity = int(rng.integers(LENGTH, 4000))
    begin = 0
    while begin < LENGTH:
        end = min(begin + int(rng.choice([1, 7, 40, 333, 900])), LENGTH)
        known = LENGTH if option == "full" else end
        keys = cache_of(
            tokens.at(slice(known)), capacity, rng, int(rng.integers(capacity - known + 1))
        )
        found = jax.jit(functools.partial(attend, option))(tokens.at(slice(begin, end)), keys)
        same_bytes(found, at(whole(dtype, option), slice(begin, end)))
        begin = end


@rows(("float32", "causal"), options=("causal", "window"))
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
def test_place_in_a_batch(option):
    """A leaf that begins with the first key of another row; products of a batch that round otherwise."""
    dtype, rng = DTYPES[list(OPTIONS).index(option)], np.random.default_rng(3)
    caches, queries = [], []
    for seed, length in ((1, 300), (0, LENGTH), (2, 1900)):
        tokens = prompt(dtype, seed).at(slice(length))
        caches.append(cache_of(tokens, 2400, rng, int(rng.integers(2400 - length))))
        queries.append(cache_of(tokens, LENGTH, rng))
    keys, rows = in_batch(caches[0], caches[1:]), in_batch(queries[0], queries[1:])
    run = functools.partial(attend, option)
    same_bytes(at(run(rows, keys), 1), whole(dtype, option))
    same_bytes(at(jax.jit(jax.vmap(run))(rows, keys), 1), whole(dtype, option))
    one = jax.tree.map(lambda x: x[1], keys)
    found = jax.jit(jax.vmap(run, in_axes=(0, None)))(
        in_batch(prompt(dtype, 1), [prompt(dtype)]), one
    )
    same_bytes(at(found, 1), whole(dtype, option))


@pytest.mark.parametrize("dtype", few(DTYPES, "float32"))
def test_order_of_keys(dtype):
    """A fold in the order of arrival; keys that no row sees and that count."""
    rng, tokens = np.random.default_rng(4), prompt(dtype)
    cache = cache_of(tokens, 2300, rng)
    found = attend("causal", tokens, cache.at(rng.permutation(2300)))
    same_bytes(found, whole(dtype, "causal"))
    late = tokens.at(slice(2049, None))
    found = attend("window", late, tokens.at(slice(749, None)))  # from the middle of a leaf on
    same_bytes(found, at(whole(dtype, "window"), slice(2049, None)))


@rows(("float32", "window"))
def test_gradients_and_tangents(dtype, option):
    """Sums over rows or leaves in an order that follows the call: its padding, batch, cache, transformations."""
    rng = np.random.default_rng(5)
    tokens, others = (prompt(dtype, seed).at(slice(SHORT)) for seed in (0, 1))
    precise = np.float64 if dtype == "float64" else np.float32
    out = rng.standard_normal((SHORT, HEADS, VALUE_WIDTH)).astype(tokens.value.dtype)
    lse = rng.standard_normal((SHORT, HEADS)).astype(precise)
    wanted = jax.jit(functools.partial(gradients, option))(tokens, tokens, (out, lse))
    late = slice(300, None)
    found = jax.jit(functools.partial(gradients, option))(
        tokens.at(late), tokens, (out[late], lse[late])
    )
    no_early = jax.tree.map(lambda x: np.where(np.arange(SHORT) < 300, 0, x.T).T, (out, lse))
    no_early = jax.tree.map(lambda x, like: x.astype(like.dtype), no_early, (out, lse))
    d_query, *rest = jax.jit(functools.partial(gradients, option))(tokens, tokens, no_early)
    same_bytes(found, (d_query[late], *rest))
    directions = tuple(rng.standard_normal(x.shape).astype(x.dtype) for x in tokens[:3])
    wanted_tangent = jax.jit(functools.partial(tangent, option))(tokens, tokens, directions)

    first, capacity = 77, 1450

    def padded(x):
        junk = junk_like(x, capacity, rng)
        junk[first : first + SHORT] = x
        return junk

    here = slice(first, first + SHORT)
    batched = [cache_of(x, capacity, rng, first) for x in (others, tokens)]
    batch = in_batch(*batched[:1], batched[1:])
    weights = tuple(np.stack([padded(x), padded(x)]) for x in (out, lse))
    run = jax.checkpoint(functools.partial(gradients, option))
    found = jax.jit(run)(batch, batch, weights)
    same_bytes([x[1, here] for x in found], wanted)
    found = jax.jit(jax.vmap(functools.partial(gradients, option)))(batch, batch, weights)
    same_bytes([x[1, here] for x in found], wanted)
    seeds = tuple(np.stack([padded(x), padded(x)]) for x in directions)
    found = jax.jit(functools.partial(tangent, option))(batch, batch, seeds)
    same_bytes(jax.tree.map(lambda x: x[1, here], found), wanted_tangent)


@pytest.mark.parametrize("option", few(list(OPTIONS), "window"))
@pytest.mark.parametrize(("dtype", "tolerance"), few_rows([("float64", 1e-11), ("float32", 1e-5)]))
def test_values(dtype, tolerance, option):
    """A leaf left out or counted twice; a derivative's term or scale that is missing."""
    tokens, rng = prompt(dtype).at(slice(SHORT)), np.random.default_rng(6)
    plain: dict[str, Any] = {
        name: np.asarray(getattr(tokens, name), np.float64)[None]
        for name in ("query", "key", "value")
    }
    ids = tokens.segments[None] if option == "segments" else None
    options = OPTIONS[option]
    problem = Problem(
        option,
        **plain,
        query_positions=tokens.positions[None],
        key_positions=tokens.positions[None],
        query_segment_ids=ids,
        key_segment_ids=ids,
        is_causal=options.get("is_causal", False),
        local_window_size=options.get("local_window_size"),
    )
    d_out, d_lse = cotangents(problem, jnp.dtype(dtype))
    moves = {name: rng.standard_normal(x.shape).astype(dtype) / 100 for name, x in plain.items()}

    def state(query, key, value):
        return attend(option, *[tokens._replace(query=query, key=key, value=value)] * 2)

    primals = tokens[:3]
    directions = tuple(x[0] for x in moves.values())
    found, pull = jax.vjp(jax.jit(state), *map(jnp.asarray, primals))
    close(tuple(x[None] for x in found), dense(problem), option, tolerance)
    found = dict(zip(plain, pull(AttentionState(d_out[0], d_lse[0])), strict=True))
    wanted = dense_vjp(problem, d_out, d_lse)
    close({name: x[None] for name, x in found.items()}, wanted, option, 10 * tolerance)
    found = jax.jvp(jax.jit(state), primals, directions)[1]
    close(tuple(x[None] for x in found), dense_jvp(problem, moves), option, tolerance)


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
    files = "tests/kernels/xla/test_canonical.py", "tests/kernels/xla/test_canonical_calls.py"
    some = "chunks or steps or in_order or terms or odd or exponentials"
    spawn("-m", "pytest", "-x", *files, "-k", some, XLA_FLAGS=flags(given=f"{LEVEL}=3"))
