"""Selection of cases: of a product, enough that each value of each parameter is met once; of long ones, a part.

`make test` leaves out what is marked `full`. The gate runs a part of that, another one each time, and more of those
folders whose code has changed lately: `--shard` and `--touched`.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def cover(rows: Sequence[Sequence[Any]]) -> set[int]:
    """The places of a few rows that have, column by column, every value that all rows have.

    Rows of values that have been met least come first, so that columns are met evenly: of implementations and
    problems, each problem by another implementation than the one before.
    """
    met: list[Counter] = [Counter() for _ in rows[0]] if rows else []
    wanted = [list(dict.fromkeys(column)) for column in zip(*rows, strict=True)]
    chosen: set[int] = set()
    for column in sorted(range(len(wanted)), key=lambda i: -len(wanted[i])):
        for value in wanted[column]:
            if met[column][value]:
                continue
            found = [i for i, row in enumerate(rows) if row[column] == value]
            best = min(found, key=lambda i: [sum(map(lambda m, x: m[x], met, rows[i])), i])
            chosen.add(best)
            for counts, x in zip(met, rows[best], strict=True):
                counts[x] += 1
    return chosen


def pairwise(*columns: Sequence[Any]) -> list[tuple]:
    """Rows in which any two values of different columns meet: what a product of three or more tells, in fewer cases.

    Greedy, and the same each time: a row begins with the pair that has waited longest, and each further column has the
    value that meets most others for the first time.
    """
    sizes = [range(len(column)) for column in columns]
    waiting = {
        ((i, x), (j, y)): None
        for i, j in itertools.combinations(range(len(columns)), 2)
        for x, y in itertools.product(sizes[i], sizes[j])
    }
    rows = []
    while waiting:
        row = dict(next(iter(waiting)))
        for i in range(len(columns)):
            if i not in row:
                news = {x: sum(_pair(i, x, *at) in waiting for at in row.items()) for x in sizes[i]}
                row[i] = max(news, key=lambda x, news=news: (news[x], -x))
        for a, b in itertools.combinations(sorted(row.items()), 2):
            waiting.pop((a, b), None)
        rows.append(tuple(columns[i][row[i]] for i in range(len(columns))))
    return rows


def _pair(i: int, x: int, j: int, y: int) -> tuple:
    return ((i, x), (j, y)) if i < j else ((j, y), (i, x))


def few(values: Sequence[Any], *kept: Any) -> list[Any]:
    """Values of one parameter, of which `make test` runs those that are kept."""
    names = {str(x) for x in kept}  # problems hold arrays, which are neither equal nor not
    return [x if str(x) in names else pytest.param(x, marks=pytest.mark.full) for x in values]


def few_rows(rows: Sequence[tuple], count: int = 1) -> list[Any]:
    """Values of several parameters at once, of which `make test` runs the first ones."""
    rest = (pytest.param(*row, marks=pytest.mark.full) for row in rows[count:])
    return [*rows[:count], *rest]


def mark_products(items: Iterable[pytest.Item]) -> None:
    """Marks as `full` what `cover` leaves out of the tests that are marked `product`."""
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("product") and not item.get_closest_marker("full"):
            products.setdefault(item.nodeid.split("[")[0], []).append(item)
    for tests in products.values():
        # by what their ids say: arrays and functions have no order, and some no equality
        chosen = cover([_parameters(item) for item in tests])
        for i, item in enumerate(tests):
            if i not in chosen:
                item.add_marker("full")


def _parameters(item: Any) -> list[str]:
    found = item.callspec.params
    return [f"{name}={_text(value)}" for name, value in sorted(found.items())]


def _text(value: Any) -> str:
    return value.__name__ if callable(value) and hasattr(value, "__name__") else str(value)


# So many long cases of lately touched folders run beside a shard: where more is touched, a part of them.
TOUCHED = 150


def rotate(items: Sequence[Any], shard: str, touched: Sequence[str]) -> list[Any]:
    """The items without those that are marked `full` and have no turn: in `"2/6"`, the second, eighth ... have one.

    Of those in folders that were `touched`, up to about `TOUCHED` run as well.
    """
    number, count = (int(x) for x in shard.split("/"))
    long = [item for item in items if item.get_closest_marker("full")]
    turn = long[number - 1 :: count]
    rest = [item for item in long if item.nodeid.startswith(tuple(f"{x}/" for x in touched))]
    every = math.ceil(len(rest) / TOUCHED) or 1
    chosen = {id(item) for item in [*turn, *rest[number % every :: every]]}
    return [x for x in items if id(x) in chosen or not x.get_closest_marker("full")]
