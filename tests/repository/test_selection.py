"""What `make test` leaves to `make test-full` is a choice that anyone can repeat, and leaves no value out."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.selection import cover


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
    assert (len(session) - len(full), len(session)) in {(3, 3), (3, 6), (0, 3)}
