"""Histories of a cache: whatever comes after whatever, on any mesh, each row holds its tokens and attends to them.

The judge is a dictionary per row, and dense attention over its tokens in float64.
"""

import contextlib
import copy
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from energy_attn.distributed import ForkedCache, KVCache
from energy_attn.prefix_tree import Accepted, commit
from tests.support.caches import B, H, Model, N, append, check_balanced, check_held, empty, tokens
from tests.support.compare import close
from tests.support.disk import contents, failing, meanwhile
from tests.support.meshes import mesh_of, parallel_of
from tests.support.reference import dense

COUNT = 2  # of rows that share a prompt
PLACES = {None: None, "8": parallel_of("8"), "2x4 explicit": parallel_of("2x4")}
steps = st.integers(1, 40)  # of a save or a load, which have no more than that
places, counts = st.sampled_from([*PLACES]), st.tuples(*[st.integers(0, 3)] * B)
counts_of_fork = st.tuples(*[st.integers(0, 3)] * COUNT * B)
commit_path, replace = jax.jit(commit), jax.jit(KVCache.replace)
append_to_fork = jax.jit(ForkedCache.append)
attend = jax.jit(lambda cache, query, places: cache.attend(query, query_positions=places))


class History(RuleBasedStateMachine):
    """A cache, a dictionary per row of what it is to hold, a fork of it, and a folder that others write as well."""

    @initialize(is_ring=st.booleans(), place=places)
    def begin(self, is_ring, place):
        self.place, self.step, self.saved = place, 0, None
        self.folder, self.folder_of_fork = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
        self.window, self.ring = (12, 16) if is_ring else (None, None)
        self.cache, self.model, self.forked = self.made(B), Model(self.ring), None

    def made(self, rows):
        with self.mesh():
            return empty(capacity=16, window=self.window, parallel=PLACES[self.place], rows=rows)

    def mesh(self):
        place = self.place
        return contextlib.nullcontext() if place is None else jax.set_mesh(mesh_of(place))

    def room(self, wanted):
        self.step += 1
        held = [0 if self.model.ring else len(row) for row in self.model.rows]
        return [min(n, 16 - have) for n, have in zip(wanted, held, strict=True)]

    @rule(wanted=counts)
    def append(self, wanted):
        count, new = self.room(wanted), tokens(self.step, 3)
        with self.mesh():
            self.cache = append(self.cache, *new, lengths=jnp.asarray(count, jnp.int32))
        self.model.append(*new, count)

    @rule(wanted=counts, order=st.permutations(range(4)))
    def commit(self, wanted, order):
        count, (key, value) = self.room(wanted), tokens(self.step, 4)
        path = np.where(np.arange(3) < np.asarray(count)[:, None], order[:3], -1)
        accepted = Accepted(*(jnp.asarray(x, jnp.int32) for x in (path, count, [0] * B)))
        with self.mesh():
            self.cache = commit_path(self.cache, accepted, key, value)
        self.model.append(np.asarray(key)[:, order[:3]], np.asarray(value)[:, order[:3]], count)

    @rule(count=counts)
    def evict(self, count):
        with self.mesh():
            self.cache = self.cache.evict(jnp.asarray(count, jnp.int32))
        rows = zip(self.model.lengths, self.model.rows, count, strict=True)
        self.model.evict([n - len(row) + gone for n, row, gone in rows])

    @rule(before=st.tuples(*[st.integers(0, 40)] * B))
    def evict_before(self, before):
        with self.mesh():
            self.cache = self.cache.evict(before=jnp.asarray(before, jnp.int32))
        self.model.evict(before)

    @rule(rows=st.tuples(*[st.booleans()] * B), by_index=st.booleans())
    def reset(self, rows, by_index):
        chosen = np.flatnonzero(rows)
        with self.mesh():
            self.cache = self.cache.reset(jnp.asarray(chosen if by_index else rows))
        self.model.reset(chosen)

    @rule(rows=st.permutations(range(B)), n=st.integers(1, B), wanted=st.tuples(counts, counts))
    def replace(self, rows, n, wanted):
        """By rows that were appended to, let go of a token, and were appended to again."""
        other, model, rows = self.made(n), Model(self.ring, rows=n), rows[:n]
        for count in wanted:
            self.step += 1
            new = [x[:n] for x in tokens(self.step, 3)]
            before = [length - 1 for length in model.lengths]
            model.evict(before)
            model.append(*new, count[:n])
            with self.mesh():
                other = other.evict(before=jnp.maximum(jnp.asarray(before, jnp.int32), 0))
                other = append(other, *new, lengths=jnp.asarray(count[:n], jnp.int32))
        with self.mesh():
            self.cache = replace(self.cache, jnp.asarray(rows, jnp.int32), other)
        self.model.replace(rows, model)

    @rule()
    def fork(self):
        with self.mesh():
            self.forked = self.cache.fork(COUNT, capacity=16)
        self.prompt, self.own = copy.deepcopy(self.model), Model(self.ring, rows=COUNT * B)
        self.own.lengths = self.begins = [n for n in self.model.lengths for _ in range(COUNT)]

    @precondition(lambda self: self.forked is not None)
    @rule(wanted=counts_of_fork)
    def append_to_fork(self, wanted):
        self.step += 1
        held = [0 if self.ring else len(row) for row in self.own.rows]
        count = [min(n, 16 - have) for n, have in zip(wanted, held, strict=True)]
        new = tokens(self.step, 3, rows=COUNT * B)
        with self.mesh():
            lengths = jnp.asarray(count, jnp.int32)
            self.forked = append_to_fork(self.forked, *new, lengths=lengths)
        self.own = copy.deepcopy(self.own)
        self.own.append(*new, count)

    @precondition(lambda self: self.forked is not None)
    @rule(count=counts_of_fork)
    def evict_of_fork(self, count):
        with self.mesh():
            self.forked = self.forked.evict(jnp.asarray(count, jnp.int32))
        for row, gone in zip(self.own.rows, count, strict=True):
            for n in sorted(row)[:gone]:
                del row[n]

    @precondition(lambda self: self.forked is not None)
    @rule(rows=st.sets(st.integers(0, COUNT * B - 1)))
    def reset_fork(self, rows):
        with self.mesh():
            self.forked = self.forked.reset(jnp.asarray([*rows], jnp.int32))
        self.own = copy.deepcopy(self.own)
        for row in rows:
            self.own.rows[row], self.own.lengths[row] = {}, self.begins[row]

    def forked_model(self):
        """What the rows of the fork are to hold: the tokens of their prompts, and their own."""
        model = Model(rows=COUNT * B)
        model.lengths = self.own.lengths
        model.rows = [self.prompt.rows[i // COUNT] | row for i, row in enumerate(self.own.rows)]
        return model

    @rule()
    def attend(self):
        """The last two tokens of each row, of the cache and of the fork."""
        self.step += 1
        caches = [(self.cache, self.model)]
        if self.forked is not None:
            caches.append((self.forked, self.forked_model()))
        reach = None if self.window is None else (self.window, 0)
        for cache, model in caches:
            rng = np.random.default_rng(self.step)
            query = rng.standard_normal((len(model.rows), 2, N, H))
            places = np.array(model.lengths)[:, None] - [2, 1]
            with self.mesh():
                state = attend(cache, jnp.asarray(query), jnp.asarray(places, jnp.int32))
            judge = model.problem(query, places, is_causal=True, local_window_size=reach)
            close(tuple(state), dense(judge), type(cache).__name__)

    def without_a_token(self):
        """The cache as another process may save it, and its model."""
        with self.mesh():
            cache = self.cache.evict(jnp.ones(B, jnp.int32))
        model = copy.deepcopy(self.model)
        rows = zip(model.lengths, model.rows, strict=True)
        model.evict([n - len(row) + 1 for n, row in rows])
        return cache, model

    def loaded(self, *models):
        """The cache in the folder, and which of the models it holds."""
        with self.mesh():
            cache = KVCache.load(self.folder, parallel=PLACES[self.place])
            for model in models:
                with contextlib.suppress(AssertionError):
                    check_held(cache, model)
                    return cache, copy.deepcopy(model)
        raise AssertionError("what is loaded was not saved")

    @rule(at=steps)
    def save(self, at):
        """While it runs, another process saves."""
        cache, model = self.without_a_token()
        refused = []

        def save():
            try:
                cache.save(self.folder)
                refused.append(False)
            except OSError as error:
                assert "wanted no other save into this folder" in str(error)
                refused.append(True)

        with failing(), meanwhile(save, at):
            self.cache.save(self.folder)
        assert len(contents(self.folder)) == 2
        candidates = [self.model] if refused in ([], [True]) else [self.model, model]
        _, self.saved = self.loaded(*candidates)

    @precondition(lambda self: self.saved is not None)
    @rule(place=places, at=steps)
    def load(self, place, at):
        """While it runs, another process saves."""
        cache, model = self.without_a_token()
        if self.forked is not None:
            self.forked.prompt.save(self.folder_of_fork / "prompt")
            self.forked.own.save(self.folder_of_fork / "own")
        self.place = place
        if self.forked is not None:
            with self.mesh():
                parts = (self.folder_of_fork / name for name in ("prompt", "own"))
                self.forked = ForkedCache(
                    *(KVCache.load(part, parallel=PLACES[place]) for part in parts)
                )
        with failing(), meanwhile(lambda: cache.save(self.folder), at) as other:
            self.cache, self.model = self.loaded(self.saved, model)
        if other.acted:
            self.saved = model

    @invariant()
    def is_as_the_model(self):
        with self.mesh():
            check_held(self.cache, self.model)
            check_balanced(self.cache)
            if self.forked is not None:
                check_held(self.forked.prompt, self.prompt)
                check_held(self.forked.own, self.own)

    def teardown(self):
        for folder in (self.folder, self.folder_of_fork):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.full
def test_histories():
    """A token lost, kept too long or in the wrong slot by what came before, on whatever mesh that was."""
    run_state_machine_as_test(History, settings=settings(max_examples=16, stateful_step_count=24))
