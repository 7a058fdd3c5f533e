"""The rules that benchmarks/eviction_rules.py compares with, told key by key."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "eviction_rules.py"
SPEC = importlib.util.spec_from_file_location("eviction_rules", FILE)
rules = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(rules)


def seen(last, query):
    return [key for key in range(query + 1) if last[key] >= query]


@pytest.mark.parametrize("budget", [6, 9, 40])
def test_the_window_keeps_the_first_four_and_the_newest(budget):
    (last,) = rules.window(np.zeros((1, 30, 30), np.float32), budget, None)
    for query in range(30):
        newest = range(max(4, query - (budget - 4)), query + 1)  # and its own key
        assert seen(last, query) == [*range(min(4, query + 1)), *newest]


@pytest.mark.parametrize("budget", [6, 11])
def test_h2o_lets_the_least_attended_go(budget):
    rng = np.random.default_rng(0)
    N, recent = 25, budget // 2
    z = rng.normal(0, 2, (2, 3, N, N)).astype(np.float32)
    z = np.where(np.tril(np.ones((N, N), bool)), z, -np.inf)
    found = rules.heavy_hitters(np.zeros((2, N, N), np.float32), budget, lambda: z)
    for row in range(2):
        kept, total, last = [], np.zeros(N), [N - 1] * N
        for query in range(N):
            kept.append(query)
            for head in range(3):
                weights = np.exp(z[row, head, query, kept])
                total[kept] += weights / weights.sum()
            if len(kept) > budget:
                leaves = min((key for key in kept if key <= query - recent), key=lambda k: total[k])
                kept.remove(leaves)
                last[leaves] = query
        assert found[row].tolist() == last
