"""The pruned cache against the oracle's eviction, call by call."""

import copy

import mlx.core as mx
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer import SCALE, kept, run
from methods import error, float64, random_qkv
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    load_prompt_cache,
    save_prompt_cache,
)

from mlx_selective import PrunedKVCache, account

few_examples = settings(max_examples=25, deadline=None)


@st.composite
def chunkings(draw, T):
    """Chunk sizes that sum to T: long chunks, single tokens, and both mixed."""
    chunks = []
    while (left := T - sum(chunks)) > 0:
        chunks.append(min(left, draw(st.sampled_from([1, 1, 1, 2, 5, 13]))))
    return chunks


@few_examples
@given(
    seed=st.integers(0, 999),
    T=st.integers(1, 40),
    budget=st.sampled_from([2, 3, 7, 16, None]),
    heads=st.sampled_from([(1, 1), (4, 2), (2, 2)]),
    data=st.data(),
)
def test_evicts_as_the_oracle_does(seed, T, budget, heads, data):
    chunks = data.draw(chunkings(T))
    H, Hkv = heads
    (q, k, v), truth = random_qkv(seed, B=2, H=H, Hkv=Hkv, T=T, D=8)
    cache = PrunedKVCache(budget)
    output = run(cache, q, k, v, chunks)
    expected, positions, F = oracle.selective_pruned(*truth, SCALE, budget, chunks)
    assert error(output, expected) < 1e-5
    held, held_F, keys, values = kept(cache)
    assert (held == positions).all()
    assert np.allclose(held_F, F, rtol=1e-5, atol=1e-5)
    for row in range(2):
        assert (keys[row] == np.array(k)[row][:, positions[row]]).all()
        assert (values[row] == np.array(v)[row][:, positions[row]]).all()
    assert cache.size() == positions.shape[1] == min(T, budget or T)
    assert cache.offset == T


@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 1, 1, 3], [1, 1, 1, 1, 1, 4]])
def test_ties_go_to_the_oldest(chunks):
    """Head 0 selects nothing, so every F is 0: a window with the first token remains."""
    (q, k, v), _ = random_qkv(0, T=9)
    q[:, 0] = 0
    cache = PrunedKVCache(4)
    run(cache, q, k, v, chunks)
    assert (kept(cache)[0] == [0, 6, 7, 8]).all()


def test_first_and_newest_stay_whatever_F_says():
    """Every query selects every key as hard as it can; the smallest budget keeps two."""
    q = k = mx.ones((1, 1, 20, 4)) * 3
    for chunks in ([1] * 20, [20], [7, 1, 1, 11]):
        cache = PrunedKVCache(2)
        run(cache, q, k, k, chunks)
        assert (kept(cache)[0] == [0, 19]).all()


@few_examples
@given(seed=st.integers(0, 999), T=st.integers(2, 30), data=st.data())
def test_a_budget_of_the_length_changes_nothing(seed, T, data):
    (q, k, v), _ = random_qkv(seed, T=T)
    chunks = data.draw(chunkings(T))
    limited, full = PrunedKVCache(T), PrunedKVCache(None)
    assert mx.array_equal(run(limited, q, k, v, chunks), run(full, q, k, v, chunks))
    for one, other in zip(kept(limited), kept(full), strict=True):
        assert (one == other).all()


def test_rows_prune_independently():
    (q, k, v), _ = random_qkv(5, B=3, T=30)
    together = PrunedKVCache(6)
    run(together, q, k, v, [9] + [1] * 21)
    rows = set()
    for row in range(3):
        alone, one = PrunedKVCache(6), slice(row, row + 1)
        run(alone, q[one], k[one], v[one], [9] + [1] * 21)
        assert (kept(alone)[0][0] == kept(together)[0][row]).all()
        rows.add(tuple(kept(together)[0][row]))
    assert len(rows) == 3, "the rows of this test should keep different keys"


def test_a_call_that_was_not_ended_is_told():
    (q, k, v), _ = random_qkv(0, T=4)
    cache = PrunedKVCache(8)
    cache.update_and_fetch(k, v)
    with pytest.raises(RuntimeError, match="prune"):
        cache.update_and_fetch(k, v)


def test_a_call_with_other_rows_leaves_the_cache_as_it_was():
    (q, k, v), _ = random_qkv(0, B=1, T=12)
    cache = PrunedKVCache(5)
    run(cache, q, k, v, [10])
    before = kept(cache)
    two = mx.concatenate([k, k], axis=0)[:, :, :1]
    with pytest.raises(ValueError, match="holds 1 rows, the call has 2"):
        cache.update_and_fetch(two, two)
    assert cache.offset == 10
    assert all((one == other).all() for one, other in zip(before, kept(cache), strict=True))
    run(cache, q, k, v, [1, 1])


@pytest.mark.parametrize("later", [3, 7, 20, None])
def test_the_budget_of_a_running_cache_may_change(later):
    """What was evicted stays away; from then on the new budget holds."""
    (q, k, v), _ = random_qkv(4, T=40)
    cache = PrunedKVCache(5)
    run(cache, q, k, v, [10, 1, 1])
    cache.budget = later
    for step, chunk in enumerate([1, 1, 1, 6, 1, 1]):
        before = cache.size()
        run(cache, q, k, v, [chunk])
        assert cache.size() == min(before + chunk, later or 40), step
        positions = kept(cache)[0]
        assert positions.shape == (2, cache.size())
        assert (positions[:, 0] == 0).all() and (positions[:, -1] == cache.offset - 1).all()
        assert all(len(set(row)) == cache.size() for row in positions)


def test_memory_is_freed():
    (q, k, v), _ = random_qkv(1, B=1, H=2, Hkv=2, T=1200, D=32)
    cache = PrunedKVCache(64)
    run(cache, q, k, v, [600])
    after_prompt = cache.nbytes
    assert after_prompt == 65 * (2 * 2 * 32 * 4 + 4 + 4)
    run(cache, q, k, v, [1] * 300 + [300])
    assert cache.nbytes == after_prompt
    mx.eval(cache.state)
    assert sum(array.size for array in (cache.keys, cache.values)) == 2 * 65 * 2 * 32
    # beyond the arrays themselves nothing is held back
    del q, k, v
    mx.synchronize()  # a GPU frees a buffer only when its queue has passed it
    mx.clear_cache()
    active = mx.get_active_memory()
    del cache
    # a GPU's allocator hands out whole pages
    allowed = 2 if mx.default_device() == mx.cpu else 10
    assert active - mx.get_active_memory() <= allowed * after_prompt


def test_grows_in_steps_until_the_budget():
    (q, k, v), _ = random_qkv(1, B=1, T=700, D=4)
    cache = PrunedKVCache(300)
    slots = []
    for start in range(0, 400):
        run(cache, q, k, v, [1])
        slots.append(cache.keys.shape[2])
        assert cache.offset == start + 1
    assert sorted(set(slots)) == [256, 301]
    assert slots.index(301) == 256


@pytest.mark.parametrize("tokens", [0, 5, 30])
@pytest.mark.parametrize("budget", [None, 8])
def test_saved_and_copied_caches_go_on_equally(tokens, budget, tmp_path):
    (q, k, v), _ = random_qkv(6, T=50)
    cache = PrunedKVCache(budget)
    if tokens:
        run(cache, q, k, v, [tokens - 1, 1])
    save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
    (loaded,) = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    copied = copy.deepcopy(cache)
    assert type(loaded) is PrunedKVCache
    assert (loaded.offset, loaded.size(), loaded.budget) == (tokens, cache.size(), budget)
    expected = run(cache, q, k, v, [3, 1, 1, 9])
    assert mx.array_equal(run(loaded, q, k, v, [3, 1, 1, 9]), expected)
    assert mx.array_equal(run(copied, q, k, v, [3, 1, 1, 9]), expected)


def test_half_precision_keeps_F_in_float32():
    (q, k, v), _ = random_qkv(2, T=40, dtype="bfloat16")
    cache = PrunedKVCache(8)
    run(cache, q, k, v, [20] + [1] * 20)
    assert (cache.F.dtype, cache.positions.dtype) == (mx.float32, mx.int32)
    assert (cache.keys.dtype, cache.values.dtype) == (mx.bfloat16, mx.bfloat16)


def test_is_never_trimmed():
    assert PrunedKVCache(8).is_trimmable() is False


def test_account_counts_bytes():
    (q, k, v), _ = random_qkv(3, B=1, H=2, Hkv=2, T=600, D=8)
    caches = [PrunedKVCache(32), PrunedKVCache(None), KVCache()]
    for cache in caches[:2]:
        run(cache, q, k, v, [600])
    caches[2].update_and_fetch(k, v)
    held = account(caches)
    full = 3 * 768 * 2 * 2 * 8 * 4  # 600 tokens lie in 3 steps of 256 slots
    assert held.full_bytes == full
    assert held.bytes == sum(cache.nbytes for cache in caches)
    assert caches[0].nbytes == 33 * (2 * 2 * 8 * 4 + 8)
    assert (held.kept, held.budget, held.tokens) == ([32, 600, 600], [32, None, None], 600)
    assert account([PrunedKVCache(4)]).to_json() == {
        "budget": 4,
        "kept": 0,
        "bytes": 0,
        "full_bytes": 0,
    }
    assert float64(caches[0].F).shape == (1, 33)


def test_account_of_caches_of_other_kinds():
    """Quantised keys and states that do not grow are counted as they are."""
    _, k, v = random_qkv(3, B=1, H=2, Hkv=2, T=40, D=64)[0]
    quantised, state = QuantizedKVCache(group_size=64, bits=8), ArraysCache(2)
    quantised.update_and_fetch(k, v)
    state[0] = state[1] = mx.zeros((1, 8))
    held = account([quantised, state])
    assert held.bytes == held.full_bytes == quantised.nbytes + state.nbytes > 0
    assert (held.tokens, held.kept) == (40, [40, 0])
