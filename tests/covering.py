"""Few cases instead of a full product: every pair of values of two factors occurs in one."""

from collections.abc import Callable
from itertools import combinations, product


def every(factors: dict[str, list], allowed: Callable[..., bool] = lambda **_: True) -> list[dict]:
    """The full product, without what is not allowed."""
    rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return [row for row in rows if allowed(**row)]


def covering(
    factors: dict[str, list], allowed: Callable[..., bool] = lambda **_: True
) -> list[dict]:
    """A selection of :func:`every` that has each pair of values that occurs there.

    Greedy, always the same.
    """
    index = {name: {id(v): i for i, v in enumerate(values)} for name, values in factors.items()}

    def pairs(row: dict) -> set:
        marks = [(name, index[name][id(value)]) for name, value in row.items()]
        return set(combinations(marks, 2))

    rows = every(factors, allowed)
    pairs_of = [pairs(row) for row in rows]
    missing, chosen = set().union(*pairs_of), []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(pairs_of[i] & missing))
        chosen.append(rows[best])
        missing -= pairs_of[best]
    return chosen
