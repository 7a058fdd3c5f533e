"""The greedy allocation on losses whose best budgets are known."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_selective.budget.allocation import Step, allocate
from mlx_selective.cache.pruned import MIN_BUDGET


class Losses:
    """A loss to which each layer adds its weight / budget; counts how often it is asked."""

    def __init__(self, weights):
        self.weights, self.asked = weights, 0

    def __call__(self, budgets):
        self.asked += 1
        return sum(w / b for w, b in zip(self.weights, budgets, strict=True))


def run(loss, keys, most, **options):
    start = Step([keys] * len(loss.weights), loss([keys] * len(loss.weights)))
    return [start, *allocate(loss, start, most, **options)]


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(0, 20), min_size=1, max_size=5),
    keys=st.integers(2, 200),
    more=st.floats(0, 2),
    shrink=st.sampled_from([0.5, 0.75, 0.9]),
)
def test_every_state_is_smaller_and_within_the_threshold(weights, keys, more, shrink):
    loss = Losses(weights)
    most = loss([keys] * len(weights)) + more
    steps = run(loss, keys, most, shrink=shrink)
    for before, step in itertools.pairwise(steps):
        assert sum(step.budgets) < sum(before.budgets)
        assert sum(a != b for a, b in zip(before.budgets, step.budgets, strict=True)) == 1
    for step in steps:
        assert step.loss == loss(step.budgets) and min(step.budgets) >= MIN_BUDGET
        assert step.loss <= max(most, steps[0].loss)
    last = steps[-1].budgets
    for layer, budget in enumerate(last):  # at the end not one more key can go
        if budget > MIN_BUDGET:
            assert loss([*last[:layer], budget - 1, *last[layer + 1 :]]) > most


def test_it_comes_near_the_best_that_there_is():
    """Of the sums of w / b the smallest is where each b goes as the root of its w."""
    weights = np.array([0.1, 0.4, 1.6, 6.4])
    loss = Losses(weights)
    most = loss([512] * 4) + 0.5
    best = np.sqrt(weights) * np.sqrt(weights).sum() / most
    last = run(loss, 512, most)[-1].budgets
    assert sum(last) < 1.03 * best.sum()
    assert loss.asked < 400  # where every step tries all four layers, twice as many


def test_keys_that_cost_nothing_all_go():
    assert run(Losses([0.0, 0.0]), 64, 0.0)[-1].budgets == [MIN_BUDGET, MIN_BUDGET]


@pytest.mark.parametrize("keys", [2, 3])
def test_nothing_can_go(keys):
    assert len(run(Losses([1.0]), keys, 0.45)) == 1
