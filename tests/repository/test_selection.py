"""What `make test` leaves to `make test-full` is a choice that anyone can repeat, and leaves no value out."""

import itertools
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.selection import TOUCHED, cover, pairwise, rotate


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.booleans()), max_size=30))
def test_cover(rows):
    """A dtype, a merge or an implementation that no test of `make test` meets."""
    chosen = [rows[i] for i in sorted(cover(rows))]
    for met, all_ in itertools.zip_longest(zip(*chosen, strict=True), zip(*rows, strict=True)):
        assert set(met) == set(all_)
    assert cover(rows) == cover(rows)


def test_cover_is_even():
    """Twelve problems by three implementations: twelve tests, four by each, not ten by one."""
    rows = list(itertools.product("abc", range(12)))
    chosen = [rows[i] for i in cover(rows)]
    assert len(chosen) == 12
    assert {sum(name == x for name, _ in chosen) for x in "abc"} == {4}


@pytest.mark.product
@pytest.mark.parametrize("x", [1, 2, 3])
@pytest.mark.parametrize("y", ["u", "v"])
def test_products_are_thinned(request, x, y):
    """A marker that does nothing: each row of two would run in `make test`."""
    session = [i for i in request.session.items if i.name.startswith("test_products_are_thinned")]
    full = [i for i in session if i.get_closest_marker("full")]
    assert len(session) - len(full) in (0, 3) and len(full) <= 3


def test_pairs_all_meet():
    """Two values of different columns that no row has together, or a list as long as the product."""
    columns = range(11), "abcde", (True, False), range(4)
    rows = pairwise(*columns)
    for i, j in itertools.combinations(range(4), 2):
        met = {(row[i], row[j]) for row in rows}
        assert met == set(itertools.product(columns[i], columns[j]))
    assert 55 <= len(rows) <= 60 and rows == pairwise(*columns)


def case(nodeid, full=True):
    """A case, marked `full` or not."""
    return types.SimpleNamespace(nodeid=nodeid, full=full, get_closest_marker=lambda name: full)


def test_shards_are_all():
    """A long case that no shard has; one that two have; or a short one that is left out."""
    items = [case(f"tests/a/test_a.py::test[{i}]", full=i % 3 != 1) for i in range(40)]
    shards = [rotate(items, f"{n}/4", []) for n in range(1, 5)]
    for item in items:
        assert sum(item in shard for shard in shards) == (1 if item.full else 4)


def test_more_of_what_was_touched():
    """A change whose own long cases wait for their turn, or a large change that runs all of them."""
    few, many = (
        [case(f"tests/{x}/test_a.py::t[{i}]") for i in range(n)] for x, n in (("a", 9), ("b", 999))
    )
    assert rotate(few, "1/9", ["tests/a"]) == few
    assert len(rotate(few, "1/9", ["tests/aa"])) == 1
    assert 111 < len(rotate(many, "1/9", ["tests/b"])) <= 111 + TOUCHED
