"""`tree_decode` and `commit`: a drafted tree over a sharded cache, on every mesh.

The judge is dense attention in float64 over the context and all nodes, with a mask that plain Python builds by walking
from each node to its root.
"""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import KVCache, SequenceParallel, collectives, make_mesh
from energy_attn.prefix_tree import Accepted, commit, tree_decode
from tests.support.caches import (
    COUNTS,
    PARENTS,
    B,
    H,
    K,
    L,
    N,
    S,
    V,
    decoded,
    empty,
    problem_of,
    tree_of,
)
from tests.support.compare import close, same
from tests.support.complaints import complaining
from tests.support.meshes import mesh_of
from tests.support.naive import assert_all_close
from tests.support.problems import cast
from tests.support.programs import sent
from tests.support.reference import dense, dense_vjp
from tests.support.selection import few, few_rows

append, write = jax.jit(KVCache.append), jax.jit(commit)


def by_place(query, key, value, tree, cache, source=None, **options):
    """`tree_decode`, for programs that are compiled for arguments in a row."""
    return tree_decode(query, key, value, tree=tree, cache=cache, source=source, **options)


@functools.cache
def cotangents():
    rng = np.random.default_rng(3)
    return rng.standard_normal((B, L, N, V)), rng.standard_normal((B, L, N))


@functools.partial(jax.jit, static_argnames="kind")
def with_gradients(arrays, counts, kind):
    """The state, and its gradients in everything, for the cotangents above."""
    state, back = jax.vjp(lambda arrays: decoded(empty(kind), arrays, counts), arrays)
    return state, back(type(state)(*map(jnp.asarray, cotangents())))[0]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", few(["1", "2x4", "2x4 explicit"], "2x4"))
def test_dense(kind):
    """A key that a node should not see, or one it should and does not; grouped heads, rows of all lengths, a row
    without context, devices without keys, a source; and the gradients, those in what was appended before included."""
    problem = problem_of()
    arrays, _ = cast(problem, jnp.float64)
    mesh = mesh_of("8" if kind == "1" else kind)
    with jax.set_mesh(mesh):
        state, gradients = with_gradients(arrays, jnp.asarray(COUNTS, jnp.int32), kind)
    close(tuple(state), dense(problem))
    close(gradients, dense_vjp(problem, *cotangents()))


@pytest.mark.parametrize(
    "window, reach", few_rows([(5, (2, 9)), (3, None), (None, 1), (5, (None, 9))])
)
def test_window(window, reach):
    """A window that hides old tokens but not old ancestors, or the other way about; a cache that is a ring."""
    counts = COUNTS if window is None else (20, 0, 9)
    sides = (x if x is None or isinstance(x, int) else x[0] for x in (window, reach))
    left = min(x for x in sides if x is not None)
    problem = problem_of("window", counts, window=left, S=max(counts))
    arrays, _ = cast(problem, jnp.float64)
    with jax.set_mesh(mesh_of("8")):
        run = jax.jit(functools.partial(decoded, local_window_size=reach))
        cache = empty("8", window=window, capacity=48 if window is None else 16)
        state = run(cache, arrays, jnp.asarray(counts, jnp.int32))
    close(tuple(state), dense(problem))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_precision(dtype):
    """An error above a small multiple of what attention written out makes on the same numbers."""
    problem = problem_of("precise")
    arrays, _ = cast(problem, dtype)
    with jax.set_mesh(mesh_of("2x4")):
        state = jax.jit(decoded)(empty("2x4", dtype=dtype), arrays, jnp.asarray(COUNTS, jnp.int32))
    assert_all_close(state._asdict(), problem, dtype, "both", label="tree_decode")


@pytest.mark.full
def test_names():
    """An implementation that is named and takes no mask; the choice lost on the way to the context."""
    problem = problem_of("names")
    arrays, rounded = cast(replace(problem, source=None), jnp.float32)
    key, value, query = arrays["key"][:, S:], arrays["value"][:, S:], arrays["query"]
    counts = jnp.asarray(COUNTS, jnp.int32)
    context = arrays["key"][:, :S], arrays["value"][:, :S]
    cache = empty("1", dtype=jnp.float32).append(*context, lengths=counts)
    run = jax.jit(functools.partial(by_place, scale=0.7, implementation="pallas_tpu"))
    state = run(query, key, value, tree_of(), cache)
    close(state.out.astype(jnp.float64), dense(rounded)[0], tolerance=1e-6)
    with pytest.raises(NotImplementedError, match="query: wanted at most 64 rows"):
        many = jnp.concatenate([query] * 4, 2)
        tree_decode(many, key, value, tree=tree_of(), cache=cache, implementation="decode")


@pytest.mark.full
def test_rows_and_heads_split():
    """Rows and heads that types split over other mesh axes stay there, whether those of the draft are split or not."""
    mesh, counts = make_mesh((2, 2, 2), ("data", "sequence", "model"), explicit=True), (11, 0, 4, 7)
    rows = (*PARENTS, [-1, 0, 1, 1])
    problem = problem_of("split", counts, rows)
    key, value = (jnp.asarray(x) for x in (problem.key, problem.value))
    nodes = [jnp.asarray(problem.query), key[:, S:], value[:, S:], jnp.asarray(problem.source)]
    with jax.set_mesh(mesh):
        spread = SequenceParallel("sequence")
        cache = KVCache.empty(4, 16, K, H, V, dtype=key.dtype, parallel=spread, block_size=2)

        def put(x, *spec):
            return jax.device_put(x, NamedSharding(mesh, P(*spec)))

        split = "data", "sequence", "model"
        cache = jax.tree.map(lambda x: put(x, *split[: x.ndim if x.ndim > 1 else 1]), cache)
        cache = cache.append(key[:, :S], value[:, :S], lengths=jnp.asarray(counts, jnp.int32))
        together = [put(x, "data", None, "model") for x in nodes]
        for given in nodes, together:
            args = *given[:3], tree_of(rows), cache, given[3]
            step = jax.jit(functools.partial(by_place, scale=0.7)).lower(*args).compile()
            plain = jax.jit(lambda cache, query: cache.attend(query, is_causal=False))
            assert sent(step) == sent(plain.lower(cache, given[0]).compile()) != []
            state = step(*args)
            assert tuple(state.out.sharding.spec)[:3] == ("data", None, "model")
            close(tuple(state), dense(problem))
            accepted = accept([[0, 1, 4], [0, 1, 2], [], [0, 2]])
            assert collectives(write.lower(cache, accepted, *given[1:3]).compile()) == ()
            done = write(cache, accepted, *given[1:3])
            check_written(done, cache, accepted, *given[1:3])
            assert tuple(done.key.sharding.spec)[:3] == split
        query, *pair, source = [put(x, None, None, "sequence") for x in nodes]
        tree = jax.tree.map(lambda x: put(x, "data"), tree_of(rows))
        state = jax.jit(by_place)(query, *pair, tree, cache, source, scale=jnp.float64(0.7))
        close(state.out, dense(problem)[0])


@pytest.mark.parametrize("merge", few(["allreduce", "gather", "butterfly"], "allreduce"))
def test_collectives(merge):
    """A tree that costs a collective, or a byte, more than plain decoding of as many queries, at any capacity."""
    arrays, _ = cast(problem_of("sent"), jnp.float64)
    query, source = arrays["query"], arrays["source"]
    nodes = [arrays[x][:, S:] for x in ("key", "value")]
    with jax.set_mesh(mesh_of("2x4")):
        spread = SequenceParallel(("node", "device"), merge=merge)
        options = {"dtype": jnp.float64, "block_size": 1, "parallel": spread}
        small, large = (KVCache.empty(B, n, K, H, V, **options) for n in (16, 4096))
        args = query, *nodes, tree_of(), large, source
        step = jax.jit(functools.partial(by_place, scale=0.7)).lower(*args).compile()
        plain = jax.jit(lambda cache, query: cache.attend(query, is_causal=False))
        found = sent(plain.lower(small, query).compile())
    assert found and sent(step) == found


@pytest.mark.full
def test_quantized():
    """A draft rounded to 8 bits before it is accepted; or afterwards another way than by appending it."""
    problem, counts = problem_of("int8"), jnp.asarray(COUNTS, jnp.int32)
    arrays, rounded = cast(problem, jnp.float32)
    key, value = arrays["key"], arrays["value"]
    with jax.set_mesh(mesh_of("8")):
        cache = empty("8", dtype=jnp.float32, quantize="int8")
        cache = append(cache, key[:, :S], value[:, :S], lengths=counts)
        step = jax.jit(functools.partial(by_place, scale=0.7))
        args = arrays["query"], key[:, S:], value[:, S:], tree_of(), cache, arrays["source"]
        state = step(*args)
        for name, read in ("key", cache.keys()), ("value", cache.values()):
            context, read = getattr(rounded, name), np.asarray(read)
            for b, slots in enumerate(np.asarray(cache.positions)):
                for slot, n in enumerate(slots):
                    if n >= 0:
                        context[b, n] = read[b, slot]
        done = write(cache, accept(PATHS), key[:, S:], value[:, S:])
        check_written(done, cache, accept(PATHS), key[:, S:], value[:, S:])
    close(state.out.astype(jnp.float64), dense(rounded)[0], tolerance=1e-6)


def accept(paths, C=3) -> Accepted:
    """What verification would return: slots filled up with -1, and some token."""
    filled = np.asarray([[*path, *[-1] * (C - len(path))] for path in paths], np.int32)
    lengths = np.asarray([len(path) for path in paths], np.int32)
    return Accepted(jnp.asarray(filled), jnp.asarray(lengths), jnp.zeros_like(jnp.asarray(lengths)))


PATHS = [0, 1, 4], [0], []


def check_written(done, before, accepted, key, value):
    """What `done` holds is what `before` does and, by plain Python, the accepted nodes; all appended one by one."""
    rows = zip(accepted.path.tolist(), accepted.length.tolist(), strict=True)
    paths = [row[:n] for row, n in rows]
    for i in range(max(map(len, paths))):
        each = [
            jnp.stack([x[b, path[i] if i < len(path) else 0] for b, path in enumerate(paths)])
            for x in map(np.asarray, (key, value))
        ]
        there = jnp.asarray([i < len(path) for path in paths], jnp.int32)
        before = append(before, *(x[:, None] for x in each), lengths=there)
    same(done, before)


@pytest.mark.full
def test_commit():
    """A node that was not accepted written, or one that was not; in another row's place, or at another position; more
    than is accepted laid out, sent or copied."""
    M, C, nodes = 5, 3, 16
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.standard_normal((B, nodes, K, width))) for width in (H, V))
    old = [jnp.asarray(rng.standard_normal((B, S, K, width))) for width in (H, V)]
    accepted = accept([[2, 9, 15], [0], []])
    with jax.set_mesh(mesh_of("2x4")):
        cache = empty("2x4", capacity=8192).append(*old, lengths=jnp.asarray(COUNTS, jnp.int32))
        step = jax.jit(commit, donate_argnums=0)
        program = step.lower(cache, accepted, key, value).compile()
        text = program.as_text()
        # each device has a copy of its own of what it may write on
        done = step(jax.tree.map(jnp.copy, cache), accepted, key, value)
        check_written(done, cache, accepted, key, value)
    assert done.lengths.tolist() == [14, 1, 4]
    assert collectives(program) == ()
    assert f"[{B},{C},{K},{H}]" in text and f"[{B},{nodes},{K},{H}]" in text
    assert not re.search(rf"\[{B},({M},{C}|{M * C}),", text)
    shard = cache.key.nbytes // 8
    assert program.memory_analysis().alias_size_in_bytes >= 2 * shard
    assert program.memory_analysis().temp_size_in_bytes < shard / 8


@functools.cache
def valid() -> dict[str, Any]:
    given = {"query": zeros(B, L, N, H), "key": zeros(B, L, K, H), "value": zeros(B, L, K, V)}
    given |= {"tree": tree_of(), "cache": empty("1")}
    return given


def decode_with(**changes):
    return tree_decode(**valid() | changes)


def committed(**changes):
    given = valid() | {"accepted": accept(PATHS)} | changes
    return commit(*(given[name] for name in ("cache", "accepted", "key", "value")))


def zeros(*shape):
    return jnp.asarray(np.zeros(shape))


F32, INTS = np.zeros((B, L, K, H), np.float32), np.zeros((2, 3), np.int32)


BAD = {
    "query": (lambda: {"query": zeros(B, L - 1, N, H)}, ValueError, "query", "[3,6", "(3, 7, N"),
    "dtype": (lambda: {"query": F32}, TypeError, "query", "float32", "the dtype of the cache, fl"),
    "heads": (lambda: {"query": zeros(B, L, 3, H)}, ValueError, "query", "3,7,3,3", "multiple"),
    "key": (lambda: {"key": zeros(B, L, K, V)}, ValueError, "key", "[3,7,2,5]", "(3, 7, 2, 3)"),
    "key's": (lambda: {"key": F32}, TypeError, "key", "float32", "the dtype of the cache"),
    "value": (lambda: {"value": zeros(B, 1, K, V)}, ValueError, "value", "3,1,2,5", "(3, 7, 2, 5)"),
    "no array": (lambda: {"value": [1.0]}, TypeError, "value", "list", "array"),
    "source": (lambda: {"source": zeros(B, L, N, H)}, ValueError, "source", "4,3", "(3, 7, 4, 5)"),
    "tree": (lambda: {"tree": None}, TypeError, "tree", "None", "PrefixTree"),
    "rows": (lambda: {"tree": tree_of(PARENTS[:2])}, ValueError, "tree.tokens", "[2,7]", "(3, L)"),
    "cache": (lambda: {"cache": zeros(B, 4)}, TypeError, "cache", "float64[3,4]", "a KVCache"),
    "window": (
        lambda: {"cache": empty("1", window=3), "local_window_size": 4},
        *(ValueError, "local_window_size", "4", "the cache's window, 3"),
    ),
    "name": (lambda: {"implementation": "fast"}, ValueError, "implementation", "'fast'", "one of"),
}


def called(function, rows):
    """Calls with these changes, and what they complain of."""
    return {
        what: (lambda changes=changes: function(**changes()), *told)
        for what, (changes, *told) in rows.items()
    }


# An error that does not name the argument, what came and what was wanted.
test_bad_input = complaining(called(decode_with, BAD))


def other(**changes):
    return {"accepted": accept(PATHS)._replace(**changes)}


BAD_COMMIT = {
    "cache": (lambda: {"cache": None}, TypeError, "cache", "None", "a KVCache"),
    "accepted": (lambda: {"accepted": ()}, TypeError, "accepted", "()", "an Accepted"),
    "rows": (lambda: other(path=INTS), ValueError, "accepted.path", "int32[2,3]", "(3, C)"),
    "lengths": (lambda: other(length=INTS[:, 0]), ValueError, "accepted.length", "[2]", "(3)"),
    "path": (lambda: other(path=zeros(B, 3)), TypeError, "accepted.path", "float64", "integer"),
    "key": (lambda: {"key": zeros(2, L, K, H)}, ValueError, "key", "2,7,2,3", "(3, L, 2, 3)"),
    "value": (lambda: {"value": zeros(B, 4, K, V)}, ValueError, "value", "3,4,2,5", "(3, 7, 2, 5)"),
    "dtype": (lambda: {"value": F32}, TypeError, "value", "float32", "the dtype of the cache"),
}


test_bad_commit = complaining(called(committed, BAD_COMMIT))
