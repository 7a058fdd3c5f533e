"""A whole text at once is what a pruned cache reads token by token, or chunk by chunk."""

import mlx.core as mx
import numpy as np
import pytest
from feeding import ROUNDING, difference, feed
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import grafted, tokens

from mlx_selective.attention.selective import as_decoded
from mlx_selective.attention.selective.as_decoded import last_queries


def true_last_queries(S, budget):
    """Key by key, as the rule is told, for one row."""
    N, F, kept, last = len(S), np.zeros(len(S), np.float32), [], [len(S) - 1] * len(S)
    for token in range(N):
        kept.append(token)
        F = F + S[token]
        if len(kept) > budget:
            leaves = max((j for j in kept if j not in (0, token)), key=lambda j: (F[j], -j))
            kept.remove(leaves)
            last[leaves] = token
    return last


@settings(max_examples=40, deadline=None)
@given(
    N=st.sampled_from([1, 2, 7, 33]),
    budget=st.integers(2, 40),
    seed=st.integers(0, 99),
    b=st.integers(1, 3),
)
def test_keys_leave_as_the_rule_says(N, budget, seed, b):
    rng = np.random.default_rng(seed)
    S = np.maximum(rng.integers(-3, 3, (b, N, N)), 0).astype(np.float32)  # many are equal
    S *= (np.arange(N) > 0) & (np.arange(N) < np.arange(N)[:, None])
    expected = [true_last_queries(one, budget) for one in S]
    assert last_queries(S, budget).tolist() == expected


@pytest.mark.parametrize("chunk", [1, 4, 7])
@pytest.mark.parametrize("budget", [2, 9, 33, None, [3, None, 12]])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_model_reads_as_with_a_cache(family, budget, chunk):
    model = grafted(family, {"kind": "selective", "budget": budget})
    ids = tokens(3, 33)
    chunks = [chunk] * (33 // chunk) + ([33 % chunk] if 33 % chunk else [])
    expected = feed(model, ids, chunks)[0]
    with as_decoded(chunk):
        found = model(ids)
    assert difference(found, expected) < ROUNDING
    if budget != 33 and budget is not None:
        assert difference(model(ids), expected) > 1e-3  # which keys leave does matter


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_and_a_gain(dtype):
    model = grafted("llama", {"kind": "selective", "budget": 8, "gain": 0.5})
    model.set_dtype(dtype)
    ids = tokens(2, 20)
    expected = feed(model, ids, [1] * 20)[0]
    with as_decoded():
        found = model(ids)
    assert found.dtype == dtype and difference(found, expected) < 0.05


def test_outside_of_the_block_nothing_leaves():
    model = grafted("llama", {"kind": "selective", "budget": 3})
    ids = tokens(1, 20)
    before = model(ids)
    with pytest.raises(RuntimeError), as_decoded():
        raise RuntimeError
    assert mx.array_equal(model(ids), before)
    with pytest.raises(ValueError, match="at least 1"), as_decoded(0):
        pass
